"""The comparisons beside the rows of the table, and those that stand beside none: a forest plot and its numbers."""

from __future__ import annotations

from collections.abc import Mapping

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.verdicts import Comparison
from xdm_ft.report.charts import INK, SERIES, Figure, Look, Mark, Row, points
from xdm_ft.report.comparisons import (
    beside_rows,
    cells_of,
    difference_text,
    further,
    header_of,
    reference_names,
    what_it_finds,
)  # fmt: skip
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, Table, cells
from xdm_ft.report.words import axis_value, each_once, metric_words, oracle_mark, p_value, unit_of_difference

ABOUT = (
    "Here: on these domains, with other seeds and test images. Elsewhere: on new domains. Holm's p is corrected for "
    "all comparisons of the run, those of further tables too, or for those alone that report.compare declares. The "
    "intervals are not adjusted for the number of comparisons."
)
MAX_WIDTH = 3.0
"""An interval over few domains can be so wide that nothing else is seen: the axis ends at this many times the largest
of the other numbers."""
LOOKS = {"elsewhere": Look(SERIES[1]), "here": Look(SERIES[0], width=3.2), "difference": Look(INK, "D")}


def differences(run: Run, rule: str) -> Section | None:
    """The differences of the rows to what they are compared with."""
    beside = beside_rows(run.results, rule)
    shown = {row.method: beside[row.method] for row in run.rows if row.selection == rule and row.method in beside}
    if not shown:
        return None
    names = dict(zip(shown, reference_names(shown.values(), run.results), strict=True))
    reference = "the reference" if len({*names.values()}) > 1 else next(iter(names.values()))
    about = (
        f"Test {metric_words(run.metric)} of each method less that of {reference}. {_better(run)} of the zero line is "
        f"better. {ABOUT}"
    )
    caption = f"Differences to {reference} in {unit_of_difference(run.metric)}."
    notes = [
        *each_once((method, row.note and f"versus {names[method]}: {row.note}") for method, row in shown.items()),
        *(f"this table: {line}" for line in what_it_finds(run.results, rule, run.metric)),
    ]
    figure = _forest("differences", f"difference to {reference}", run.metric, shown)
    table = comparison_table(caption, run.metric, shown, rule)
    return Section("differences", f"Differences to {reference}", about, [figure], [table], notes)


def further_comparisons(run: Run, rule: str) -> Section | None:
    """The other comparisons, such as those between encoders; None if there are none."""
    shown = {f"{row.first} − {row.second}": row for row in further(run.results, rule)}
    if not shown:
        return None
    about = (
        f"Test {metric_words(run.metric)} of the first less that of the second, over the same images. {_better(run)} "
        f"of the zero line the first is better. {ABOUT}"
    )
    caption = f"First − second, in {unit_of_difference(run.metric)}."
    notes = each_once((label, row.note) for label, row in shown.items())
    figure = _forest("further", "difference", run.metric, shown)
    table = comparison_table(caption, run.metric, shown, rule, ("first", "second"))
    return Section("further", "Further comparisons", about, [figure], [table], notes)


def comparison_table(
    caption: str, metric: str, shown: Mapping[str, Comparison], rule: str, sides: tuple[str, str] = ("method", "versus")
) -> Table:
    tested = header_of(shown.values())
    rows = [
        [
            *cells(row.first, row.second),
            Cell(difference_text(row, metric), row.difference),
            *cells_of(row, metric, tested),
        ]
        for row in shown.values()
    ]
    return Table(caption, [f"{sides[0]}{oracle_mark(rule)}", sides[1], "difference", *tested], rows, labels=2)


def _better(run: Run) -> str:
    return "Right" if HIGHER_IS_BETTER[run.metric] else "Left"


def _forest(name: str, what: str, metric: str, shown: Mapping[str, Comparison]) -> Figure:
    """Returns the plot of differences, a row per label; `what` they are stands below the axis."""
    rows, narrow, wide = [], list[float](), list[float]()
    for label, row in shown.items():
        here = [axis_value(metric, end) for end in row.on_these.interval()] if row.on_these else None
        elsewhere = [axis_value(metric, end) for end in row.on_others.interval()] if row.on_others else None
        difference = axis_value(metric, row.difference)
        narrow += [difference, *(here or ())]
        wide += elsewhere or ()
        marks = [
            Mark("elsewhere", None, elsewhere, 0.16),
            Mark("here", None, here, -0.16),
            Mark("difference", difference),
        ]
        rows.append(Row(label, marks, right=f"p {p_value(row.p_here and row.p_here.holm)}"))

    # the ends of the axis, around 0 and every difference
    largest = max(map(abs, narrow))
    limit = min(max(map(abs, [*narrow, *wide])), MAX_WIDTH * largest) or axis_value(metric, 0.01)
    low, high = max(min(0.0, *narrow, *wide), -limit), min(max(0.0, *narrow, *wide), limit)
    margin = 0.05 * (high - low) or limit
    of_elsewhere = "Thin orange line: 95% interval elsewhere, on new domains; at the edge it goes on. " if wide else ""
    caption = (
        "Diamond: the difference. Thick blue line: 95% interval here, with other seeds and test images. "
        f"{of_elsewhere}At the right Holm's p here."
    )
    axis, limits = f"{what} in {unit_of_difference(metric)}", (low - margin, high + margin)
    title = f"Forest plot of the {what}"
    return points(name, title, caption, rows, axis, LOOKS, limits=limits, zero=True, row_height=0.38, width=4.6)
