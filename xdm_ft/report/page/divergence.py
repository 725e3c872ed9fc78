"""How far augmented features are from the original ones, per level of τ_d."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xdm_ft.report.finished import Run
from xdm_ft.report.page.analysed import (
    bounded,
    by_set,
    mean,
    mean_cell,
    not_measured,
    of_the_paper,
    significant,
    with_part,
)
from xdm_ft.report.page.bars import Bar, bars
from xdm_ft.report.page.panel import Cell, Figure, Panel
from xdm_ft.report.page.styles import listed, method_styles

KERNELS = 7  # of the published measure: twice this divided by the batch size is the limit for far features


class Level(NamedTuple):
    """A level of τ_d: its entries in analysis.json, one per seed."""

    method: str
    where: str
    quantile: float | None  # None: the augmentation has no levels
    entries: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return "" if self.quantile is None else f"{100 * self.quantile:g}%"

    def mean(self, key: str) -> float | None:
        return mean(entry[key] for entry in self.entries)


def panel(run: Run) -> Panel | None:
    """Bars of both estimates per method and level, and a table; None if no augmented features were measured."""
    found = _levels(run)
    if not found:
        return None
    sizes = sorted({entry["batch_size"] for level in found for entry in level.entries})
    limit = " or ".join(f"{2 * KERNELS / size:.3g}" for size in sizes)
    about = (
        "Maximum mean discrepancy (MMD) between original and augmented features of training images, per quantile that "
        "sets τ_d, the threshold of domain-specific features. The unbiased MMD² is 0 within its error if their "
        "distribution did not change. More divergence is not better by itself: noise diverges too."
    )
    notes = [
        f"the published MMD (seven kernels; each batch of {' or '.join(map(str, sizes))} against its own augmented "
        "features) counts the kernel of each sample with itself, which dominates it: it is near its limit, twice the "
        f"number of kernels divided by the batch size ({limit}), as soon as every feature has moved a little",
        "published values of different batch sizes do not compare, and those of the paper's data sets differ in it",
    ]
    header = ["method", "held out", "quantile of τ_d", "published MMD", "batch size", "unbiased MMD²", "± error"]
    caption = "Divergence of augmented features, mean ± standard deviation over seeds; the error is that of one seed."
    table = bounded([_row(level) for level in found], caption, [*header, "samples"])
    figures = [
        _figure(run, found, "published_mmd", "published MMD", 2 * KERNELS / sizes[0] if len(sizes) == 1 else None),
        _figure(run, found, "unbiased_mmd2", "unbiased MMD²"),
    ]
    published = of_the_paper(run, "divergence of augmented features")
    return Panel(
        "divergence",
        "Divergence of augmented features",
        about,
        figures,
        [table, *published],
        notes=[*notes, *not_measured(run)],
    )


def _levels(run: Run) -> list[Level]:
    found = []
    for (method, where), own in by_set(with_part(run, "divergence")).items():
        entries: dict[float | None, list[dict[str, Any]]] = {}
        for model in own:
            for entry in model["divergence"]:
                entries.setdefault(entry["quantile"], []).append(entry)
        found += [Level(method, where, quantile, of_level) for quantile, of_level in entries.items()]
    return found


def _row(level: Level) -> list[Cell]:
    first, error = level.entries[0], level.mean("stderr")
    return [
        Cell(level.method),
        Cell(level.where),
        Cell(level.name or "none", level.quantile),
        mean_cell(entry["published_mmd"] for entry in level.entries),
        Cell(str(first["batch_size"]), first["batch_size"]),
        mean_cell(entry["unbiased_mmd2"] for entry in level.entries),
        Cell("" if error is None else significant(error, 2), error),
        Cell(str(first["n"]), first["n"]),
    ]


def _figure(run: Run, found: Sequence[Level], key: str, title: str, limit: float | None = None) -> Figure:
    looks = method_styles(run)
    rows: dict[tuple[str, float | None], Bar] = {}
    for level in found:
        label = f"{level.method} {level.name}".strip()
        row = rows.setdefault((level.method, level.quantile), Bar(label, looks[level.method].colour, {}, {}))
        value, error = level.mean(key), level.mean("stderr")
        if value is not None:
            row.values[level.where] = value
            if key == "unbiased_mmd2" and error is not None:
                row.errors[level.where] = error
    name = f"divergence-{key.replace('_', '-')}"
    known = [f"{row.label} {significant(row.mean)}" for row in rows.values() if row.mean is not None]
    alt = f"Bars of the {title}, mean over held-out domains: {listed(known) or 'none is defined'}."
    caption = f"{title[0].upper()}{title[1:]} per method and quantile of τ_d. Bar: mean; marker: a held-out domain"
    caption += ", with its standard error." if key == "unbiased_mmd2" else "; dashed: the limit."
    return Figure(name, bars(name, list(rows.values()), title, limit), alt, caption)
