"""Which classes are taken for which others, per held-out domain."""

from __future__ import annotations

from typing import Any

import numpy as np

from xdm_ft.evaluation.metrics import recalls
from xdm_ft.evaluation.records import Held
from xdm_ft.report.finished import Run
from xdm_ft.report.page import figures, numbers
from xdm_ft.report.page.panel import Cell, Figure, Panel, Table
from xdm_ft.report.page.shown import shown_method, shown_sets, which_sets

WRITTEN = 10  # classes, at most, whose cells hold numbers
NAMED = 40  # classes, at most, whose rows have names
PAIRS = 15  # most frequent confusions in the table
SMALL = 40  # classes, at most, of the small matrices of the other methods
METHODS = 16  # other methods, at most
DARKEST = 0.8  # opacity of a share of 100%: text on it can be read in light and in dark mode


def panel(run: Run) -> Panel | None:
    method = shown_method(run)
    sets = shown_sets(run, method)
    if method is None or not sets:
        return None
    return Panel(
        id="confusion",
        title="Which classes are mistaken",
        about="Rows are the true classes, columns the predicted ones; a cell is the share of the row's images in %, "
        f"so each row adds up to 100. Of {method}{', which the selection rule chose' if method == run.chosen else ''}. "
        f"{run.pools.about()}{which_sets(run, sets)}",
        figures=[_matrix(run, method, held, i) for i, held in enumerate(sets, 1)],
        tables=[table] if (table := _pairs(run, method)) else [],
    )


def others(run: Run) -> Panel | None:
    """The matrices of the other methods, small."""
    chosen = shown_method(run)
    methods = [row.method for row in run.own_rows if row.method != chosen and shown_sets(run, row.method)]
    if not methods or len(run.class_names) > SMALL:
        return None
    left = len(methods) - METHODS
    more = f" {left} more methods are not drawn." if left > 0 else ""
    return Panel(
        id="confusion-others",
        title="Mistaken classes: the other methods",
        about="As above, in the same order of classes, one row of matrices per method: a stronger colour is more. The "
        f"diagonal is what was right.{more}",
        figures=[_small(run, method, i) for i, method in enumerate(methods[:METHODS], 1)],
        folded=True,
    )


def _shares(counts: np.ndarray) -> np.ndarray:
    """Each row's counts as shares, 0 for classes without images."""
    return np.asarray(counts / np.maximum(counts.sum(1, keepdims=True), 1))


def _painted(axes: Any, shares: np.ndarray) -> None:
    """Draws shares as one colour of growing opacity, which suits a light and a dark page."""
    red, green, blue = (int(figures.SERIES[0][i : i + 2], 16) / 255 for i in (1, 3, 5))
    pixels = np.empty((*shares.shape, 4))
    pixels[..., :3] = red, green, blue
    pixels[..., 3] = DARKEST * shares
    axes.imshow(pixels, interpolation="none")
    axes.grid(visible=False)
    axes.tick_params(length=0)


def _matrix(run: Run, method: str, held: Held, number: int) -> Figure:
    counts = run.pools.of[method, held].counts
    shares, classes = _shares(counts), len(counts)
    names = [figures.short(name, 14) for name in run.class_names]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(title=f"{figures.short(numbers.set_name(held), 30)} held out")
        _painted(axes, shares)
        if classes <= NAMED:
            size = 8 if classes <= 20 else 5
            axes.set_xticks(range(classes), names, rotation=90, fontsize=size)
            axes.set_yticks(range(classes), names, fontsize=size)
        else:
            axes.set_xticks([])
            axes.set_yticks([])
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        if classes <= WRITTEN:
            for i, j in zip(*np.nonzero(shares >= 0.005), strict=True):
                axes.text(j, i, f"{100 * shares[i, j]:.0f}", ha="center", va="center", fontsize=7.5)

    worst = np.nan_to_num(recalls(counts), nan=2.0)
    where = f"{numbers.set_name(held)} held out"
    alt = f"Confusion matrix of {method}, {where}: {100 * np.trace(counts) / counts.sum():.1f}% right"
    lowest = int(worst.argmin())
    return Figure(
        name=f"confusion-{number}",
        svg=figures.svg(f"confusion-{number}", draw, 3.6, 3.5),
        alt=f"{alt}; the lowest recall is that of {run.class_names[lowest]}, {100 * worst[lowest]:.1f}%.",
    )


def _small(run: Run, method: str, number: int) -> Figure:
    sets = shown_sets(run, method)
    columns = min(len(sets), 4)
    rows = -(-len(sets) // columns)

    def draw(figure: Any) -> None:
        figure.suptitle(figures.short(method, 40), fontsize=9, x=0.02, ha="left", weight="bold")
        for place, held in enumerate(sets, 1):
            axes = figure.add_subplot(rows, columns, place)
            axes.set_title(figures.short(numbers.set_name(held), 14), fontsize=8)
            _painted(axes, _shares(run.pools.of[method, held].counts))
            axes.set_xticks([])
            axes.set_yticks([])

    right = [
        f"{numbers.set_name(held)} {100 * np.trace(counts) / counts.sum():.1f}%"
        for held in sets
        if (counts := run.pools.of[method, held].counts).sum()
    ]
    return Figure(
        name=f"confusion-others-{number}",
        svg=figures.svg(f"confusion-others-{number}", draw, max(2.0, 1.15 * columns), 0.3 + 1.3 * rows),
        alt=f"Confusion matrices of {method}; right were: {', '.join(right)}.",
    )


def _pairs(run: Run, method: str) -> Table | None:
    """The most frequent confusions as shares of the true class's images."""
    found = []
    for held in numbers.held_out_sets(run):
        pool = run.pools.of.get((method, held))
        if pool is not None:
            shares = _shares(pool.counts)
            np.fill_diagonal(shares, 0)
            for cell in np.argsort(-shares, axis=None)[:PAIRS]:
                i, j = divmod(int(cell), len(shares))
                if shares[i, j] > 0:
                    found.append((float(shares[i, j]), held, i, j, int(pool.counts[i, j]), int(pool.counts[i].sum())))
    if not found:
        return None
    rows = [
        [
            Cell(run.class_names[i]),
            Cell(run.class_names[j]),
            Cell(numbers.set_name(held)),
            Cell(f"{100 * share:.1f}", share),
            Cell(f"{count} of {of}", count),
        ]
        for share, held, i, j, count, of in sorted(found, key=lambda one: -one[0])[:PAIRS]
    ]
    header = ["true class", "predicted as", "held-out domain", "share of the class in %", "images"]
    return Table(f"The most frequent confusions of {method}, images counted once per seed.", header, rows)
