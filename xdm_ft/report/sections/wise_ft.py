"""Accuracy along the line from the initial weights to the trained ones (WiSE-FT)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Pick, Record, set_name
from xdm_ft.report.charts import Figure, Line, curves, looks
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, count_cell, long_table, metric_cell
from xdm_ft.report.words import EMPTY, axis_value, in_unit

ALPHA, TEST = "alpha", "test"
HALF = 0.5  # the authors' choice without validation
MAX_FIGURES = 12
Picked = tuple[Record, Pick]


def section(run: Run) -> Section | None:
    """Curves per method and held-out set, and a table; None if no picked model has such a curve."""
    groups: dict[tuple[str, str], list[Picked]] = {}
    for record in run.picked:
        pick = record.selected[run.own_rule]
        if pick.curve and all(ALPHA in point for point in pick.curve):
            groups.setdefault((record.method, set_name(record.test_domains)), []).append((record, pick))
    if not groups:
        return None
    about = (
        "WiSE-FT's weights are (1 − α) · initial + α · trained: α = 0 is zero-shot, α = 1 is fine-tuned. The "
        "selection rule picks α on validation images; the authors use 0.5 without validation (dotted). The test curve "
        "shows what another α would have given, and picks nothing. Rings on it: the picked α of each seed."
    )
    shown = list(groups.items())[:MAX_FIGURES]
    figures = [_figure(run, f"wise-ft-{i}", *name, picked) for i, (name, picked) in enumerate(shown)]
    at = [f"test at {what}" for what in ("α = 0", "α = 0.5", "α = 1", "the picked α")]
    header = ["method", "held out", "seed", "picked α", *at, "best on test"]
    rows = [_row(run, *one) for picked in groups.values() for one in picked]
    caption = f"Test {in_unit(run.metric)} along the curve, per model."
    return Section("wise-ft", "From zero-shot to fine-tuned", about, figures, [long_table(caption, header, rows)])


def _line(run: Run, pick: Pick, split: str) -> dict[float, float]:
    """Returns {α: value}, in the unit of the axis, where it is defined."""
    values = {point[ALPHA]: point.get(split) for point in pick.curve or ()}
    return {a: axis_value(run.metric, value) for a, value in values.items() if a is not None and value is not None}


def _mean(lines: Sequence[dict[float, float]]) -> dict[float, float]:
    """Returns the mean of the curves that have a value; their α may differ."""
    return {a: fmean(line[a] for line in lines if a in line) for a in sorted({a for line in lines for a in line})}


def _figure(run: Run, name: str, method: str, where: str, picked: Sequence[Picked]) -> Figure:
    alphas = [pick.hparams[ALPHA] for _, pick in picked if ALPHA in pick.hparams]
    lines, test = [], dict[float, float]()
    for look, split in zip(looks(("a", "b")).values(), dict.fromkeys((TEST, run.own_rule)), strict=False):
        of_seeds = [line for _, pick in picked if (line := _line(run, pick, split))]
        if of_seeds:
            mean = _mean(of_seeds)
            test = mean if split == TEST else test
            label = "test images" if split == TEST else f"{split} (selection)"
            thin = [[*line.items()] for line in of_seeds] if len(of_seeds) > 1 else []
            rings = [(alpha, mean[alpha]) for alpha in alphas if split == TEST and alpha in mean]
            lines.append(Line(label, look, [*mean.items()], thin, rings=rings))
    known = [f"{test[a]:.4g} at α = {a:g}" for a in (0.0, HALF, 1.0) if a in test]
    chosen = ", ".join(dict.fromkeys(f"{a:g}" for a in alphas)) or EMPTY
    seeds = f" Thin lines: {len(picked)} seeds; with markers: their mean." if len(picked) > 1 else ""
    return curves(
        name,
        f"Test {in_unit(run.metric)} of {method} on {where}: {', '.join(known)}; picked α: {chosen}.",
        f"{method}, held out: {where}.{seeds}",
        {"": lines},
        ("α: 0 zero-shot, 1 fine-tuned", in_unit(run.metric)),
        vertical=HALF,
    )


def _row(run: Run, record: Record, pick: Pick) -> list[Cell]:
    test = {point[ALPHA]: point.get(TEST) for point in pick.curve or ()}
    known = [value for value in test.values() if value is not None]
    alpha = pick.hparams.get(ALPHA)
    best = (max if HIGHER_IS_BETTER[run.metric] else min)(known, default=None)
    values = *(test.get(a) for a in (0.0, HALF, 1.0, alpha)), best
    start = [Cell(record.method), Cell(set_name(record.test_domains)), count_cell(record.seed)]
    picked = Cell(EMPTY if alpha is None else f"{alpha:g}", alpha)
    return [*start, picked, *(metric_cell(value, run.metric) for value in values)]
