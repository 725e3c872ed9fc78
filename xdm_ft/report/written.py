"""The reports in a run directory: results.md, results.csv, models.parquet, and report.html with plots/."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from xdm_ft.errors import UserError
from xdm_ft.report.csv_rows import csv_rows, csv_text
from xdm_ft.report.finished import Run
from xdm_ft.report.markdown import markdown
from xdm_ft.report.model_table import LARGE, parquet_of
from xdm_ft.report.page import write_page
from xdm_ft.storage.run_directory import ANALYSIS, MARKDOWN, MODELS, PAGE, RESULTS, TABLE, RunDirectory

MADE_FROM = (RESULTS, ANALYSIS)
logger = logging.getLogger("xdm_ft")


def write_reports(directory: RunDirectory, run: Run) -> list[Path]:
    """Writes results.md, results.csv, models.parquet of a large run, report.html and plots/, and returns their paths.

    Raises `UserError`.
    """
    _write_tables(directory, run)
    write_page(run)
    made = [run.path / name for name in (MARKDOWN, TABLE, MODELS, PAGE, "plots")]
    return [path for path in made if path.exists()]  # a page without a plot makes no plots/


def refresh_reports(directory: RunDirectory, run: Run) -> None:
    """Writes the reports that are missing or older than what they are made from; the page only if the recipe wants it.

    A fault of ours in the page is logged with its traceback: the results of a run do not depend on it. Raises
    `UserError` for faults of the disk.
    """
    if any(_is_old(run.path / name, (RESULTS,), run.path) for name in (MARKDOWN, TABLE)):
        _write_tables(directory, run)
    wanted = run.results["recipe"].get("report", {}).get("page", False)
    if not wanted or not _is_old(run.path / PAGE, MADE_FROM, run.path):
        return
    try:
        write_page(run)
    except UserError:
        raise
    except Exception:
        remedy = f"the results are whole; `xdm-ft report {run.path}` tries it again"
        logger.exception("%s: can not be drawn, because of a fault in xdm_ft; %s", run.path / PAGE, remedy)


def _write_tables(directory: RunDirectory, run: Run) -> None:
    directory.write_text(MARKDOWN, markdown(run))
    directory.write_text(TABLE, csv_text(csv_rows(run)))
    if len(run.records) >= LARGE:
        directory.write_bytes(MODELS, parquet_of(run.records))


def _is_old(report: Path, sources: Iterable[str], folder: Path) -> bool:
    """Returns whether a report is missing, or older than one of the files that it is made from."""
    changed = [(folder / name).stat().st_mtime_ns for name in sources if (folder / name).exists()]
    return not report.is_file() or any(report.stat().st_mtime_ns < one for one in changed)
