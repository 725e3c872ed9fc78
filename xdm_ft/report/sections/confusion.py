"""Which classes are taken for which others, per held-out domain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from xdm_ft.evaluation.metrics import recalls
from xdm_ft.evaluation.records import Held, set_name
from xdm_ft.report.charts import Figure, heat_maps
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, Table, texts

MAX_PAIRS = 15  # most frequent confusions in the table
MAX_SMALL = 40  # classes of the small matrices of the other methods
MAX_METHODS = 16  # other methods


def section(run: Run) -> Section | None:
    method = run.shown_method
    sets = run.shown_sets(method)
    if method is None or not sets:
        return None
    chosen = ", which the selection rule chose" if method == run.chosen else ""
    return Section(
        id="confusion",
        title="Which classes are mistaken",
        about="Rows are the true classes, columns the predicted ones; a cell is the share of the row's images in %, "
        f"so each row adds up to 100. Of {method}{chosen}. {run.pools.about()}{worst_sets(run, sets)}",
        figures=[_matrix(run, method, held, f"confusion-{i}") for i, held in enumerate(sets, 1)],
        tables=_pairs(run, method),
    )


def worst_sets(run: Run, sets: Sequence[Held]) -> str:
    """Returns a sentence if some sets are not drawn, else nothing."""
    count = len(run.held_out_sets)
    return f" Of {count} held-out sets, the {len(sets)} with the worst results are drawn." if len(sets) < count else ""


def others_section(run: Run) -> Section | None:
    """The matrices of the other methods, small."""
    methods = [row.method for row in run.own_rows if row.method != run.shown_method and run.shown_sets(row.method)]
    if not methods or len(run.class_names) > MAX_SMALL:
        return None
    more = f" {len(methods) - MAX_METHODS} more methods are not drawn." if len(methods) > MAX_METHODS else ""
    return Section(
        id="confusion-others",
        title="Mistaken classes: the other methods",
        about="As above, in the same order of classes, one row of matrices per method: a stronger colour is more. The "
        f"diagonal is what was right.{more}",
        figures=[_small(run, method, f"confusion-others-{i}") for i, method in enumerate(methods[:MAX_METHODS], 1)],
        folded=True,
    )


def _shares(counts: np.ndarray) -> np.ndarray:
    """Returns each row's counts as shares, 0 for classes without images."""
    return np.asarray(counts / np.maximum(counts.sum(1, keepdims=True), 1))


def _matrix(run: Run, method: str, held: Held, name: str) -> Figure:
    counts = run.pools.of[method, held].counts
    worst = np.nan_to_num(recalls(counts), nan=2.0)
    where = f"{set_name(held)} held out"
    alt = (
        f"Confusion matrix of {method}, {where}: {100 * np.trace(counts) / counts.sum():.1f}% right; the lowest recall "
        f"is that of {run.class_names[int(worst.argmin())]}, {100 * worst.min():.1f}%."
    )
    return heat_maps(name, alt, "", {where: _shares(counts)}, run.class_names)


def _small(run: Run, method: str, name: str) -> Figure:
    counts = {set_name(held): run.pools.of[method, held].counts for held in run.shown_sets(method)}
    right = [f"{where} {100 * np.trace(of) / of.sum():.1f}%" for where, of in counts.items() if of.sum()]
    alt = f"Confusion matrices of {method}; right were: {', '.join(right)}."
    return heat_maps(name, alt, "", {where: _shares(of) for where, of in counts.items()}, (), title=method)


def _pairs(run: Run, method: str) -> list[Table]:
    """Returns the table of the most frequent confusions, as shares of the true class's images."""
    pairs = [pair for held in run.held_out_sets for pair in _pairs_of(run, method, held)]
    rows = [cells for _, cells in sorted(pairs, key=lambda pair: -pair[0])[:MAX_PAIRS]]
    header = ["true class", "predicted as", "held-out domain", "share of the class in %", "images"]
    caption = f"The most frequent confusions of {method}, images counted once per seed."
    return [Table(caption, header, rows, labels=3)] if rows else []


def _pairs_of(run: Run, method: str, held: Held) -> Iterator[tuple[float, list[Cell]]]:
    pool = run.pools.of.get((method, held))
    if pool is None:
        return
    counts = pool.counts
    shares = _shares(counts)
    np.fill_diagonal(shares, 0)
    for cell in np.argsort(-shares, axis=None)[:MAX_PAIRS]:
        i, j = divmod(int(cell), len(shares))
        if shares[i, j] > 0:
            share, count = float(shares[i, j]), int(counts[i, j])
            sized = Cell(f"{100 * share:.1f}", share), Cell(f"{count} of {counts[i].sum()}", count)
            yield share, [*texts(run.class_names[i], run.class_names[j], set_name(held)), *sized]
