"""What share of the images can be answered at what accuracy, if the least confident ones go to a human."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from xdm_ft.report.analysed import method_looks
from xdm_ft.report.charts import Figure, Line, curves
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, Table

TARGETS = (0.8, 0.9, 0.95, 0.99)  # accuracies of the table
MAX_LINES = 8  # methods that are drawn: the chosen one and the first others
SMALLEST_SHARE = 0.005  # of the images, from which on a curve is drawn
Curve = tuple[np.ndarray, np.ndarray]  # coverage and accuracy of the answers at every threshold


def section(run: Run) -> Section | None:
    by_method = {row.method: curve for row in run.own_rows if (curve := _curve(run, row.method)) is not None}
    if not by_method:
        return None
    drawn = [name for name in dict.fromkeys([run.shown_method, *by_method]) if name in by_method][:MAX_LINES]
    fewer = len(drawn) < len(by_method)
    more = f" Drawn are {len(drawn)} of {len(by_method)} methods; the table has all." if fewer else ""
    return Section(
        id="risk-coverage",
        title="How much can be answered at what accuracy",
        about="A model answers only where its confidence is above a threshold, and leaves the other images to a "
        "person: the fewer it answers, the more of the answers are right. Every held-out domain weighs the same, and "
        f"has the same threshold.{more}",
        figures=[_figure(run, {name: by_method[name] for name in drawn if name})],
        tables=[_table(by_method)],
        notes=["The thresholds are read off these test images. On a new domain, set one with labelled images of it."],
    )


def _curve(run: Run, method: str) -> Curve | None:
    """Returns the curve from the highest threshold of confidence on; None if it is not known."""
    pools = [pool for held in run.held_out_sets if (pool := run.pools.of.get((method, held)))]
    if not pools or not all(pool.calibrated and pool.read for pool in pools):
        return None
    shares = sum(pool.levels / pool.levels[:, 0].sum() for pool in pools) / len(pools)  # [LEVELS,2]
    answered, right = np.cumsum(np.asarray(shares)[::-1], axis=0).T
    first = np.searchsorted(answered, 1e-12, "right")  # the first threshold that some image exceeds
    return answered[first:], right[first:] / answered[first:]


def _figure(run: Run, by_method: Mapping[str, Curve]) -> Figure:
    styles, lines, told = method_looks(run), [], []
    for name, (answered, accuracy) in by_method.items():
        steps = np.searchsorted(answered, np.linspace(SMALLEST_SHARE, answered[-1], 200) - 1e-12)
        kept = np.unique(np.minimum(steps, len(answered) - 1))
        lines.append(Line(name, styles[name], [*zip(100 * answered[kept], 100 * accuracy[kept], strict=True)]))
        half = min(int(np.searchsorted(answered, 0.5)), len(answered) - 1)
        best = f"{100 * accuracy[half]:.1f}% of the most confident half"
        told.append(f"{name}: {100 * accuracy[-1]:.1f}% right of all, {best}")
    return curves(
        "risk-coverage",
        f"Accuracy of the answers against the share of images that are answered. {'; '.join(told)}.",
        "At the right every image is answered: this is the accuracy over all images.",
        {"": lines},
        ("images that are answered in %", "right answers in %"),
        limits={"xmin": 0, "xmax": 100},
        width=4.6,
        height=3.4,
    )


def _table(by_method: Mapping[str, Curve]) -> Table:
    rows = []
    for name, (answered, accuracy) in by_method.items():
        # the largest share whose answers are at least that accurate
        shares = [float(answered[accuracy >= target].max(initial=0)) for target in TARGETS]
        cells = [Cell(f"{100 * share:.0f}" if share else "none", share) for share in shares]
        rows.append([Cell(name), *cells, Cell(f"{100 * accuracy[-1]:.1f}", float(accuracy[-1]))])
    header = ["method", *(f"{100 * target:.0f}% right" for target in TARGETS), "accuracy if all are answered"]
    return Table("Share of the images in % that can be answered with so many right answers.", header, rows)
