"""Whether a probability means what it says, per held-out domain."""

from __future__ import annotations

import numpy as np

from xdm_ft.evaluation.records import Held, set_name
from xdm_ft.report.charts import MUTED, SERIES, Figure, Line, Look, curves
from xdm_ft.report.finished import Run
from xdm_ft.report.frame import ECE, Picked
from xdm_ft.report.pooled import Pool
from xdm_ft.report.section import Cell, Section, Table, metric_cell
from xdm_ft.report.sections.confusion import worst_sets
from xdm_ft.report.words import short

FEWEST_IMAGES = 10  # that a bin needs for a point: fewer say nothing
OTHERS = Look(MUTED, "", "-", width=0.7)


def section(run: Run) -> Section | None:
    method = run.shown_method
    sets = [held for held in run.shown_sets(method) if run.pools.of[method or "", held].calibrated]
    if method is None or not sets:
        return None
    return Section(
        id="reliability",
        title="Whether confidence can be trusted",
        about="Of the images on which a model is 80% sure, about 80% should be right: then points lie on the "
        f"diagonal. Below it the model is too sure. Of {method}, as trained, without a temperature; the other methods "
        f"are thin lines, and bars say how many of the images have that confidence. {run.pools.about()}"
        f"{worst_sets(run, sets)}",
        figures=[_figure(run, method, held, f"reliability-{i}") for i, held in enumerate(sets, 1)],
        tables=[_table(run)],
    )


def _points(pool: Pool) -> np.ndarray:
    """Returns confidence, accuracy and share of the images, in %, of every bin that has enough of them: [bins,3]."""
    n, confidence, right = pool.bins.T
    kept = n >= FEWEST_IMAGES
    return 100 * np.stack([confidence[kept] / n[kept], right[kept] / n[kept], n[kept] / n.sum()], 1)


def _figure(run: Run, method: str, held: Held, name: str) -> Figure:
    pool = run.pools.of[method, held]
    points = _points(pool)
    others = [
        Line("", OTHERS, [(x, y) for x, y, _ in _points(other)])
        for (label, where), other in run.pools.of.items()
        if where == held and label != method and other.calibrated and other.read
    ]
    own = Line("", Look(SERIES[0]), [(x, y) for x, y, _ in points])
    n, confidence, right = pool.bins.sum(0)
    told = f"mean confidence {100 * confidence / n:.1f}%, right {100 * right / n:.1f}%"
    return curves(
        name,
        f"Reliability of {method}, {set_name(held)} held out: {told}.",
        told[0].upper() + told[1:] + ".",
        {f"{short(set_name(held), 30)} held out": [*others, own]},
        ("confidence in %", "right in %"),
        diagonal=True,
        bars=[(x, share) for x, _, share in points],
        limits={"xmin": 0, "xmax": 102, "ymin": -2, "ymax": 102},
        height=3.4,
    )


def _table(run: Run) -> Table:
    models, rows = Picked(run, run.own_rule), []
    for row in run.own_rows:
        spreads = [*(models.on(row.method, held, ECE) for held in run.held_out_sets), models.mean(row.method, ECE)]
        rows.append([Cell(row.method), *(metric_cell(spread.mean, "ece") for spread in spreads)])
    caption = "Expected calibration error (ECE, 15 bins) in percentage points, the mean over seeds. Lower is better."
    return Table(caption, ["method", *map(set_name, run.held_out_sets), "mean"], rows, folded=True)
