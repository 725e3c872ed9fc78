"""`xdm-ft predict`: classes and probabilities of images, as a table."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from xdm_ft.cli.answer import Answer
from xdm_ft.export.choose import Choice
from xdm_ft.export.predict import (
    Columns,
    Format,
    GroupMeans,
    Row,
    Tally,
    Unfinished,
    format_of,
    group_rows,
    header_of,
    image_rows,
    line_of,
    open_unfinished,
    refuse_taken,
    write_table,
)
from xdm_ft.export.predictor import Batch, Model, cache_of, load, stream
from xdm_ft.export.sources import Sources, counted
from xdm_ft.features import fast_batch_size
from xdm_ft.runtime import interrupt
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.progress import Progress, progress
from xdm_ft.runtime.terminal import write_data
from xdm_ft.storage.digests import digest, json_digest, tensors_digest
from xdm_ft.storage.names import expanded
from xdm_ft.version import __version__

logger = logging.getLogger("xdm_ft")
WITH_RESUME = "run the same command with --resume to resume"


@dataclass(frozen=True)
class Predicted(Answer):
    out: Path | None  # None: the predictions were printed
    predicted: int  # number of images
    groups: int | None  # None: the rows are images
    unreadable: int  # number of images without a prediction
    unreadable_images: dict[str, str]  # the first of them → why
    other_files: dict[str, int]  # extension → number of the files in folders that are no images
    computed: int  # number of images that passed through the encoder now
    resumed: int  # number of images that an earlier command has done
    strict: bool  # whether unreadable images and other files are faults

    @property
    def error(self) -> UserError | None:
        if self.predicted:
            return None
        first, *more = self.faults() if self.unreadable else ["none is listed", *self.faults()]
        table = f"; {self.out} has a row of each" if self.unreadable and self.out is not None else ""
        return UserError(f"no image was predicted: {first}{table}", *more)

    @property
    def status(self) -> int:
        return 2 if self.strict and self.faults() else super().status

    def faults(self) -> list[str]:
        """Returns a line on images without a prediction, and one on other files."""
        named = [f"{printable(path)} ({reason})" for path, reason in self.unreadable_images.items()]
        more = self.unreadable - len(named)
        images = f"{plural(self.unreadable, 'image')} can not be read: {', '.join(named)}"
        unreadable = [f"{images}{f', {more} more' if more else ''}"] if self.unreadable else []
        return unreadable + ([counted(self.other_files)] if self.other_files else [])

    def text(self) -> str:
        groups = "" if self.groups is None else f" in {plural(self.groups, 'group')}"
        return printable(f"wrote {self.out}: predictions of {plural(self.predicted, 'image')}{groups}")

    def show(self) -> None:
        if self.out is not None:
            super().show()


@dataclass(frozen=True)
class Output:
    """What is written, and where."""

    columns: Columns = field(default_factory=Columns)
    group_by: str | None = None
    out: Path | None = None  # None: standard output
    format: Format = "csv"
    resume: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.out is None and (self.format == "parquet" or self.resume):
            option = "--format parquet" if self.format == "parquet" else "--resume"
            raise UserError(f"{option}: needs a file; add --out FILE")

    @property
    def grouped(self) -> bool:
        return self.group_by is not None


def output(out: str | None, format_: Format | None, json_is_wanted: bool, **others: Any) -> Output:
    """Raises `UserError` for options that do not go together."""
    if json_is_wanted and out is None:
        raise UserError(
            "--json: prints a summary, so that the predictions need --out FILE; to print them as JSON lines, use "
            "--format jsonl instead"
        )
    path = None if out is None else expanded(out, "--out")
    return Output(out=path, format=format_ or format_of(path), **others)


def predict(
    folder: str,
    paths: list[str],
    output: Output,
    *,
    choice: Choice,
    encoder_weights: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    batch_size: int | None = None,
) -> Predicted:
    """Predicts the images of `paths`, see `Sources`, and writes their rows.

    Raises `UserError` for a path that does not exist, a model that can not be loaded, or options that do not fit it.
    """
    sources = Sources(paths, output.group_by)
    if batch_size is not None and batch_size < 1:
        raise UserError(f"--batch-size: {batch_size} is not positive")
    if output.out is not None:
        refuse_taken(output.out, output.resume)
    total = sources.count()
    model = load(folder, device=device, precision=precision, encoder_weights=encoder_weights, choice=choice)
    output.columns.refuse(model, output.grouped)
    size = batch_size or fast_batch_size(model.device.type)
    batches = partial(stream, model, batch_size=size, cache=cache_of(folder))
    with progress("predicting", total, "images") as bar:
        if output.out is None:
            return _printed(_watched(batches(sources), bar), model, output, sources.others)
        about = {"xdm_ft": __version__, "model": _digest(model), **_options(model, output), "batch_size": size}
        with open_unfinished(output.out, about, output.resume) as unfinished, interrupt.resumed_by(WITH_RESUME):
            items = iter(sources)
            unfinished.skip_done(items)
            bar.skip(unfinished.tally.images)
            return _written(_watched(batches(items), bar), model, output, unfinished, sources.others)


def _digest(model: Model) -> str:
    """Returns a checksum of the model without its encoder's tensors, whose checksum is in the config."""
    heads = {name: tensor for name, tensor in model.module.state_dict().items() if not name.startswith("encoder.")}
    return digest(json_digest(model.config.model_dump(mode="json")), tensors_digest(heads))


