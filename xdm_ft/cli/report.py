"""`xdm-ft report`: prints the tables of a run, and writes its reports again; or the tables of several runs in one."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

from xdm_ft.cli import CommandResult
from xdm_ft.cli.arguments import FORMATS
from xdm_ft.report.csv import COLUMNS, comparison_row, csv_rows, csv_text
from xdm_ft.report.headline import details, sentence
from xdm_ft.report.markup import as_text, latex, markdown, markdown_lines
from xdm_ft.report.sections import brief_sections, table_sections
from xdm_ft.report.side_by_side import check_same_protocol, compare_runs, run_names, side_by_side
from xdm_ft.report.written import write_reports
from xdm_ft.results.run import Run, encoders_of, read_run
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.terminal import show, write, write_data
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.names import expand_user
from xdm_ft.storage.run_directory import RunDirectory

logger = logging.getLogger("xdm_ft")


def main(arguments: argparse.Namespace) -> CommandResult:
    """Makes the tables of one run or of several runs of one protocol.

    Of one run it also writes results.md, results.csv, report.html and plots/ again. Raises `UserError` for a run that
    is damaged or not finished, for runs of several protocols, and if a file cannot be written.
    """
    out, format_ = None, arguments.format or "text"
    if arguments.out is not None:
        out = expand_user(arguments.out, "--out")
        suffix = out.suffix.lower()
        if suffix not in FORMATS:  # so that no results.json is overwritten by mistake
            raise UserError(f"--out {out}: its name must end in {', '.join(FORMATS)}")
        format_ = arguments.format or FORMATS[suffix]
    paths: dict[Path, Path] = {}
    for path in (expand_user(name, "RUN_DIR") for name in arguments.run_dirs):
        # resolved: a/ and ./a are one run, which would be compared with itself
        if paths.setdefault(path.resolve(), path) is not path:
            raise UserError(f"{path}: is named twice; name each run directory once")
    runs = [read_run(path) for path in paths.values()]
    for run in runs:
        if not run.rows:
            run.refuse_unfinished()
    single = runs[0] if len(runs) == 1 else None
    if single is None and arguments.images:
        raise UserError("--images: is about the page of one run; name one run directory")
    check_same_protocol(runs)
    names = run_names(runs)
    comparisons = [] if single is not None else compare_runs(runs, names)
    csv_of_runs = [row | {"run": names[run.path]} for run in runs for row in csv_rows(run)]
    csv_of_runs += [comparison_row(comparison, runs[0].metric) | {"of": "runs"} for comparison in comparisons]
    rows = [{name: row.get(name) for name in COLUMNS} for row in csv_of_runs]
    written = [] if single is None else _write_reports(single, arguments.images)
    if arguments.oracle or format_ in ("text", "markdown"):
        rules = {row.selection for run in runs for row in run.rows}
    else:
        rules = {rule for run in runs for rule in run.published_rules}
    if single is None:
        sections = side_by_side(runs, comparisons)
    else:
        sections = list(table_sections(single, rules, with_intervals=format_ == "latex"))

    def text() -> str:
        """Returns the document in its format; as text, without colours and as wide as necessary."""
        if format_ == "csv":
            return csv_text(row for row in rows if row["selection"] in rules)
        if format_ == "latex":
            return latex(sections)
        if format_ == "text":
            return as_text(sections, io.StringIO())
        return "\n".join(markdown_lines(sections)) if single is None else markdown(single, brief_sections(single))

    def print_tables() -> None:
        if format_ != "text":
            write_data(text().encode())
            return
        if single is not None:
            show("".join(f"{text}\n" for text in (sentence(single), details(single)) if text))
        write(as_text(sections, sys.stdout))

    if out is not None:
        replace_text(out, text())
    count = sum(len(section.tables) for section in sections)
    encoders = [encoders_of(run.results) for run in runs]
    document = {"runs": [run.path for run in runs], "encoders": encoders, "rows": rows, "out": out, "written": written}
    return CommandResult(document, print_tables if out is None else [f"wrote {out}: {plural(count, 'table')}"])


def _write_reports(run: Run, images: bool) -> list[Path]:
    """Writes the reports of a run again, and returns their paths; none in a folder that may not be written."""
    if not os.access(run.path, os.W_OK):
        logger.warning("%s: is read-only, so its reports stay as they are", run.path)
        return []
    with RunDirectory(run.path) as directory:
        directory.lock()
        block = run.recipe.report.model_copy(update={"images": True} if images else {})
        written = write_reports(directory, replace(run, recipe=replace(run.recipe, report=block)))
    logger.info("wrote %s", ", ".join(str(path) for path in written))
    return written
