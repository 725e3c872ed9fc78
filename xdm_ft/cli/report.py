"""`xdm-ft report`: prints the tables of a run, and writes its reports again; or the tables of several runs in one."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xdm_ft.cli.answer import Answer
from xdm_ft.evaluation.verdicts import Comparison
from xdm_ft.report.csv_rows import COLUMNS, Row, comparison_row, csv_rows, csv_text
from xdm_ft.report.encoders import encoders_of
from xdm_ft.report.finished import Run, read_run
from xdm_ft.report.latex import latex
from xdm_ft.report.markdown import markdown, markdown_table, tables_of
from xdm_ft.report.sentence import sentence
from xdm_ft.report.side_by_side import check_same_protocol, compare_runs, run_names, side_by_side
from xdm_ft.report.table_rows import ResultTable
from xdm_ft.report.tables import as_text
from xdm_ft.report.written import write_reports
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.terminal import show, write, write_data
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.names import expanded
from xdm_ft.storage.run_directory import RunDirectory

Format = Literal["text", "markdown", "latex", "csv"]
FORMATS: dict[str, Format] = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv"}
logger = logging.getLogger("xdm_ft")


@dataclass(frozen=True)
class Reported(Answer):
    runs: list[Run]
    format: Format
    out: Path | None  # where the tables were written; None: they are printed
    written: list[Path]  # the reports that were written again
    rows: list[Row]  # those of results.csv, of all selection rules
    oracle: bool  # LaTeX and CSV too have what oracle selects, if that is not the recipe's own rule
    between: list[Comparison]  # between several runs

    @property
    def _shown(self) -> set[str]:
        """The selection rules of the document."""
        if self.oracle or self.format in ("text", "markdown"):
            return {row.selection for run in self.runs for row in run.rows}
        return {rule for run in self.runs for rule in run.published_rules}

    @property
    def tables(self) -> list[ResultTable]:
        return (
            list(tables_of(self.runs[0], self._shown)) if len(self.runs) == 1 else side_by_side(self.runs, self.between)
        )

    def text(self) -> str:
        """Returns the document in its format; as text, without colours and as wide as necessary."""
        if self.format == "csv":
            return csv_text(row for row in self.rows if row["selection"] in self._shown)
        if self.format == "latex":
            return latex(self.tables)
        if self.format == "text":
            import io

            return as_text(self.tables, io.StringIO())
        if len(self.runs) == 1:
            return markdown(self.runs[0])
        return "\n".join(line for table in self.tables for line in markdown_table(table))

    def show(self) -> None:
        if self.out is not None:
            show(printable(f"wrote {self.out}: {plural(len(self.tables), 'table')}"))
        elif self.format == "text":
            if len(self.runs) == 1:
                show(f"{sentence(self.runs[0])}\n")
            write(as_text(self.tables, sys.stdout))
        else:
            write_data(self.text().encode())

    def to_json(self) -> dict[str, Any]:
        """Returns the rows as values, and the paths of what was read and written."""
        paths, encoders = [run.path for run in self.runs], [encoders_of(run.results) for run in self.runs]
        return {"runs": paths, "encoders": encoders, "rows": self.rows, "out": self.out, "written": self.written}


def report(
    run_dirs: Sequence[str],
    format_: Format | None = None,
    out: str | None = None,
    images: bool = False,
    oracle: bool = False,
) -> Reported:
    """Makes the tables of one run or of several runs of one protocol.

    Of one run it also writes results.md, results.csv, report.html and plots/ again. `format_`: by default that of the
    name of `out`, or text. `images`: report.html shows the most confident mistakes as small images. `oracle`: LaTeX and
    CSV too have what the rule oracle selects.

    Raises `UserError` for a run that is damaged or not finished, for runs of several protocols, and if a file can not
    be written.
    """
    file = None if out is None else expanded(out, "--out")
    wanted = _format(format_, file)
    runs = [read_run(path) for path in _paths(run_dirs)]
    for run in runs:
        if not run.rows:
            run.refuse_unfinished()
    if len(runs) > 1 and images:
        raise UserError("--images: is about the page of one run; name one run directory")
    check_same_protocol(runs)
    names = run_names(runs)
    found = [row | {"run": names[run.path]} for run in runs for row in csv_rows(run)]
    between = compare_runs(runs, names) if len(runs) > 1 else []
    found += [comparison_row(one, runs[0].metric) | {"of": "runs"} for one in between]
    rows = [{name: row.get(name) for name in COLUMNS} for row in found]
    written = _written(runs[0], images) if len(runs) == 1 else []
    answer = Reported(runs, wanted, file, written, rows, oracle, between)
    if file is not None:
        replace_text(file, answer.text())
    return answer


def _format(given: Format | None, out: Path | None) -> Format:
    """Returns the wanted format. Raises `UserError` if the name of the file is that of no table."""
    if out is None:
        return given or "text"
    if out.suffix.lower() not in FORMATS:  # so that no results.json is overwritten by mistake
        raise UserError(f"--out {out}: its name must end in {', '.join(FORMATS)}")
    return given or FORMATS[out.suffix.lower()]


def _paths(run_dirs: Sequence[str]) -> list[Path]:
    paths = [expanded(path, "RUN_DIR") for path in run_dirs]
    for i, path in enumerate(paths):
        if path.resolve() in {other.resolve() for other in paths[:i]}:
            raise UserError(f"{path}: is named twice; name each run directory once")
    return paths


def _written(run: Run, images: bool) -> list[Path]:
    """Writes the reports of a run again, and returns their paths; none in a folder that may not be written."""
    if not os.access(run.path, os.W_OK):
        logger.warning("%s: is read-only, so its reports stay as they are", run.path)
        return []
    with RunDirectory(run.path) as directory:
        directory.lock()
        recipe = run.results["recipe"]
        block = recipe.get("report", {}) | ({"images": True} if images else {})
        shown = dataclasses.replace(run, results=run.results | {"recipe": recipe | {"report": block}})
        written = write_reports(directory, shown)
    logger.info("wrote %s", ", ".join(str(path) for path in written))
    return written
