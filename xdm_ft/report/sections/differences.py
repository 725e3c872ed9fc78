"""The comparisons beside the rows of the table, and those that stand beside none: a forest plot and its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.verdicts import Comparison, Interval
from xdm_ft.report.charts import INK, SERIES, Figure, Look, Mark, Row, points
from xdm_ft.report.comparisons import (
    beside_rows,
    cells_of,
    difference_text,
    further,
    header_of,
    here_words,
    reference_names,
    what_it_finds,
)  # fmt: skip
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, Table
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


def section(run: Run, rule: str) -> Section | None:
    """The differences of the rows to what they are compared with."""
    beside = beside_rows(run.results, rule)
    shown = {row.method: beside[row.method] for row in run.rows if row.selection == rule and row.method in beside}
    if not shown:
        return None
    names = reference_names(shown.values(), run.results)
    reference = "the reference" if len(set(names)) > 1 else str(names[0])
    labels = {row: str(name) for row, name in zip(shown, names, strict=True)}
    notes = [
        *each_once((method, row.note and f"versus {labels[method]}: {row.note}") for method, row in shown.items()),
        *(f"this table: {line}" for line in what_it_finds(run.results, rule, run.metric)),
    ]
    about = f"Test {metric_words(run.metric)} of each method less that of {reference}. {_better(run)} of the zero line "
    return Section(
        id="differences",
        title=f"Differences to {reference}",
        about=f"{about}is better. {ABOUT}",
        figures=[forest("differences", f"difference to {reference}", run.metric, shown)],
        tables=[table(f"Differences to {reference} in {unit_of_difference(run.metric)}.", run.metric, shown, rule)],
        notes=notes,
    )


def further_section(run: Run, rule: str) -> Section | None:
    """The other comparisons, such as those between encoders; None if there are none."""
    shown = {f"{row.first} − {row.second}": row for row in further(run.results, rule)}
    if not shown:
        return None
    return Section(
        id="further",
        title="Further comparisons",
        about=f"Test {metric_words(run.metric)} of the first less that of the second, over the same images. "
        f"{_better(run)} of the zero line the first is better. {ABOUT}",
        figures=[forest("further", "difference", run.metric, shown)],
        tables=[table(f"First − second, in {unit_of_difference(run.metric)}.", run.metric, shown, rule, first="first")],
        notes=each_once((label, row.note) for label, row in shown.items()),
    )


def table(caption: str, metric: str, shown: Mapping[str, Comparison], rule: str, first: str = "method") -> Table:
    tested = header_of(shown.values())
    rows = [
        [
            *(Cell(row.first), Cell(row.second), Cell(difference_text(row, metric), row.difference)),
            *cells_of(row, metric, tested),
        ]
        for row in shown.values()
    ]
    second = "versus" if first == "method" else "second"
    return Table(caption, [f"{first}{oracle_mark(rule)}", second, "difference", *tested], rows, labels=2)


def _better(run: Run) -> str:
    return "Right" if HIGHER_IS_BETTER[run.metric] else "Left"


def forest(name: str, what: str, metric: str, shown: Mapping[str, Comparison]) -> Figure:
    """Returns the plot of differences, a row per label; `what` they are stands below the axis."""

    def marks(row: Comparison) -> list[Mark]:
        def ends(interval: Interval | None) -> list[float] | None:
            return None if interval is None else [axis_value(metric, end) for end in interval]

        elsewhere, here = (
            Mark("elsewhere", None, ends(_elsewhere(row)), 0.16),
            Mark("here", None, ends(_here(row)), -0.16),
        )
        return [elsewhere, here, Mark("difference", axis_value(metric, row.difference))]

    told = "; ".join(
        f"{label} {difference_text(row, metric)}, {here_words(row, metric)}" for label, row in shown.items()
    )
    elsewhere = "Thin orange line: 95% interval elsewhere, on new domains; at the edge it goes on. "
    low, high = _axis(list(shown.values()))
    return points(
        name,
        f"Forest plot of the {what}: {told}.",
        "Diamond: the difference. Thick blue line: 95% interval here, with other seeds and test images. "
        f"{elsewhere if any(map(_elsewhere, shown.values())) else ''}At the right Holm's p here.",
        lambda: [
            Row(label, marks(row), right=f"p {p_value(row.p_here and row.p_here.holm)}") for label, row in shown.items()
        ],
        f"{what} in {unit_of_difference(metric)}",
        LOOKS,
        limits=(axis_value(metric, low), axis_value(metric, high)),
        count=len(shown),
        zero=True,
        row_height=0.38,
        width=4.6,
    )


def _here(row: Comparison) -> Interval | None:
    return row.on_these and row.on_these.interval()


def _elsewhere(row: Comparison) -> Interval | None:
    return row.on_others and row.on_others.interval()


def _axis(rows: Sequence[Comparison]) -> tuple[float, float]:
    """Returns the ends of the axis, around 0 and every difference."""
    differences = [row.difference for row in rows]
    ends = [end for row in rows for end in _here(row) or ()]
    wide = [end for row in rows for end in _elsewhere(row) or ()]
    narrow = max(map(abs, [*differences, *ends]))
    limit = min(max(narrow, *map(abs, wide)) if wide else narrow, MAX_WIDTH * narrow) or 0.01
    every = [*differences, *ends, *wide]
    low, high = max(min(0.0, *every), -limit), min(max(0.0, *every), limit)
    margin = 0.05 * (high - low) or limit
    return low - margin, high + margin
