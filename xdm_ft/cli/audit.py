"""`xdm-ft audit`: whether the data of a recipe, or of a run, are what they say, and what each finding costs."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from xdm_ft.audit.measure import COPIES, LABELS, Audit, audit, read_study
from xdm_ft.cli import CommandResult
from xdm_ft.cli.run import load_recipe
from xdm_ft.data.features import FeatureTable
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.experiment.work import launched, one_thread
from xdm_ft.images import ImageDataset
from xdm_ft.report.sections.audit import audit_lines, audit_markdown
from xdm_ft.report.written import copies_sheet, write_reports
from xdm_ft.results.run import audited_part, is_run, read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.watchdog import heartbeat, wait_for_everyone
from xdm_ft.storage.atomic import disk_errors, replace_bytes
from xdm_ft.storage.lines import csv_line, with_checksum
from xdm_ft.storage.run_directory import RunDirectory

logger = logging.getLogger("xdm_ft")


def main(arguments: argparse.Namespace) -> CommandResult:
    """Writes audit.json, audit.md and tables into the folder audit of the run directory. Raises `UserError`.

    A run directory may have been moved; its data must be those of the run. Processes of a launch extract missing
    features together; the main one does the rest.
    """
    folder, notes, run = Path(arguments.recipe), list[str](), None
    if folder.is_dir() and not is_run(folder) and (folder / "recipe.yaml").exists():
        raise UserError(f"{folder}: the run has no results yet; audit its recipe, or run it to its end")
    if is_run(folder):
        run = read_run(folder)
        written_recipe(folder, run.results["recipe"])  # raises if it is missing or was edited
        notes = [f"with {override}, unlike the run" for override in arguments.overrides]
        arguments.recipe = str(folder / "recipe.yaml")
    recipe, document = load_recipe(arguments), None
    if run is None:
        folder = Path(recipe.output.dir) / recipe.name
        run = read_run(folder) if is_run(folder) else None
    with disk_errors(folder / "audit"):  # before the work
        (folder / "audit").mkdir(parents=True, exist_ok=True)
    with launched(recipe) as accelerator, heartbeat(accelerator):
        study = read_study(recipe, accelerator, run)
        if accelerator.is_main_process:
            with one_thread():  # products of heads are small
                of = audited_part(recipe if run is None else run.recipe)
                found = audit(study, notes, of)
            document = found.document
            _write(folder / "audit", found, study.dataset if arguments.images else None)
            _write_page(folder)
        wait_for_everyone(accelerator)
    lines = [] if document is None else audit_lines(document)
    return CommandResult({**(document or {}), "folder": folder / "audit"}, [*lines, f"all of it: {folder / 'audit'}"])


def _write(folder: Path, found: Audit, dataset: ImageDataset | None) -> None:
    """Writes the files of an audit; audit.json last, as a reader takes the others to be of the same audit.

    With a data set of images, copies.html shows the first pairs.
    """
    sheet = None
    if dataset is not None and not isinstance(dataset, FeatureTable):
        pairs = ((entry, dataset.image(first), dataset.image(second)) for entry, first, second in found.shown)
        sheet = copies_sheet(pairs, f"Copies in {found.document['name']}")
    with disk_errors(folder):
        (folder / "copies.html").unlink(missing_ok=True)  # of an earlier audit
    if sheet is not None:
        replace_bytes(folder / "copies.html", sheet.encode("utf-8", "replace"))
    of_labels = [column for column in LABELS if column != "group" or any("group" in row for row in found.labels)]
    label_cells = [[row[column] for column in of_labels] for row in found.labels]
    for name, columns, lines in (("copies", COPIES, found.copies), ("labels", of_labels, label_cells)):
        text = "".join(csv_line(columns, cells) for cells in (columns, *lines))
        replace_bytes(folder / f"{name}.csv", text.encode("utf-8"))
    replace_bytes(folder / "audit.md", audit_markdown(found.document).encode("utf-8", "replace"))
    text = json.dumps(with_checksum(found.document), indent=1, allow_nan=False)
    replace_bytes(folder / "audit.json", f"{text}\n".encode())


def _write_page(folder: Path) -> None:
    """Writes the reports of a finished run again, with the audit; a run that is not finished will do it at its end."""
    if not is_run(folder) or not (run := read_run(folder)).rows:
        return
    try:
        with RunDirectory(folder) as directory:
            directory.lock()
            write_reports(directory, run)
    except UserError as error:
        logger.warning("the page does not show this audit: %s; write it again with `xdm-ft report %s`", error, folder)
