"""Horizontal bars: one row per method, its mean over held-out domains, and a marker for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xdm_ft.report.page.figures import INK, MARKERS, short, svg
from xdm_ft.report.page.styles import WIDTH, legend_below, legend_height

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MOST_BARS = 24
MARKED_SETS = len(MARKERS)  # more held-out sets than markers: all get a dot, without a legend


@dataclass(frozen=True)
class Bar:
    """A row: the values of the held-out sets where it has one, and the standard errors of some."""

    label: str
    colour: str
    values: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)
    chance: float | None = None  # about what the value is if there is nothing to measure

    @property
    def mean(self) -> float | None:
        return sum(self.values.values()) / len(self.values) if self.values else None


def bars(name: str, rows: Sequence[Bar], axis: str, limit: float | None = None) -> str:
    """Returns the SVG of the first `MOST_BARS` rows. Bars begin at 0, so their lengths can be compared.

    `limit` is a value that the bars can hardly exceed, marked by a line.
    """
    rows = rows[:MOST_BARS]
    sets = list(dict.fromkeys(held for row in rows for held in row.values))
    marked = {held: MARKERS[i] for i, held in enumerate(sets)} if 1 < len(sets) <= MARKED_SETS else {}
    by_chance = any(row.chance is not None for row in rows)
    legend = {held: short(held, 18) for held in marked}

    def draw(figure: Canvas) -> None:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            if row.mean is None:
                axes.text(0, place, " not defined", va="center", fontsize=8)
                continue
            axes.barh(place, row.mean, height=0.62, color=row.colour, alpha=0.35, edgecolor=row.colour)
            if row.chance is not None:
                axes.plot([row.chance] * 2, [place - 0.38, place + 0.38], color=INK, linestyle=":", linewidth=1.6)
            for held, value in row.values.items():
                shift = 0.3 * (sets.index(held) / max(len(sets) - 1, 1) - 0.5) if len(sets) > 1 else 0.0
                if held in row.errors and len(sets) <= MARKED_SETS:
                    axes.errorbar(value, place + shift, xerr=row.errors[held], color=INK, elinewidth=1, capsize=2)
                if len(sets) > 1:
                    axes.plot(value, place + shift, marked.get(held, "o"), color=INK, ms=3.5, mew=0, alpha=0.8)
        for held, marker in marked.items():
            axes.plot([], [], marker, color=INK, ms=3.5, mew=0, label=legend[held])
        if by_chance:
            axes.plot([], [], ":", color=INK, linewidth=1.6, label="by chance")
        if limit is not None:
            axes.axvline(limit, color=INK, linewidth=1, linestyle="--", label="limit")
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [short(row.label) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.locator_params(axis="x", nbins=4)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(axis)
        legend_below(figure, axes)

    entries = len(marked) + by_chance + (limit is not None)
    return svg(name, draw, WIDTH, 0.75 + 0.27 * len(rows) + legend_height(entries))
