"""The reports in a run directory: results.md, results.csv, models.parquet, and report.html with plots/.

reports.json holds the checksum of each one as it was written: a damaged one is written again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from xdm_ft.report.csv import MANY_MODELS, csv_rows, csv_text, parquet_of
from xdm_ft.report.finished import Run
from xdm_ft.report.html import PLOTS, write_page
from xdm_ft.report.markup import markdown
from xdm_ft.report.sections import brief_sections
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.digests import digest
from xdm_ft.storage.lines import Damaged, read_object
from xdm_ft.storage.run_directory import ANALYSIS, MARKDOWN, MODELS, PAGE, REPORTS, RESULTS, TABLE, RunDirectory

logger = logging.getLogger("xdm_ft")


def write_reports(directory: RunDirectory, run: Run) -> list[Path]:
    """Writes results.md, results.csv, models.parquet of a large run, report.html and plots/, and returns their paths.

    Raises `UserError`.
    """
    _write_tables(directory, run)
    _write_page(directory, run)
    paths = [run.path / name for name in (MARKDOWN, TABLE, MODELS, PAGE, PLOTS)]
    return [path for path in paths if path.exists()]  # a page without a plot makes no plots/


def refresh_reports(directory: RunDirectory, run: Run) -> None:
    """Writes the reports if one is missing, older than what they are made from, or not as it was written.

    The page only if the recipe wants it. A fault of ours in the page is logged with its traceback: the results of a run
    do not depend on it. Raises `UserError` for faults of the disk.
    """
    page, sources = run.results["recipe"].get("report", {}).get("page", False), (RESULTS, ANALYSIS)
    try:
        written = read_object(run.path / REPORTS)
        times = [(run.path / name).stat().st_mtime_ns for name in written]
        changed = [(run.path / name).stat().st_mtime_ns for name in sources if (run.path / name).exists()]
        complete = {*_tables_of(run), *([PAGE] if page else [])} <= {*written}
        if complete and _digests(run.path, written) == written and max(changed) <= min(times):
            return
    except (Damaged, OSError):
        pass  # reports.json is damaged; a report is missing, or a folder
    _write_tables(directory, run)
    try:
        if page:
            _write_page(directory, run)
    except UserError:
        raise
    except Exception:
        remedy = f"the results are whole; `xdm-ft report {run.path}` tries it again"
        logger.exception("%s: can not be drawn, because of a fault in xdm_ft; %s", run.path / PAGE, remedy)


def _write_tables(directory: RunDirectory, run: Run) -> None:
    """Writes what results.json alone makes."""
    directory.write_text(MARKDOWN, markdown(run, brief_sections(run)))
    directory.write_text(TABLE, csv_text(row for row in csv_rows(run) if row["selection"] in run.published_rules))
    if MODELS in _tables_of(run):
        directory.write_bytes(MODELS, parquet_of(run.records))
    directory.write_text(REPORTS, json.dumps(_digests(run.path, _tables_of(run)), indent=1) + "\n")


def _write_page(directory: RunDirectory, run: Run) -> None:
    """Writes the page, and results.md with the tables of all its sections."""
    directory.write_text(MARKDOWN, markdown(run, write_page(run)))
    plots = [f"{PLOTS}/{path.name}" for path in sorted((run.path / PLOTS).glob("*.svg"))]
    digests = _digests(run.path, (*_tables_of(run), PAGE, *plots))
    directory.write_text(REPORTS, json.dumps(digests, indent=1) + "\n")


def _tables_of(run: Run) -> tuple[str, ...]:
    return (MARKDOWN, TABLE, MODELS) if len(run.records) >= MANY_MODELS else (MARKDOWN, TABLE)


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns {report, relative to the run directory: checksum of its bytes}."""
    return {name: digest(np.fromfile(folder / name, np.uint8)) for name in names}
