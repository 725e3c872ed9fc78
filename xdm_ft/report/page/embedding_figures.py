"""Scatter plots of features in two dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xdm_ft.report.page.figures import SERIES, look, short, svg
from xdm_ft.report.page.styles import WIDTH, legend_height

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MOST_POINTS = 400  # of a plot
MOST_NAMES = 10  # labels that have a place in the legend: of more, colours say nothing
Plot = Mapping[str, Any]  # "points" [[x,y],…], "kind" [0 or 1,…], "label" [number,…]
Labels = Sequence[str]


def side_by_side(name: str, plots: Mapping[str, Plot], parts: tuple[str, str], labels: Labels) -> str:
    """A row per map: points of kind 0 on the left, of kind 1 on the right, marked by label, in the same ranges."""
    numbers = sorted({label for plot in plots.values() for label in plot.get("label") or ()})
    named = numbers if len(numbers) <= MOST_NAMES else []

    def draw(figure: Canvas) -> None:
        rows = figure.subplots(len(plots), 2, squeeze=False, sharex="row", sharey="row")
        for row, (title, plot) in zip(rows, plots.items(), strict=True):
            for kind, axes in enumerate(row):
                _by_label(axes, plot, kind, numbers or [0])
                _frame(axes, f"{parts[kind]}\n{title}")
        handles = [rows[0][0].plot([], [], look(n)[1], color=look(n)[0], ms=4)[0] for n in named]
        names = [short(labels[n]) if n < len(labels) else str(n) for n in named]
        figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)

    return svg(name, draw, WIDTH, 1.9 * len(plots) + legend_height(len(named), 3))


def overlaid(name: str, plots: Mapping[str, Plot]) -> str:
    """A map per column: points of kind 0 (original) and of kind 1 (augmented) in one plot."""

    def draw(figure: Canvas) -> None:
        row = figure.subplots(1, len(plots), squeeze=False)[0]
        for axes, (title, plot) in zip(row, plots.items(), strict=True):
            for kind, (marker, label) in enumerate((("o", "original"), ("^", "augmented"))):
                points = [point for point, of in _thinned(plot["points"], plot["kind"]) if of == kind]
                fill: Any = "none" if kind else "full"
                x, y = _columns(points)
                axes.plot(x, y, marker, color=SERIES[kind], ms=3, mew=0.7, alpha=0.8, fillstyle=fill, label=label)
            _frame(axes, title)
        handles, names = row[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8)

    return svg(name, draw, WIDTH, 2.1 + legend_height(2))


def _by_label(axes: Axes, plot: Plot, kind: int, numbers: Sequence[int]) -> None:
    own = _thinned(plot["points"], plot["kind"], plot.get("label") or [0] * len(plot["points"]))
    for number in numbers:
        colour, marker = look(number)
        x, y = _columns([point for point, of, label in own if of == kind and label == number])
        axes.plot(x, y, marker, color=colour, ms=3, mew=0, alpha=0.8)


def _thinned(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """At most `MOST_POINTS` rows of the columns, evenly."""
    rows = list(zip(*columns, strict=True))
    return rows[:: max(1, -(-len(rows) // MOST_POINTS))]


def _columns(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points]


def _frame(axes: Axes, title: str) -> None:
    """A title and a box: positions have no unit."""
    axes.set_title(title, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
