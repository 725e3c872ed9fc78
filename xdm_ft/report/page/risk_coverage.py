"""What share of the images can be answered at what accuracy, if the least confident ones go to a human."""

from __future__ import annotations

from typing import Any

import numpy as np

from xdm_ft.report.finished import Run
from xdm_ft.report.page import figures, numbers
from xdm_ft.report.page.panel import Cell, Figure, Panel, Table
from xdm_ft.report.page.shown import shown_method
from xdm_ft.report.page.styles import method_styles

TARGETS = (0.8, 0.9, 0.95, 0.99)  # accuracies of the table
LINES = 8  # methods, at most, that are drawn: the chosen one and the first others
FEWEST = 0.005  # share of the images from which on a curve is drawn


def panel(run: Run) -> Panel | None:
    curves = {row.method: curve for row in run.own_rows if (curve := _curve(run, row.method)) is not None}
    if not curves:
        return None
    drawn = [name for name in dict.fromkeys([shown_method(run), *curves]) if name in curves][:LINES]
    more = f" Drawn are {len(drawn)} of {len(curves)} methods; the table has all." if len(drawn) < len(curves) else ""
    return Panel(
        id="risk-coverage",
        title="How much can be answered at what accuracy",
        about="A model answers only where its confidence is above a threshold, and leaves the other images to a "
        "person: the fewer it answers, the more of the answers are right. Every held-out domain weighs the same, and "
        f"has the same threshold.{more}",
        figures=[_figure(run, {name: curves[name] for name in drawn if name})],
        tables=[_table(curves)],
        notes=["The thresholds are read off these test images. On a new domain, set one with labelled images of it."],
    )


def _curve(run: Run, method: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Coverage and accuracy of the answers at every threshold of confidence, from the highest on; None if unknown."""
    pools = [pool for held in numbers.held_out_sets(run) if (pool := run.pools.of.get((method, held)))]
    if not pools or not all(pool.calibrated and pool.read for pool in pools):
        return None
    shares = sum(pool.levels / pool.levels[:, 0].sum() for pool in pools) / len(pools)  # [LEVELS,2]
    answered, right = np.cumsum(np.asarray(shares)[::-1], axis=0).T
    first = np.searchsorted(answered, 1e-12, "right")  # the first threshold that some image exceeds
    return answered[first:], right[first:] / answered[first:]


def _figure(run: Run, curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for i, (name, (answered, accuracy)) in enumerate(curves.items()):
            kept = _thinned(answered)
            colour, marker, line = method_styles(run)[name]
            style = {"color": colour, "marker": marker, "ls": line, "markevery": (0.03 * i, 0.25), "markersize": 4}
            axes.plot(100 * answered[kept], 100 * accuracy[kept], linewidth=1.4, label=figures.short(name), **style)
        axes.set_xlabel("images that are answered in %")
        axes.set_ylabel("right answers in %")
        axes.set_xlim(0, 100)
        figure.legend(loc="outside upper left", ncols=2, fontsize=8)

    told = "; ".join(f"{name}: {_told(curve)}" for name, curve in curves.items())
    return Figure(
        name="risk-coverage",
        svg=figures.svg("risk-coverage", draw, 4.6, 3.4 + 0.18 * len(curves) / 2),
        alt=f"Accuracy of the answers against the share of images that are answered. {told}.",
        caption="At the right every image is answered: this is the accuracy over all images.",
    )


def _thinned(answered: np.ndarray) -> np.ndarray:
    """The points to draw: at most 200, from a share of FEWEST on."""
    steps = np.searchsorted(answered, np.linspace(FEWEST, answered[-1], 200) - 1e-12)
    return np.unique(np.minimum(steps, len(answered) - 1))


def _told(curve: tuple[np.ndarray, np.ndarray]) -> str:
    half = min(int(np.searchsorted(curve[0], 0.5)), len(curve[0]) - 1)
    return f"{100 * curve[1][-1]:.1f}% right of all, {100 * curve[1][half]:.1f}% of the most confident half"


def _table(curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> Table:
    rows = []
    for name, (answered, accuracy) in curves.items():
        # the largest share whose answers are at least that accurate
        shares = [float(answered[accuracy >= target].max(initial=0)) for target in TARGETS]
        cells = [Cell(f"{100 * share:.0f}" if share else "none", share) for share in shares]
        rows.append([Cell(name), *cells, Cell(f"{100 * accuracy[-1]:.1f}", float(accuracy[-1]))])
    header = ["method", *(f"{100 * target:.0f}% right" for target in TARGETS), "accuracy if all are answered"]
    return Table("Share of the images in % that can be answered with so many right answers.", header, rows)
