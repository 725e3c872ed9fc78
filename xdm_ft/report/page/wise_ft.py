"""Accuracy along the line from the initial weights to the trained ones (WiSE-FT)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Pick, Record
from xdm_ft.report.finished import Run
from xdm_ft.report.page.analysed import bounded
from xdm_ft.report.page.figures import INK, MUTED, SERIES, svg
from xdm_ft.report.page.numbers import axis_label, axis_value, set_name
from xdm_ft.report.page.panel import Cell, Figure, Panel
from xdm_ft.report.page.styles import WIDTH, Style, legend_below, legend_height
from xdm_ft.report.table_rows import EMPTY, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

ALPHA = "alpha"
HALF = 0.5  # the authors' choice without validation
MOST_FIGURES = 12
TEST = "test"
LOOKS = (
    Style(SERIES[0], "o", "-"),
    Style(SERIES[1], "s", "--"),
    Style(SERIES[2], "^", ":"),
    Style(SERIES[3], "D", "-."),
)

Picked = tuple[Record, Pick]


def panel(run: Run) -> Panel | None:
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
        "selection rule picks α on validation images; the authors use 0.5 without validation. The test curve shows "
        "what another α would have given, and picks nothing."
    )
    shown = list(groups.items())[:MOST_FIGURES]
    figures = [_figure(run, i, *name, picked) for i, (name, picked) in enumerate(shown)]
    header = ["method", "held out", "seed", "picked α", *(f"test at {what}" for what in ("α = 0", "α = 0.5", "α = 1"))]
    rows = [_row(run, *one) for picked in groups.values() for one in picked]
    metric = axis_label(run.metric)
    table = bounded(
        rows, f"{metric.capitalize()} along the curve, per model.", [*header, "test at the picked α", "best on test"]
    )
    return Panel("wise-ft", "From zero-shot to fine-tuned", about, figures, [table])


def _splits(run: Run, pick: Pick) -> list[str]:
    """The splits to draw: the selection rule's, and the test images."""
    known = [name for name in (pick.curve or [{}])[0] if name != ALPHA]
    return [name for name in dict.fromkeys((TEST, run.own_rule)) if name in known]


def _line(run: Run, pick: Pick, split: str) -> dict[float, float]:
    """{α: value}, in the unit of the axis, where it is defined."""
    values = {point[ALPHA]: point.get(split) for point in pick.curve or ()}
    return {a: axis_value(run.metric, value) for a, value in values.items() if a is not None and value is not None}


def _mean(lines: Sequence[dict[float, float]]) -> dict[float, float]:
    """Over the curves that have a value; their α may differ."""
    return {a: fmean(line[a] for line in lines if a in line) for a in sorted({a for line in lines for a in line})}


def _figure(run: Run, place: int, method: str, where: str, picked: Sequence[Picked]) -> Figure:
    splits = list(dict.fromkeys(split for _, pick in picked for split in _splits(run, pick)))
    lines = {split: [_line(run, pick, split) for _, pick in picked] for split in splits}
    alphas = [pick.hparams[ALPHA] for _, pick in picked if ALPHA in pick.hparams]

    def draw(figure: Canvas) -> None:
        axes = figure.subplots()
        axes.axvline(HALF, color=MUTED, linewidth=0.8, linestyle=":", label="α = 0.5")
        for look, (split, own) in zip(LOOKS, lines.items(), strict=False):
            for line in own if len(own) > 1 else ():
                axes.plot([*line], [*line.values()], color=look.colour, linewidth=0.5, alpha=0.5)
            mean = _mean(own)
            label = "test images" if split == TEST else f"{split} (selection)"
            axes.plot([*mean], [*mean.values()], look.marker, ls=look.line, color=look.colour, ms=4, label=label)
        low = axes.get_ylim()[0]
        axes.plot(alphas, [low] * len(alphas), "^", color=INK, ms=7, ls="", clip_on=False, label="picked α, per seed")
        axes.set_ylim(bottom=low)
        axes.set_xlabel("α: 0 zero-shot, 1 fine-tuned")
        axes.set_ylabel(axis_label(run.metric, ""))
        legend_below(figure, axes)

    name = f"wise-ft-{place}"
    test = _mean(lines.get(TEST, []))
    known = [f"{test[a]:.4g} at α = {a:g}" for a in (0.0, HALF, 1.0) if a in test]
    chosen = ", ".join(dict.fromkeys(f"{a:g}" for a in alphas)) or EMPTY
    alt = f"{axis_label(run.metric).capitalize()} of {method} on {where}: {', '.join(known)}; picked α: {chosen}."
    seeds = f" Thin lines: {len(picked)} seeds; with markers: their mean." if len(picked) > 1 else ""
    return Figure(name, svg(name, draw, WIDTH, 2.6 + legend_height(4)), alt, f"{method}, held out: {where}.{seeds}")


def _row(run: Run, record: Record, pick: Pick) -> list[Cell]:
    test = {point[ALPHA]: point.get(TEST) for point in pick.curve or ()}
    known = {a: value for a, value in test.items() if value is not None}
    alpha = pick.hparams.get(ALPHA)
    ends = [test.get(a) for a in (0.0, HALF, 1.0, alpha)]
    best = (max if HIGHER_IS_BETTER[run.metric] else min)(known.values(), default=None)
    return [
        Cell(record.method),
        Cell(set_name(record.test_domains)),
        Cell(str(record.seed), record.seed),
        Cell(EMPTY if alpha is None else f"{alpha:g}", alpha),
        *(Cell(number(value, run.metric), value) for value in (*ends, best)),
    ]
