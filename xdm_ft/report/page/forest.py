"""Differences with their intervals and verdicts: a forest plot, and cells of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xdm_ft.report.page import figures, numbers
from xdm_ft.report.page.panel import Cell, Figure
from xdm_ft.report.table_rows import p_value, scaled

Difference = Mapping[str, Any]  # `versus_erm` of a row of the summary, or an entry of `encoder_pairs`
HEADER = ("difference", "95% over domains", "95% over seeds and images", "p", "p (Holm)", "verdict")
ENDS = "low", "high"
OVER_DOMAINS = (
    "Thin orange line: 95% interval over held-out domains, what to expect on other domains; at the edge it goes on. "
)
WIDEST = 3.0
"""An interval over few domains can be so wide that nothing else is seen: the axis ends at this many times the largest
of the other numbers."""


def forest(name: str, what: str, metric: str, shown: Mapping[str, Difference]) -> Figure:
    """Returns the plot of differences, a line per label; `what` they are stands below the axis."""
    found = list(shown.values())
    low, high = _axis(found)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.axvline(0, color=figures.INK, linewidth=1)
        for place, one in enumerate(found):
            for kind, offset, width, colour in (("domains", 0.16, 1.4, 1), ("seeds_and_images", -0.16, 3.2, 0)):
                if one[kind] is not None:
                    ends = [numbers.axis_value(metric, one[kind][end]) for end in ENDS]
                    axes.plot(ends, [place + offset] * 2, color=figures.SERIES[colour], linewidth=width)
            axes.plot(numbers.axis_value(metric, one["difference"]), place, "D", color=figures.INK, markersize=5)
        axes.set_yticks(range(len(shown)), [figures.short(label) for label in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(numbers.axis_value(metric, low), numbers.axis_value(metric, high))
        axes.set_xlabel(f"{what} in {numbers.points(metric)}")
        axes.grid(axis="y", visible=False)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(shown)), [f"p {p_value(one['p_holm'])}" for one in found])
        right.tick_params(length=0)
        right.spines["right"].set_visible(False)

    told = "; ".join(f"{label} {_points(metric, one)}, {one['verdict']}" for label, one in shown.items())
    return Figure(
        name=name,
        svg=figures.svg(name, draw, 4.6, 0.8 + 0.38 * len(shown)),
        alt=f"Forest plot of the {what}: {told}.",
        caption="Diamond: the difference. Thick blue line: 95% interval over seeds and test images of these domains. "
        + (OVER_DOMAINS if any(one["domains"] for one in found) else "")
        + "At the right Holm's p.",
    )


def _axis(found: list[Difference]) -> tuple[float, float]:
    """Returns the ends of the axis, around 0 and every difference."""
    narrow = [abs(one["difference"]) for one in found]
    narrow += [abs(one["seeds_and_images"][end]) for one in found if one["seeds_and_images"] for end in ENDS]
    widest = [abs(one["domains"][end]) for one in found if one["domains"] for end in ENDS]
    limit = min(max([*narrow, *widest]), WIDEST * max(narrow)) or 0.01
    every = [one["difference"] for one in found]
    every += [one[kind][end] for one in found for kind in ("domains", "seeds_and_images") if one[kind] for end in ENDS]
    low, high = max(min(0.0, *every), -limit), min(max(0.0, *every), limit)
    margin = 0.05 * (high - low) or limit
    return low - margin, high + margin


def cells(metric: str, one: Difference) -> list[Cell]:
    """Returns a cell for each of `HEADER`."""
    found = [Cell(_points(metric, one), one["difference"])]
    for kind in ("domains", "seeds_and_images"):
        ends = (one[kind]["low"], one[kind]["high"]) if one[kind] else None
        found.append(Cell(numbers.between(metric, ends, signed=True), ends[0]) if ends else Cell("not estimated"))
    return [*found, *(Cell(p_value(one[kind]), one[kind]) for kind in ("p", "p_holm")), Cell(one["verdict"])]


def _points(metric: str, one: Difference) -> str:
    return scaled(one["difference"], metric, signed=True)
