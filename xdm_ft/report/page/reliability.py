"""Whether a probability means what it says, per held-out domain."""

from __future__ import annotations

from typing import Any

import numpy as np

from xdm_ft.evaluation.records import Held
from xdm_ft.report.finished import Run
from xdm_ft.report.page import figures, numbers
from xdm_ft.report.page.panel import Cell, Figure, Panel, Table
from xdm_ft.report.page.shown import shown_method, shown_sets, which_sets
from xdm_ft.report.pooled import Pool
from xdm_ft.report.table_rows import number

FEWEST = 10  # images that a bin needs for a point: fewer say nothing


def panel(run: Run) -> Panel | None:
    method = shown_method(run)
    sets = [held for held in shown_sets(run, method) if run.pools.of[method or "", held].calibrated]
    if method is None or not sets:
        return None
    return Panel(
        id="reliability",
        title="Whether confidence can be trusted",
        about="Of the images on which a model is 80% sure, about 80% should be right: then points lie on the "
        f"diagonal. Below it the model is too sure. Of {method}, as trained, without a temperature; the other methods "
        f"are thin lines. {run.pools.about()}{which_sets(run, sets)}",
        figures=[_figure(run, method, held, i) for i, held in enumerate(sets, 1)],
        tables=[_table(run)],
    )


def _points(pool: Pool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean confidence, accuracy and share of the images of every bin that has enough of them."""
    n, confidence, right = pool.bins.T
    kept = n >= FEWEST
    return confidence[kept] / n[kept], right[kept] / n[kept], n[kept] / n.sum()


def _figure(run: Run, method: str, held: Held, place: int) -> Figure:
    pool = run.pools.of[method, held]
    confidence, accuracy, share = _points(pool)

    def draw(figure: Any) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        upper.set_title(f"{figures.short(numbers.set_name(held), 30)} held out")
        upper.plot([0, 100], [0, 100], color=figures.MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for (other, of), one in run.pools.of.items():
            if of == held and other != method and one.calibrated and one.read:
                x, y, _ = _points(one)
                upper.plot(100 * x, 100 * y, color=figures.MUTED, linewidth=0.7, alpha=0.5)
        upper.plot(100 * confidence, 100 * accuracy, "o-", color=figures.SERIES[0], markersize=4)
        upper.set_ylabel("right in %")
        upper.set_ylim(-2, 102)
        lower.bar(100 * confidence, 100 * share, width=5, color=figures.SERIES[0])
        lower.set_ylabel("images in %")
        lower.set_xlabel("confidence in %")
        lower.set_xlim(0, 102)

    n, total, right = pool.bins.sum(0)
    told = f"mean confidence {100 * total / n:.1f}%, right {100 * right / n:.1f}%"
    return Figure(
        name=f"reliability-{place}",
        svg=figures.svg(f"reliability-{place}", draw, 3.6, 3.4),
        alt=f"Reliability of {method}, {numbers.set_name(held)} held out: {told}.",
        caption=told[0].upper() + told[1:] + ".",
    )


def _table(run: Run) -> Table:
    sets = numbers.held_out_sets(run)
    models, rows = numbers.own_models(run), []
    for row in run.own_rows:
        spreads = [models.on(row.method, held, numbers.ECE) for held in sets]
        values = [spread.mean for spread in (*spreads, models.mean(row.method, numbers.ECE))]
        cells = [Cell(number(value, "ece"), value) for value in values]
        rows.append([Cell(row.method), *cells])
    caption = "Expected calibration error (ECE, 15 bins) in percentage points, the mean over seeds. Lower is better."
    return Table(caption, ["method", *(numbers.set_name(held) for held in sets), "mean"], rows, folded=True)
