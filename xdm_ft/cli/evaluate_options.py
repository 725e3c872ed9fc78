"""The options of `xdm-ft evaluate`. Nothing heavy is imported before the verb is called."""

from __future__ import annotations

import argparse

from xdm_ft.cli.answer import Answer
from xdm_ft.cli.model_choice import add_choice, choice_of


def add(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="a model directory or a run directory")
    sub.add_argument(
        "site",
        metavar="SITE",
        help="folder <class>/<image> or <domain>/<class>/<image>, or a CSV or Parquet table with columns path, label; "
        "optional: domain, group",
    )
    sub.add_argument("--group", metavar="REGEX", help="for an image's path: what it matches is the image's group")
    sub.add_argument("--domain", metavar="NAME", nargs="+", help="evaluate these domains only")
    sub.add_argument("--encoder-weights", metavar="FILE", help="of a model directory that lacks them")
    sub.add_argument("--device", help="as in torch; default: a GPU if there is one")
    sub.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: that of the run")
    by = "images per forward pass (default: 16 on a CPU, 64 on a GPU)"
    sub.add_argument("--batch-size", metavar="N", type=int, help=by)
    add_choice(sub)


def called(arguments: argparse.Namespace) -> Answer:
    """Performs the verb. Raises `UserError`."""
    from xdm_ft.cli.evaluate import evaluate
    from xdm_ft.export.predictor import load

    model = load(
        arguments.model,
        device=arguments.device,
        precision=arguments.precision,
        encoder_weights=arguments.encoder_weights,
        choice=choice_of(arguments),
    )
    return evaluate(
        model,
        arguments.model,
        arguments.site,
        group=arguments.group,
        domains=arguments.domain,
        batch_size=arguments.batch_size,
    )
