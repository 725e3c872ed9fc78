"""`xdm-ft audit`: whether the data of a recipe, or of a run, are what they say, and what each finding costs."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from xdm_ft.audit.measure import audit, read_study
from xdm_ft.cli import Answer
from xdm_ft.cli.run import load_recipe
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.experiment.work import launched, one_thread
from xdm_ft.report.finished import audited_part, is_run, read_run
from xdm_ft.report.sections.audit import audit_lines
from xdm_ft.report.written import write_reports
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.watchdog import heartbeat, wait_for_everyone
from xdm_ft.storage.atomic import disk_errors
from xdm_ft.storage.run_directory import RunDirectory

logger = logging.getLogger("xdm_ft")


def main(arguments: argparse.Namespace) -> Answer:
    """Writes audit.json, audit.md and tables into the folder audit of the run directory. Raises `UserError`.

    A run directory may have been moved; its data must be those of the run. Processes of a launch extract missing
    features together; the main one does the rest.
    """
    folder, notes, run = Path(arguments.recipe), list[str](), None
    if folder.is_dir() and not is_run(folder) and (folder / "recipe.yaml").exists():
        raise UserError(f"{folder}: the run has no results yet; audit its recipe, or run it to its end")
    if is_run(folder):
        run = read_run(folder)
        written_recipe(folder, run.results)  # raises if it is missing or was edited
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
                of = audited_part(recipe.resolved() if run is None else run.results["recipe"])
                document = audit(study, folder / "audit", arguments.images, notes, of)
            _write_page(folder)
        wait_for_everyone(accelerator)
    lines = [] if document is None else audit_lines(document)
    return Answer({**(document or {}), "folder": folder / "audit"}, [*lines, f"all of it: {folder / 'audit'}"])


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
