"""`xdm-ft label`: which images of a new site to label, as a table to fill in."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from xdm_ft.cli import Answer, left_out
from xdm_ft.cli.assess import budget_table
from xdm_ft.cli.predict import check_batch_size, load_model
from xdm_ft.evaluation.few_labels import enough_for
from xdm_ft.new_site.label import Labelling, label, refuse_taken
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.storage.names import expand_user

WANTED = 0.05  # half of an interval of the accuracy, for which the screen says the number of images


def main(arguments: argparse.Namespace) -> Answer:
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
    made = label(
        model, arguments.model, images, arguments.budget, out, html, arguments.group, arguments.batch_size,
        allow_few_groups=arguments.allow_few_groups,
    )  # fmt: skip
    return Answer(made, list(lines(made, model.class_names)))


def lines(made: Labelling, class_names: Sequence[str]) -> Iterator[str]:
    """Yields the text of what was chosen."""
    number = made.evaluate + made.adapt
    groups = "" if made.groups is None else f" in {plural(made.groups, 'group')}"
    yield f"wrote {made.out}: {number} of {plural(made.images, 'image')} to label{groups}"
    yield f"{made.evaluate} drawn at random to evaluate the model, {made.adapt} chosen to adapt it (seed {made.seed})"
    enough = enough_for(WANTED, made.groups is not None)
    takes = plural(enough, "image" if made.groups is None else "group")
    if made.groups is None and 4 * enough <= made.images:  # a quarter of the budget measures
        takes += f" (--budget {4 * enough})"
    known = f"the accuracy is then known to ±{100 * made.half_width:.0f} points or better"
    yield f"From {plural(made.evaluate, 'image')} {known}; ±{100 * WANTED:.0f} takes {takes}"
    yield from budget_table([] if made.bought is None else [made.bought])
    if made.sheet is not None:
        yield f"wrote {made.sheet}: the images of its rows"
    yield from left_out(made.unreadable, made.copies, 0, made.training_images)
    if made.unknown:
        yield f"{plural(made.unknown, 'image')} to adapt it may belong to no class: leave their label empty if so"
    yield f"Fill in its column label ({', '.join(class_names)}), from the first row on, then run"
    command = f"{shlex.quote(made.model)} {shlex.quote(str(made.out))}"
    yield f"  xdm-ft evaluate {command}"
    if made.adapt:
        yield f"  xdm-ft adapt {command} --out DIR"
