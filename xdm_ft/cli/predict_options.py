"""The options of `xdm-ft predict`. Nothing heavy is imported before the verb is called."""

from __future__ import annotations

import argparse

from xdm_ft.cli.answer import Answer
from xdm_ft.cli.model_choice import add_choice, choice_of


def add(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("dir", metavar="DIR", help="a model directory, or a run directory")
    what = "image, folder, quoted glob, table (CSV or Parquet) with a column path, or - (paths on standard input)"
    sub.add_argument("paths", metavar="PATH", nargs="+", help=what)
    sub.add_argument("--out", metavar="FILE", help="appears when it is complete; default: standard output")
    by = "default: by the suffix of --out, else csv"
    sub.add_argument("--format", choices=["csv", "jsonl", "parquet"], help=by)
    sub.add_argument("--probabilities", action="store_true", help="a column p:CLASS for each class")
    sub.add_argument("--top-k", type=int, metavar="K", help="columns label_1, probability_1 … of the K best classes")
    sub.add_argument("--entropy", action="store_true", help="entropy of the probabilities, in nats")
    spread = "standard deviation of the label's probability over the heads of an ensemble"
    sub.add_argument("--spread", action="store_true", help=spread)
    far = "columns distance and distance_percentile: how unusual an image is for the model (docs/deploying.md)"
    sub.add_argument("--distance", action="store_true", help=far)
    abstain = "leave the label empty where its probability is lower"
    sub.add_argument("--abstain-below", type=float, metavar="P", help=abstain)
    group = "a row per group, with the mean of its images' probabilities: a column of the tables, or an expression"
    sub.add_argument("--group-by", metavar="REGEX|COLUMN", help=f"{group} that matches it in the paths")
    sub.add_argument("--resume", action="store_true", help="continue the unfinished predictions of --out, if any")
    strict = "exit status 2 if an image can not be read, or a folder holds other files"
    sub.add_argument("--strict", action="store_true", help=strict)
    sub.add_argument("--encoder-weights", metavar="FILE", help="the encoder's weights, if the model lacks them")
    sub.add_argument("--device", help="as in torch; default: a GPU if there is one")
    sub.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: that of the run")
    sub.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="images per forward pass (default: 16 on a CPU, 64 on a GPU), which takes as long for fewer",
    )
    add_choice(sub)


def called(arguments: argparse.Namespace) -> Answer:
    """Performs the verb. Raises `UserError`."""
    from xdm_ft.cli.predict import output, predict
    from xdm_ft.export.predict import Columns

    flags = arguments.probabilities, arguments.entropy, arguments.spread
    others = {
        "columns": Columns(*flags, arguments.top_k, arguments.distance, arguments.abstain_below),
        "group_by": arguments.group_by,
        "resume": arguments.resume,
        "strict": arguments.strict,
    }
    return predict(
        arguments.dir,
        arguments.paths,
        output(arguments.out, arguments.format, arguments.json, **others),
        choice=choice_of(arguments),
        encoder_weights=arguments.encoder_weights,
        device=arguments.device,
        precision=arguments.precision,
        batch_size=arguments.batch_size,
    )