def _options(model: Model, output: Output) -> dict[str, Any]:
    """What must not change when predictions are resumed."""
    own = dataclasses.asdict(output.columns) | {"group_by": output.group_by}
    own |= {"error": True}  # earlier versions had no such column
    return own | {"device": model.device.type, "precision": model.module.precision}


def _watched(batches: Iterator[Batch], bar: Progress) -> Iterator[Batch]:
    unreadable = 0
    for batch in batches:
        yield batch
        unreadable += len(batch.unreadable)
        bar.advance(len(batch.items), f"{unreadable} unreadable" if unreadable else "")


def _rows(batch: Batch, model: Model, output: Output) -> Iterator[Row]:
    """Yields a row per image: that of the table, or with groups what `GroupMeans` takes."""
    return (group_rows if output.grouped else image_rows)(output.columns, model, batch)


def _printed(batches: Iterator[Batch], model: Model, output: Output, others: Mapping[str, int]) -> Predicted:
    """Prints the rows of each batch, or at the end those of the groups."""
    columns = output.columns.types(model.class_names, output.grouped)
    tally, means, header, computed = Tally(), GroupMeans(), header_of(columns, output.format), 0

    def show(rows: Iterable[Row]) -> None:
        nonlocal header
        lines = [line_of(columns, row, output.format) for row in rows]
        if lines:
            write_data(header + b"".join(lines))
            header = b""

    for batch in batches:
        rows = list(_rows(batch, model, output))
        tally.add(rows)
        computed += batch.computed
        if output.grouped:
            means.add_all(rows)
        else:
            show(rows)
    show(means.rows(output.columns, model.class_names))
    return _answer(output, tally, others, len(means), computed)


def _written(
    batches: Iterator[Batch], model: Model, output: Output, unfinished: Unfinished, others: Mapping[str, int]
) -> Predicted:
    """Writes the rows to the unfinished file, and makes the table of it."""
    resumed, computed, means = unfinished.tally.images, 0, GroupMeans()
    for batch in batches:
        unfinished.add(_rows(batch, model, output))
        computed += batch.computed
    unfinished.flush()
    rows = unfinished.rows()
    if output.grouped:
        means.add_all(rows)
        rows = means.rows(output.columns, model.class_names)
    if unfinished.tally.images:
        columns = output.columns.types(model.class_names, output.grouped)
        unfinished.complete(lambda path: write_table(path, columns, rows, output.format))
    return _answer(output, unfinished.tally, others, len(means), computed, resumed)


def _answer(
    output: Output, tally: Tally, others: Mapping[str, int], groups: int, computed: int, resumed: int = 0
) -> Predicted:
    answer = Predicted(
        out=output.out,
        predicted=tally.images - tally.unreadable,
        groups=groups if output.grouped else None,
        unreadable=tally.unreadable,
        unreadable_images=tally.named,
        other_files=dict(others),
        computed=computed,
        resumed=resumed,
        strict=output.strict,
    )
    for line in answer.faults() if answer.predicted else ():
        logger.warning("%s", line)
    return answer
