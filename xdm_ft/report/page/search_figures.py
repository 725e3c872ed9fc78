"""Scatter plots of the trials of a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from xdm_ft.evaluation.records import Record
from xdm_ft.report.page.figures import INK, short, svg
from xdm_ft.report.page.numbers import axis_label, axis_value, set_name
from xdm_ft.report.page.styles import WIDTH, legend_below, legend_height, logarithmic, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MOST_POINTS = 200  # of a plot
MOST_SETS = 8  # held-out sets with a marker of their own
MOST_NAMES = 8  # on an axis of names


class Shown(NamedTuple):
    """A trial with a selection value and a test value."""

    record: Record
    selection: float
    test: float
    picked: bool


class Axis(NamedTuple):
    """The axis of a hyper-parameter; `names` for values that are not all numbers."""

    key: str
    kind: Literal["linear", "log", "names"]


def against_each_other(name: str, shown: Sequence[Shown], metric: str) -> str:
    """Test value against selection value."""
    scale = axis_value(metric, 1.0)

    def draw(figure: Canvas) -> None:
        axes = figure.subplots()
        _scatter(axes, shown, lambda one: (scale * one.selection, scale * one.test))
        axes.set_xlabel(axis_label(metric, "selection"))
        axes.set_ylabel(axis_label(metric))
        legend_below(figure, axes)

    return svg(name, draw, WIDTH, 2.6 + legend_height(_entries(shown)))


def against_key(name: str, shown: Sequence[Shown], metric: str, axis: Axis) -> str:
    """Selection value above, test value below, against one hyper-parameter."""
    scale = axis_value(metric, 1.0)
    x = _places(shown, axis)

    def draw(figure: Canvas) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        _scatter(above, shown, lambda one: (x(one), scale * one.selection))
        _scatter(below, shown, lambda one: (x(one), scale * one.test))
        above.set_ylabel(axis_label(metric, "selection\n"), fontsize=8)
        below.set_ylabel(axis_label(metric, "test\n"), fontsize=8)
        below.set_xlabel(axis.key)
        _scale(below, shown, axis)
        legend_below(figure, above)

    return svg(name, draw, WIDTH, 3.3 + legend_height(_entries(shown)))


def _sets(shown: Sequence[Shown]) -> list[str]:
    return list(dict.fromkeys(set_name(one.record.test_domains) for one in shown))


def _entries(shown: Sequence[Shown]) -> int:
    """Of the legend: a marker per held-out set, if there are several and few of them, and that of picks."""
    return 1 + (len(_sets(shown)) if 1 < len(_sets(shown)) <= MOST_SETS else 0)


def _scatter(axes: Axes, shown: Sequence[Shown], point: Callable[[Shown], tuple[float, float]]) -> None:
    looks = styles(_sets(shown))
    labelled = _entries(shown) > 1
    for where, look in looks.items():
        own = [one for one in shown if set_name(one.record.test_domains) == where]
        points = [point(one) for one in _thinned(own, max(MOST_POINTS // len(looks), 1))]
        marker = look.marker if len(looks) <= MOST_SETS else "o"
        label = short(where) if labelled else None
        axes.plot(*_columns(points), marker, color=look.colour, ms=3.5, mew=0, alpha=0.75, ls="", label=label)
    picked = [point(one) for one in _thinned([one for one in shown if one.picked], MOST_POINTS // 2)]
    axes.plot(*_columns(picked), "o", color=INK, ms=8, mew=1.1, fillstyle="none", ls="", label="picked")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _thinned(shown: Sequence[Shown], most: int) -> list[Shown]:
    """At most about `most` trials, evenly over their numbers, and every picked one."""
    step = max(1, -(-len(shown) // most))
    return [one for place, one in enumerate(shown) if place % step == 0 or one.picked]


def _names(shown: Sequence[Shown], axis: Axis) -> list[str]:
    """The distinct values, sorted; if there are too many, the last ones share a place."""
    values = sorted({str(one.record.hparams.get(axis.key)) for one in shown})
    return values if len(values) <= MOST_NAMES else [*values[: MOST_NAMES - 1], "others"]


def _places(shown: Sequence[Shown], axis: Axis) -> Callable[[Shown], float]:
    if axis.kind != "names":
        return lambda one: float(one.record.hparams[axis.key])
    places = {value: place for place, value in enumerate(_names(shown, axis))}
    return lambda one: float(places.get(str(one.record.hparams.get(axis.key)), len(places) - 1))


def _scale(axes: Axes, shown: Sequence[Shown], axis: Axis) -> None:
    if axis.kind == "names":
        names = _names(shown, axis)
        axes.set_xticks(range(len(names)), [short(value, 10) for value in names])
        axes.set_xlim(-0.5, len(names) - 0.5)
        return
    if axis.kind == "log":
        logarithmic(axes, "x", [float(one.record.hparams[axis.key]) for one in shown])
    else:
        axes.locator_params(axis="x", nbins=5)
