"""Differences with their intervals and verdicts: a forest plot, and cells of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xdm_ft.evaluation.verdicts import Comparison, Interval
from xdm_ft.report.comparisons import cells_of, here_words
from xdm_ft.report.page import figures, numbers
from xdm_ft.report.page.panel import Cell, Figure
from xdm_ft.report.table_rows import p_value, scaled

ELSEWHERE = "Thin orange line: 95% interval elsewhere, on new domains; at the edge it goes on. "
WIDEST = 3.0
"""An interval over few domains can be so wide that nothing else is seen: the axis ends at this many times the largest
of the other numbers."""


def forest(name: str, what: str, metric: str, shown: Mapping[str, Comparison]) -> Figure:
    """Returns the plot of differences, a line per label; `what` they are stands below the axis."""
    found = list(shown.values())
    low, high = _axis(found)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.axvline(0, color=figures.INK, linewidth=1)
        for place, one in enumerate(found):
            for interval, offset, width, colour in ((_elsewhere(one), 0.16, 1.4, 1), (_here(one), -0.16, 3.2, 0)):
                if interval is not None:
                    ends = [numbers.axis_value(metric, end) for end in interval]
                    axes.plot(ends, [place + offset] * 2, color=figures.SERIES[colour], linewidth=width)
            axes.plot(numbers.axis_value(metric, one.difference), place, "D", color=figures.INK, markersize=5)
        axes.set_yticks(range(len(shown)), [figures.short(label) for label in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(numbers.axis_value(metric, low), numbers.axis_value(metric, high))
        axes.set_xlabel(f"{what} in {numbers.points(metric)}")
        axes.grid(axis="y", visible=False)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(shown)), [f"p {p_value(one.p_here and one.p_here.holm)}" for one in found])
        right.tick_params(length=0)
        right.spines["right"].set_visible(False)

    told = "; ".join(f"{label} {_points(metric, one)}, {here_words(one, metric)}" for label, one in shown.items())
    return Figure(
        name=name,
        svg=figures.svg(name, draw, 4.6, 0.8 + 0.38 * len(shown)),
        alt=f"Forest plot of the {what}: {told}.",
        caption="Diamond: the difference. Thick blue line: 95% interval here, with other seeds and test images. "
        + (ELSEWHERE if any(_elsewhere(one) for one in found) else "")
        + "At the right Holm's p here.",
    )


def _here(row: Comparison) -> Interval | None:
    return row.on_these and row.on_these.interval()


def _elsewhere(row: Comparison) -> Interval | None:
    return row.on_others and row.on_others.interval()


def _axis(rows: list[Comparison]) -> tuple[float, float]:
    """Returns the ends of the axis, around 0 and every difference."""
    differences = [row.difference for row in rows]
    ends = [end for row in rows for end in _here(row) or ()]
    wide = [end for row in rows for end in _elsewhere(row) or ()]
    narrow = max(map(abs, [*differences, *ends]))
    limit = min(max(narrow, *map(abs, wide)) if wide else narrow, WIDEST * narrow) or 0.01
    every = [*differences, *ends, *wide]
    low, high = max(min(0.0, *every), -limit), min(max(0.0, *every), limit)
    margin = 0.05 * (high - low) or limit
    return low - margin, high + margin


def cells(metric: str, row: Comparison, header: Sequence[str]) -> list[Cell]:
    """Returns a cell for the difference, and one for each column of `header_of`."""
    intervals, p_values = (_here(row), _elsewhere(row)), (row.p_here, row.p_elsewhere)
    values: list[float | None] = []
    for interval, p in zip(intervals, p_values, strict=True):
        values += [interval and interval.low, p and p.holm, None]
    texts = cells_of(row, metric, header)
    return [
        Cell(_points(metric, row), row.difference),
        *(Cell(text, value) for text, value in zip(texts, values, strict=False)),
    ]


def _points(metric: str, row: Comparison) -> str:
    return scaled(row.difference, metric, signed=True)
