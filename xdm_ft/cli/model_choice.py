"""The options that choose a model of a run directory, which several verbs have."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xdm_ft.export.choose import Choice


def add_choice(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--method", help="name of the method in results.json (default: the one that validation prefers)")
    held_out = "a model that was trained without this domain, instead of the final fit; several joined by commas"
    sub.add_argument("--held-out", metavar="DOMAIN", help=held_out)
    sub.add_argument("--seed", type=int, help="with --held-out: the seed (default: the first)")
    sub.add_argument("--trial", type=int, help="with --held-out: the trial of a search (default: the one picked)")


def choice_of(arguments: argparse.Namespace) -> Choice:
    from xdm_ft.export.choose import Choice

    held_out = None if arguments.held_out is None else tuple(arguments.held_out.split(","))
    return Choice(arguments.method, held_out, arguments.seed, arguments.trial)
