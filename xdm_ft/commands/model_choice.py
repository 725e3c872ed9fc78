"""The options that choose a model of a run directory, which several verbs have."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xdm_ft.export.runs import Choice


def add_choice(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--method", help="name of the method in results.json; of a run without it: the best validated")
    sub.add_argument("--test-domain", metavar="DOMAIN", help="held-out domain; several joined by commas")
    sub.add_argument("--seed", type=int)
    sub.add_argument("--trial", type=int, help="trial of a search")


def choice_of(arguments: argparse.Namespace) -> Choice:
    from xdm_ft.export.runs import Choice

    test_domains = None if arguments.test_domain is None else tuple(arguments.test_domain.split(","))
    return Choice(arguments.method, test_domains, arguments.seed, arguments.trial)
