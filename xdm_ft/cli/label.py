"""`xdm-ft label`: which images of a new site to label, as a table to fill in."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from xdm_ft.cli import CommandResult, left_out_lines
from xdm_ft.cli.assess import budget_table
from xdm_ft.cli.predict import check_batch_size, load_model
from xdm_ft.evaluation.few_labels import enough_for
from xdm_ft.evaluation.metrics import at_one_site
from xdm_ft.export.card import WORDS
from xdm_ft.export.sources import FOR, Item
from xdm_ft.images import Range
from xdm_ft.images.decode import UnreadableImage, decode
from xdm_ft.new_site.label import Labelling, ToLabel, label
from xdm_ft.report import SIDE, Thumbnail
from xdm_ft.report.written import sheet
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.storage.atomic import TAKEN, Together, disk_errors
from xdm_ft.storage.lines import csv_line
from xdm_ft.storage.names import expand_user

COLUMNS = ("path", "group", FOR, "predicted", "probability", "label")
FIRST_ROW = 2  # of the table, as a spreadsheet numbers it
WANTED = 0.05  # half of an interval of the accuracy, for which the screen says the number of images


def main(arguments: argparse.Namespace) -> CommandResult:
    """Raises `UserError` for a budget below 1, for files that exist, and as `new_site.label.label` does."""
    check_batch_size(arguments)
    if arguments.budget < 1:
        raise UserError(f"--budget: {arguments.budget} is not positive; give the number of images that you can label")
    out = expand_user(arguments.out, "--out")
    if out.suffix.lower() != ".csv":
        raise UserError(f"--out: {out} is not the name of a CSV file; end it in .csv")
    html = None if arguments.sheet is None else expand_user(arguments.sheet, "--sheet")
    if html == out:
        raise UserError(f"--sheet: {out} is the table; name another file")
    refuse_taken(out, html)  # before the model is loaded
    model, images = load_model(arguments), arguments.images
    encoder = model.config.encoder
    if html is not None and encoder.reads_features:
        raise UserError("--sheet: the model reads features, so there are no images to show; leave it out")
    made = label(
        model, arguments.model, images, arguments.budget, arguments.group, arguments.batch_size,
        allow_few_groups=arguments.allow_few_groups,
    )  # fmt: skip
    write(made.rows, out, html, model.config.intensity, of_groups=encoder.settings.get("unit") == "group")
    facts = {name: value for name, value in vars(made).items() if name != "rows"}
    document = {"model": made.model, "out": out, "sheet": html} | facts
    return CommandResult(document, list(lines(made, out, html, model.class_names, model.config.metric)))


def lines(made: Labelling, out: Path, html: Path | None, class_names: Sequence[str], metric: str) -> Iterator[str]:
    """Yields the text of what was chosen. `metric`: of the run's protocol."""
    number = made.evaluate + made.adapt
    groups = "" if made.groups is None else f" in {plural(made.groups, 'group')}"
    yield f"wrote {out}: {number} of {plural(made.images, 'image')} to label{groups}"
    yield f"{made.evaluate} drawn at random to evaluate the model, {made.adapt} chosen to adapt it (seed {made.seed})"
    enough = enough_for(WANTED, made.groups is not None)
    takes = plural(enough, "image" if made.groups is None else "group")
    if made.groups is None and 4 * enough <= made.images:  # a quarter of the budget measures
        takes += f" (--budget {4 * enough})"
    known = f"the accuracy is then known to ±{100 * made.half_width:.0f} points or better"
    yield f"From {plural(made.evaluate, 'image')} {known}; ±{100 * WANTED:.0f} takes {takes}"
    if at_one_site(metric) != "accuracy":
        yield f"How well {WORDS[metric]} is known then depends on the labels: evaluate says it"
    yield from budget_table([] if made.bought is None else [made.bought])
    if html is not None:
        yield f"wrote {html}: the images of its rows"
    yield from left_out_lines(made.unreadable, made.copies, 0, made.training_images)
    if made.unknown:
        yield f"{plural(made.unknown, 'image')} to adapt it may belong to no class: leave their label empty if so"
    yield f"Fill in its column label ({', '.join(class_names)}), from the first row on, then run"
    command = f"{shlex.quote(made.model)} {shlex.quote(str(out))}"
    yield f"  xdm-ft evaluate {command}"
    if made.adapt:
        yield f"  xdm-ft adapt {command} --out DIR"


def write(
    rows: Sequence[ToLabel], out: Path, html: Path | None, intensity: Range | None = None, of_groups: bool = False
) -> None:
    """Writes the table with an empty column label, and the page of small images: both are new, or none is written.

    `of_groups`: the bags are groups, of which each slide has a row. Raises `UserError`.
    """
    cells = [
        (path, row.item.path if of_groups else row.item.group, row.purpose, row.predicted, row.probability, "")
        for row in rows
        for path in [path_from(out, row.item, file) for file in row.item.files or [None]]
    ]
    texts = {out: "".join(csv_line(COLUMNS, row) for row in (COLUMNS, *cells))}
    if html is not None:
        thumbnails = []
        for number, row in enumerate(rows, start=FIRST_ROW):
            path = path_from(out, row.item)
            try:
                image = decode(Path(os.fsdecode(row.item.content)), printable(path), SIDE, intensity)
            except (UnreadableImage, OSError) as error:
                reason = error.reason if isinstance(error, UnreadableImage) else error.strerror
                raise UserError(f"{printable(path)}: cannot be read any more ({reason}); run again") from error
            thumbnails.append(Thumbnail.of(image, f"row {number}", (f"row {number}", path)))
        # without the model's predictions: a label must not depend on them
        header = f"Rows of {out.name}. Write the class of each image into its column label."
        texts[html] = sheet(f"{plural(len(rows), 'image')} to label", header, thumbnails)
    with Together(new=True) as files:
        for file, text in texts.items():
            files.add(file, partial(Path.write_bytes, data=text.encode()))
        files.replace()


def path_from(table: Path, item: Item, file: str | None = None) -> str:
    """Returns the path of an image as a table has it, whose paths start at the table's folder. `file`: of its files.

    It is as the user gave it if that leads to the image from there, else absolute.
    """
    content = os.path.join(os.getcwd(), os.fsdecode(item.content) if file is None else file)
    given = os.path.join(os.path.abspath(table.parent), item.path)
    return item.path if os.path.normpath(given) == os.path.normpath(content) else content


def refuse_taken(*files: Path | None) -> None:
    """Raises `UserError` for a file that exists."""
    for file in files:
        if file is not None:
            with disk_errors(file):
                if os.path.lexists(file):
                    raise UserError(f"{file}: {TAKEN}")
