"""`xdm-ft predict`: classes and probabilities of images, as a table."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xdm_ft.cli import CommandResult
from xdm_ft.cli.arguments import STORED
from xdm_ft.export.choose import Choice
from xdm_ft.export.predict import ExtraColumns, Format, Predictions, Tally, open_unfinished, refuse_taken
from xdm_ft.export.predictor import ImageBatch, Model, cache_of, load, stream
from xdm_ft.export.rows import items_of
from xdm_ft.export.sources import Sources
from xdm_ft.features import fast_batch_size
from xdm_ft.image_files.files import count_files
from xdm_ft.new_site.measure import read_threshold
from xdm_ft.new_site.stored import read_unknown
from xdm_ft.runtime import interrupt
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.progress import progress
from xdm_ft.runtime.terminal import write_data
from xdm_ft.storage import digest, json_digest, tensors_digest
from xdm_ft.storage.names import expand_user
from xdm_ft.version import __version__

WITH_RESUME = "run the same command with --resume to resume"
logger = logging.getLogger("xdm_ft")


def choice_of(arguments: argparse.Namespace) -> Choice:
    held_out = None if arguments.held_out is None else tuple(arguments.held_out.split(","))
    return Choice(arguments.method, held_out, arguments.seed, arguments.trial)


def check_batch_size(arguments: argparse.Namespace) -> None:
    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise UserError(f"--batch-size: {arguments.batch_size} is not positive")


def load_model(arguments: argparse.Namespace) -> Model:
    """Returns the model of the options of `add_model_options`. Raises `UserError`."""
    placement = {"device": arguments.device, "precision": arguments.precision}
    return load(arguments.model, **placement, encoder_weights=arguments.encoder_weights, choice=choice_of(arguments))


def output_of(arguments: argparse.Namespace) -> tuple[Path | None, Format]:
    """Returns the file to write (None: standard output) and its format. Raises `UserError` if they do not fit."""
    if arguments.json and arguments.out is None:
        problem = "--json: prints a summary, so the predictions need --out FILE; to print them as JSON lines, use"
        raise UserError(f"{problem} --format jsonl instead")
    out = None if arguments.out is None else expand_user(arguments.out, "--out")
    formats: dict[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
    format_: Format | None = arguments.format or formats.get(".csv" if out is None else out.suffix.lower())
    if format_ is None:
        remedy = "end it in .csv, .jsonl or .parquet, or add --format"
        raise UserError(f"--out {out}: the name asks for no known format; {remedy}")
    if out is None and (format_ == "parquet" or arguments.resume):
        option = "--format parquet" if format_ == "parquet" else "--resume"
        raise UserError(f"{option}: needs a file; add --out FILE")
    return out, format_


def must_not_change(
    arguments: argparse.Namespace, model: Model, columns: ExtraColumns, batch_size: int
) -> dict[str, Any]:
    """Returns what must be as it was for predictions to be resumed."""
    # the checksum of the encoder's tensors is in the config; an architecture in a file of its own is not
    described = [model.config.model_dump(mode="json"), model.module.encoder.identity()]
    heads = {name: t for name, t in model.module.state_dict().items() if not name.startswith("encoder.")}
    return {
        "xdm_ft": __version__,
        "model": digest(json_digest(described), tensors_digest(heads)),
        "device": model.device.type,
        "precision": model.module.precision,
        **dataclasses.asdict(columns),
        "group_by": arguments.group_by,
        "batch_size": batch_size,
    }


def print_rows(batches: Iterable[ImageBatch], table: Predictions, grouped: bool) -> Tally:
    """Prints the rows of each batch as soon as it is predicted; `grouped`: the rows of groups, at the end."""
    tally, header = Tally(), table.header
    for batch in batches:
        rows = list(table.rows_of(batch))
        tally.add(rows)
        if grouped:
            table.add_to_groups(rows)
        else:
            write_data(header + b"".join(map(table.line, rows)))
            header = b""
    if rows_of_groups := [*map(table.line, table.group_rows())]:
        write_data(header + b"".join(rows_of_groups))
    return tally


def main(arguments: argparse.Namespace) -> CommandResult:
    """Predicts the images of `paths`, see `Sources`, and writes their rows.

    Raises `UserError` for a path that does not exist, a model that cannot be loaded, or options that do not fit it.
    """
    check_batch_size(arguments)  # before the images are counted, which may take minutes
    out, format_ = output_of(arguments)
    sources = Sources(arguments.paths, arguments.group_by)
    if out is not None:
        # at once, as listing the images and loading the model may take minutes
        refuse_taken(out, arguments.resume)
    model = load_model(arguments)
    encoder = model.config.encoder
    total = sources.of_model(encoder).count()
    if encoder.reads_features and encoder.settings.get("unit") != "slide":
        total = None  # until the files are read
    flags = arguments.probabilities, arguments.entropy, arguments.spread, arguments.top_k, arguments.distance
    grouped = arguments.group_by is not None and encoder.settings.get("unit") != "group"
    threshold = arguments.abstain_below
    if threshold == STORED:
        if grouped:
            raise UserError(f"--abstain-below {STORED}: is for single images; leave out --group-by, or give a number")
        threshold = read_threshold(model).threshold
    is_unknown = read_unknown(model, arguments.model).is_unknown if arguments.unknown else None
    table = Predictions(model, ExtraColumns(*flags, arguments.unknown, threshold), format_, grouped, is_unknown)
    size = arguments.batch_size or fast_batch_size(model.device.type)
    items, resumed = items_of(sources, encoder, sources.with_group), 0
    with progress("predicting", total, "images") as bar:

        def batches() -> Iterator[ImageBatch]:
            unreadable = 0
            for batch in stream(model, items, batch_size=size, cache=cache_of(arguments.model)):
                yield batch
                unreadable += len(batch.unreadable)
                bar.advance(len(batch.items), f"{unreadable} unreadable" if unreadable else "")

        if out is None:
            tally = print_rows(batches(), table, grouped)
        else:
            settings = must_not_change(arguments, model, table.columns, size)
            with (
                open_unfinished(out, settings, arguments.resume) as unfinished,
                interrupt.announce_resume(WITH_RESUME),
            ):
                unfinished.skip_done(items)
                tally, resumed = unfinished.tally, unfinished.tally.images
                bar.skip(resumed)
                for batch in batches():
                    unfinished.add(table.rows_of(batch))
                unfinished.flush()
                if grouped:
                    table.add_to_groups(unfinished.rows())
                rows_of_table = table.group_rows() if grouped else unfinished.rows()
                if tally.images:
                    unfinished.complete(lambda path: table.write(path, rows_of_table))

    predicted, groups = tally.images - tally.unreadable, table.groups
    document = {
        "out": out,
        "predicted": predicted,
        "groups": groups,
        "unreadable": tally.unreadable,
        "unreadable_images": tally.named,
        "other_files": dict(sources.others),
        "computed": table.computed,
        "resumed": resumed,
        "strict": arguments.strict,
    }
    faults = []
    if tally.unreadable:
        named = [f"{path} ({reason})" for path, reason in tally.named.items()]
        more = f", {tally.unreadable - len(named)} more" if tally.unreadable > len(named) else ""
        faults.append(f"{plural(tally.unreadable, 'image')} cannot be read: {', '.join(named)}{more}")
    if sources.others:
        faults.append(count_files(sources.others))
    status, error = 2 if arguments.strict and faults else 0, None
    if predicted:
        for line in faults:
            logger.warning("%s", line)
    else:
        first, *others = faults if tally.unreadable else ["none is listed", *faults]
        table_of_faults = f"; {out} has a row of each" if tally.unreadable and out is not None else ""
        error = UserError(f"no image was predicted: {first}{table_of_faults}", *others)
    in_groups = "" if groups is None else f" in {plural(groups, 'group')}"
    lines = [] if out is None else [f"wrote {out}: predictions of {plural(predicted, 'image')}{in_groups}"]
    return CommandResult(document, lines, error, status)
