"""The differences to ERM with their intervals: a forest plot and its numbers."""

from __future__ import annotations

from typing import Any

from xdm_ft.evaluation.comparison import ALPHA
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import SummaryRow
from xdm_ft.report.finished import Run
from xdm_ft.report.page import figures, numbers
from xdm_ft.report.page.panel import Cell, Figure, Panel, Table
from xdm_ft.report.table_rows import metric_words, p_value, scaled

ENDS = "low", "high"
OVER_DOMAINS = (
    "Thin orange line: 95% interval over held-out domains, what to expect on other domains; at the edge it goes on. "
)
WIDEST = 3.0
"""An interval over few domains can be so wide that nothing else is seen: the axis ends at this many times the largest
of the other numbers."""


def panel(run: Run) -> Panel | None:
    rows = [row for row in run.own_rows if row.versus_erm]
    if not rows:
        return None
    better = "right" if HIGHER_IS_BETTER[run.metric] else "left"
    return Panel(
        id="differences",
        title="Differences to ERM",
        about=f"Test {metric_words(run.metric)} of each method less that of erm, paired by held-out domain and "
        f"seed. {better.capitalize()} of the zero line is better. Holm's p is corrected for all methods of the table; "
        f"below {ALPHA} the verdict is better or worse. The intervals are not corrected.",
        figures=[_forest(run, rows)],
        tables=[_table(run, rows)],
        notes=numbers.noted((row.method, (row.versus_erm or {})["note"]) for row in rows),
    )


def _forest(run: Run, rows: list[SummaryRow]) -> Figure:
    metric = run.metric
    found = [row.versus_erm or {} for row in rows]
    narrow = [abs(one["difference"]) for one in found]
    narrow += [abs(one["seeds_and_images"][end]) for one in found if one["seeds_and_images"] for end in ENDS]
    widest = [abs(one["domains"][end]) for one in found if one["domains"] for end in ENDS]
    limit = min(max([*narrow, *widest]), WIDEST * max(narrow)) or 0.01
    every = [one["difference"] for one in found]
    every += [one[kind][end] for one in found for kind in ("domains", "seeds_and_images") if one[kind] for end in ENDS]
    low, high = max(min(0.0, *every), -limit), min(max(0.0, *every), limit)
    margin = 0.05 * (high - low) or limit

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.axvline(0, color=figures.INK, linewidth=1)
        for place, one in enumerate(found):
            for kind, offset, width, colour in (("domains", 0.16, 1.4, 1), ("seeds_and_images", -0.16, 3.2, 0)):
                if one[kind] is not None:
                    ends = [numbers.axis_value(metric, one[kind][end]) for end in ENDS]
                    axes.plot(ends, [place + offset] * 2, color=figures.SERIES[colour], linewidth=width)
            axes.plot(numbers.axis_value(metric, one["difference"]), place, "D", color=figures.INK, markersize=5)
        axes.set_yticks(range(len(rows)), [figures.short(row.method) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(numbers.axis_value(metric, low - margin), numbers.axis_value(metric, high + margin))
        axes.set_xlabel(f"difference to erm in {numbers.points(metric)}")
        axes.grid(axis="y", visible=False)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(rows)), [f"p {p_value(one['p_holm'])}" for one in found])
        right.tick_params(length=0)
        right.spines["right"].set_visible(False)

    told = "; ".join(f"{row.method} {_difference(run, row)}, {(row.versus_erm or {})['verdict']}" for row in rows)
    return Figure(
        name="differences",
        svg=figures.svg("differences", draw, 4.6, 0.8 + 0.38 * len(rows)),
        alt=f"Forest plot of the differences to erm: {told}.",
        caption="Diamond: the difference. Thick blue line: 95% interval over seeds and test images of these domains. "
        + (OVER_DOMAINS if widest else "")
        + "At the right Holm's p.",
    )


def _table(run: Run, rows: list[SummaryRow]) -> Table:
    header = ["method", "difference", "95% over domains", "95% over seeds and images", "p", "p (Holm)", "verdict"]
    return Table(f"Differences to erm in {numbers.points(run.metric)}.", header, [_cells(run, row) for row in rows])


def _cells(run: Run, row: SummaryRow) -> list[Cell]:
    one = row.versus_erm or {}
    cells = [Cell(row.method), Cell(_difference(run, row), one["difference"])]
    for kind in ("domains", "seeds_and_images"):
        ends = (one[kind]["low"], one[kind]["high"]) if one[kind] else None
        cells.append(Cell(numbers.between(run.metric, ends, signed=True), ends[0]) if ends else Cell("not estimated"))
    return [*cells, *(Cell(p_value(one[kind]), one[kind]) for kind in ("p", "p_holm")), Cell(one["verdict"])]


def _difference(run: Run, row: SummaryRow) -> str:
    return scaled((row.versus_erm or {})["difference"], run.metric, signed=True)
