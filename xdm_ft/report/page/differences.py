"""The comparisons of the table, and those that stand beside no row: forest plots and their numbers."""

from __future__ import annotations

from collections.abc import Mapping

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.verdicts import Comparison
from xdm_ft.report.comparisons import beside_rows, further, header_of, what_it_finds
from xdm_ft.report.finished import Run
from xdm_ft.report.page import numbers
from xdm_ft.report.page.forest import cells, forest
from xdm_ft.report.page.panel import Cell, Panel, Table
from xdm_ft.report.result_table import reference_names
from xdm_ft.report.table_rows import metric_words

ABOUT = (
    "Here: on these domains, with other seeds and test images. Elsewhere: on new domains. Holm's p is corrected for "
    "all comparisons of the run, or for those alone that report.compare declares. The intervals are not corrected."
)


def panel(run: Run) -> Panel | None:
    beside = beside_rows(run.results, run.own_rule)
    shown = {row.method: beside[row.method] for row in run.own_rows if row.method in beside}
    if not shown:
        return None
    names = reference_names([*shown.values()], run.results)
    reference = "the reference" if len(set(names)) > 1 else str(names[0])
    return Panel(
        id="differences",
        title=f"Differences to {reference}",
        about=f"Test {metric_words(run.metric)} of each method less that of {reference}. {_better(run)} of the zero "
        f"line is better. {ABOUT}",
        figures=[forest("differences", f"difference to {reference}", run.metric, shown)],
        tables=[_table(f"Differences to {reference} in {numbers.points(run.metric)}.", run.metric, shown)],
        notes=numbers.noted(
            [
                *((method, row.note) for method, row in shown.items()),
                *(("this table", line) for line in what_it_finds(run.results, run.own_rule, run.metric)),
            ]
        ),
    )


def further_panel(run: Run) -> Panel | None:
    """The other comparisons, such as those between encoders; None if there are none."""
    shown = {f"{row.first} − {row.second}": row for row in further(run.results, run.own_rule)}
    if not shown:
        return None
    return Panel(
        id="further",
        title="Further comparisons",
        about=f"Test {metric_words(run.metric)} of the first less that of the second, over the same images. "
        f"{_better(run)} of the zero line the first is better. {ABOUT}",
        figures=[forest("further", "difference", run.metric, shown)],
        tables=[_table(f"First − second, in {numbers.points(run.metric)}.", run.metric, shown)],
        notes=numbers.noted((label, row.note) for label, row in shown.items()),
    )


def _table(caption: str, metric: str, shown: Mapping[str, Comparison]) -> Table:
    header = header_of([*shown.values()])
    rows = [[Cell(label), Cell(row.second), *cells(metric, row, header)] for label, row in shown.items()]
    return Table(caption, ["method", "versus", "difference", *header], rows)


def _better(run: Run) -> str:
    return "Right" if HIGHER_IS_BETTER[run.metric] else "Left"
