"""Calibration errors before and after a temperature, and reliability diagrams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from xdm_ft.report.page.figures import INK, MUTED, short, svg
from xdm_ft.report.page.styles import WIDTH, Style, legend_below, legend_height

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

FEWEST = 10  # images of a bin that is drawn
Bins = list[tuple[float, float]]
ROLES = (("test", -0.15, "o", "held-out"), ("validation", 0.15, "s", "validation"))


class Dumbbell(NamedTuple):
    method: str
    colour: str
    means: Mapping[str, tuple[float, float]]  # {role: ECE before and after, in %}


def dumbbells(name: str, rows: Sequence[Dumbbell]) -> str:
    def draw(figure: Canvas) -> None:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            for role, shift, marker, _ in ROLES:
                if role in row.means:
                    (before, after), y = row.means[role], place + shift
                    axes.plot([before, after], [y, y], color=row.colour, linewidth=1)
                    axes.plot(before, y, marker, color=row.colour, ms=5, fillstyle="none")
                    axes.plot(after, y, marker, color=row.colour, ms=5)
        for _, _, marker, words in ROLES:
            axes.plot([], [], marker, color=INK, ms=5, fillstyle="none", label=f"{words}, before")
            axes.plot([], [], marker, color=INK, ms=5, label=f"{words}, after")
        axes.set_yticks(range(len(rows)), [short(row.method) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("ECE in %")
        legend_below(figure, axes)

    return svg(name, draw, WIDTH, 0.8 + 0.3 * len(rows) + legend_height(4))


def reliability(name: str, lines: Sequence[tuple[str, Style, Bins, Bins]]) -> str:
    """Left before, right after temperature scaling: a line per method."""

    def draw(figure: Canvas) -> None:
        sides = figure.subplots(1, 2, sharex=True, sharey=True)
        for place, (axes, title) in enumerate(zip(sides, ("before scaling", "after scaling"), strict=True)):
            axes.plot([0, 100], [0, 100], color=MUTED, linewidth=0.9, linestyle=":")
            for method, look, *both in lines:
                x, y = [point[0] for point in both[place]], [point[1] for point in both[place]]
                style = {"marker": look.marker, "ls": look.line, "color": look.colour, "ms": 3, "linewidth": 1}
                axes.plot(x, y, label=short(method, 18), **style)
            axes.set_title(title)
            axes.set_aspect("equal")
            axes.set_xlabel("confidence in %")
        sides[0].set_ylabel("accuracy in %")
        legend_below(figure, sides[0])

    return svg(name, draw, WIDTH, 2.1 + legend_height(len(lines)))
