"""How methods look in figures: the same colour, marker and line in all of them; widths and legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xdm_ft.report.finished import Run
from xdm_ft.report.page.figures import look
from xdm_ft.report.table_rows import items

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 3.6  # inches: on a phone of 390 px such a figure is not scaled down, and two stand side by side on a desk
LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))
MARKED = 9  # markers of a line, at most
MOST_DECADES = 5  # labels of a logarithmic axis, about


class Style(NamedTuple):
    """Colour, marker and line; no two of the first 64 share all three."""

    colour: str
    marker: str
    line: Any  # a matplotlib line style


def styles(names: Iterable[str]) -> dict[str, Style]:
    """{name: its style}, in the order of the names."""
    return {name: Style(*look(i), LINES[i % len(LINES)]) for i, name in enumerate(dict.fromkeys(names))}


def method_styles(run: Run) -> dict[str, Style]:
    """The style of every method of the run, in the recipe's order; methods that only have results come last."""
    return styles([*items(run.results), *(record.method for record in run.records)])


def listed(names: Sequence[str], count: int = 8) -> str:
    """The names in a sentence: all of them, or the first ones and how many there are."""
    rest = len(names) - count
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:count])} and {rest} more"


def every(count: int) -> int:
    """Each how many points of a line have a marker."""
    return max(1, -(-count // MARKED))


def logarithmic(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Makes an axis logarithmic, with a few labels as plain text: matplotlib's are formulas, which the page has not.

    Zeros stand at the beginning of the axis, apart from the other values, which are above 0.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis, set_scale = getattr(axes, f"{which}axis"), getattr(axes, f"set_{which}scale")
    positive = [value for value in values if value > 0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    zeros = [0.0] if len(positive) < len(values) else []
    if zeros:
        set_scale("symlog", linthresh=min(positive), linscale=0.7)
    else:
        set_scale("log")
    decades = [10.0**power for power in range(first, last + 1, max(1, -(-(last - first) // MOST_DECADES)))]
    # those below the smallest value would touch the label of 0
    axis.set_major_locator(FixedLocator([*zeros, *(value for value in decades if value >= min(positive) or not zeros)]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def legend_below(figure: Figure, axes: Axes, columns: int = 2) -> None:
    """Puts the legend of `axes` below the figure, where it covers no point; without labels there is none."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, handlelength=3)


def legend_height(entries: int, columns: int = 2) -> float:
    """Inches that `legend_below` takes."""
    return 0.2 * -(-entries // columns) + 0.1 if entries else 0.0
