"""Lines over training steps: one per model, and the mean of each method."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from xdm_ft.report.page.figures import INK, short, svg
from xdm_ft.report.page.styles import WIDTH, Style, every, legend_below, legend_height, logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MOST_POINTS, MOST_THIN_POINTS = 120, 60  # of a mean, and of a model
MOST_LINES = 6  # of models, per method and figure
WIDE = 50  # ratio of the largest to the smallest value from which the axis is logarithmic
Item = TypeVar("Item")


class Curve(NamedTuple):
    """A model's values."""

    points: list[tuple[int, float]]
    picked: int | None  # the step that selection picked, to be marked


class Band(NamedTuple):
    """Heads that trained together."""

    heads: float  # how many
    mean: dict[int, float]  # {step: value}
    low: dict[int, float]
    high: dict[int, float]


class Lines(NamedTuple):
    """A method's part of a figure."""

    name: str
    look: Style
    curves: list[Curve]
    bands: list[Band]

    @property
    def mean(self) -> list[tuple[int, float]]:
        """The mean over the models, at the steps that all of them have: a model that stopped early moves no line."""
        values = [dict(curve.points) for curve in self.curves] + [band.mean for band in self.bands]
        weights = [1.0] * len(self.curves) + [band.heads for band in self.bands]
        return [(step, fmean([one[step] for one in values], weights)) for step in _common(values)]

    @property
    def range(self) -> list[tuple[int, float, float]]:
        """(step, lowest, highest) over the heads that are summarised."""
        low, high = [band.low for band in self.bands], [band.high for band in self.bands]
        return [(s, min(one[s] for one in low), max(one[s] for one in high)) for s in _common([*low, *high])]

    @property
    def last(self) -> float | None:
        return self.mean[-1][1] if self.mean else None


def _common(values: Sequence[dict[int, float]]) -> list[int]:
    return sorted(set(values[0]).intersection(*values[1:])) if values else []


def thinned(points: Sequence[Item], most: int) -> list[Item]:
    """At most `most` points, evenly, with the first and the last one."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def curves_svg(name: str, lines: Sequence[Lines], axis: str) -> str:
    def draw(figure: Canvas) -> None:
        axes = figure.subplots()
        for own in lines:
            _draw(axes, own)
        low, high = axes.get_ylim()
        values = [value for own in lines for curve in own.curves for _, value in curve.points]
        if values and min(values) > 0 and max(values) > WIDE * min(values):
            logarithmic(axes, "y", values)
        elif high - low < 1e-9:
            axes.set_ylim(low - 1, high + 1)
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel("training steps")
        axes.set_ylabel(axis)
        legend_below(figure, axes)

    return svg(name, draw, WIDTH, 2.5 + legend_height(len(lines)))


def _draw(axes: Axes, own: Lines) -> None:
    colour, marker, line = own.look
    if own.range:
        steps, low, high = zip(*thinned(own.range, MOST_THIN_POINTS), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.08, linewidth=0)
        for edge in (low, high):
            axes.plot(steps, edge, color=colour, ls=line, linewidth=0.7)
    if len(own.curves) > 1:
        for curve in own.curves[:MOST_LINES]:
            points = thinned(curve.points, MOST_THIN_POINTS)
            axes.plot([step for step, _ in points], [v for _, v in points], color=colour, linewidth=0.6, alpha=0.45)
    for curve in own.curves[:MOST_LINES]:
        picked = dict(curve.points).get(curve.picked) if curve.picked is not None else None
        if curve.picked is not None and picked is not None:
            axes.plot(curve.picked, picked, "o", color=INK, ms=6, mew=1, fillstyle="none", zorder=5)
    mean = thinned(own.mean, MOST_POINTS)
    style = {"ls": line, "color": colour, "marker": marker, "ms": 3.5, "markevery": every(len(mean)), "linewidth": 1.6}
    axes.plot([step for step, _ in mean], [value for _, value in mean], label=short(own.name), **style)
