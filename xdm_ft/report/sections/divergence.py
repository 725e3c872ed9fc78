"""How far augmented features are from the original ones, per level of τ_d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xdm_ft.report.analysed import by_set, method_looks, models, not_measured
from xdm_ft.report.charts import INK, MARKERS, Figure, Look, Mark, Row, points
from xdm_ft.report.finished import Run
from xdm_ft.report.published import paper_table
from xdm_ft.report.section import Cell, Section, count_cell, long_table, mean_cell, mean_of
from xdm_ft.report.words import listed, short, significant

KERNELS = 7  # of the published measure: twice this divided by the batch size is the limit for far features
MAX_BARS = 24


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
        return mean_of(entry[key] for entry in self.entries)


def section(run: Run) -> Section | None:
    """Bars of both estimates per method and level, and a table; None if no augmented features were measured."""
    levels = _levels(run)
    if not levels:
        return None
    sizes = sorted({entry["batch_size"] for level in levels for entry in level.entries})
    limit = " or ".join(f"{2 * KERNELS / size:.3g}" for size in sizes)
    header = ["method", "held out", "quantile of τ_d", "published MMD", "batch size", "unbiased MMD²", "± error"]
    caption = "Divergence of augmented features, mean ± standard deviation over seeds; the error is that of one seed."
    return Section(
        id="divergence",
        title="Divergence of augmented features",
        about="Maximum mean discrepancy (MMD) between original and augmented features of training images, per quantile "
        "that sets τ_d, the threshold of domain-specific features. The unbiased MMD² is 0 within its error if their "
        "distribution did not change. More divergence is not better by itself: noise diverges too.",
        figures=[
            _figure(run, levels, "published_mmd", "published MMD", 2 * KERNELS / sizes[0] if len(sizes) == 1 else None),
            _figure(run, levels, "unbiased_mmd2", "unbiased MMD²"),
        ],
        tables=[
            long_table(caption, [*header, "samples"], [_row(level) for level in levels]),
            *paper_table(run, "divergence of augmented features"),
        ],
        notes=[
            f"the published MMD (seven kernels; each batch of {' or '.join(map(str, sizes))} against its own augmented "
            "features) counts the kernel of each sample with itself, which dominates it: it is near its limit, twice "
            f"the number of kernels divided by the batch size ({limit}), as soon as every feature has moved a little",
            "published values of different batch sizes do not compare, and those of the paper's data sets differ in it",
            *not_measured(run),
        ],
    )


def _levels(run: Run) -> list[Level]:
    levels = []
    for (method, where), own in by_set(models(run, "divergence")).items():
        entries: dict[float | None, list[dict[str, Any]]] = {}
        for entry in (entry for model in own for entry in model["divergence"]):
            entries.setdefault(entry["quantile"], []).append(entry)
        levels += [Level(method, where, quantile, of_level) for quantile, of_level in entries.items()]
    return levels


def _row(level: Level) -> list[Cell]:
    first, error = level.entries[0], level.mean("stderr")
    return [
        Cell(level.method),
        Cell(level.where),
        Cell(level.name or "none", level.quantile),
        mean_cell(entry["published_mmd"] for entry in level.entries),
        count_cell(first["batch_size"]),
        mean_cell(entry["unbiased_mmd2"] for entry in level.entries),
        Cell("" if error is None else significant(error, 2), error),
        count_cell(first["n"]),
    ]


def _figure(run: Run, levels: Sequence[Level], key: str, title: str, limit: float | None = None) -> Figure:
    styles, rows = method_looks(run), dict[tuple[str, float | None], Bar]()
    unbiased = key == "unbiased_mmd2"
    for level in levels:
        label = f"{level.method} {level.name}".strip()
        row = rows.setdefault((level.method, level.quantile), Bar(label, styles[level.method].colour, {}, {}))
        value, error = level.mean(key), level.mean("stderr")
        if value is not None:
            row.values[level.where] = value
            row.errors.update({level.where: error} if unbiased and error is not None else {})
    told = [f"{row.label} {significant(row.mean)}" for row in rows.values() if row.mean is not None]
    alt = f"Bars of the {title}, mean over held-out domains: {listed(told) or 'none is defined'}."
    caption = f"{title[0].upper()}{title[1:]} per method and quantile of τ_d. Bar: mean; marker: a held-out domain"
    caption += ", with its standard error." if unbiased else "; dashed: the limit."
    return bars(f"divergence-{key.replace('_', '-')}", alt, caption, list(rows.values()), title, limit)


@dataclass(frozen=True)
class Bar:
    """The values of the held-out sets where a row has one, and the standard errors of some."""

    label: str
    colour: str
    values: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)
    chance: float | None = None  # about what the value is if there is nothing to measure

    @property
    def mean(self) -> float | None:
        return mean_of(self.values.values())


def bars(name: str, alt: str, caption: str, rows: Sequence[Bar], axis: str, limit: float | None = None) -> Figure:
    """Returns bars of the means of the first rows, and a marker for each held-out set."""
    rows = rows[:MAX_BARS]
    sets = list(dict.fromkeys(held for row in rows for held in row.values))
    few = len(sets) <= len(MARKERS)  # of more sets all get a dot, without errors and legend
    markers = MARKERS if few else ["o"] * len(sets)
    series = {held: Look(INK, marker, size=3.5, width=1) for held, marker in zip(sets, markers, strict=False)}
    series |= {"by chance": Look(INK, "|", size=16)}
    legend = {held: short(held, 18) for held in sets} if few and len(sets) > 1 else {}
    legend |= {"by chance": "by chance"} if any(row.chance is not None for row in rows) else {}

    def marks(row: Bar) -> list[Mark]:
        made = [] if row.chance is None else [Mark("by chance", row.chance)]
        for held, value in row.values.items() if len(sets) > 1 or row.errors else ():
            error = row.errors.get(held) if few else None
            ends = None if error is None else (value - error, value + error)
            made.append(Mark(held, value, ends, 0.3 * (sets.index(held) / max(len(sets) - 1, 1) - 0.5)))
        return made

    made = [Row(row.label, marks(row), row.mean, row.colour) for row in rows]
    return points(name, alt, caption, lambda: made, axis, series, legend, limit=limit, count=len(rows), zero=True)
