"""Learning curves: the training loss and its parts, and the values among which selection picked."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from xdm_ft.evaluation.records import Record, set_name
from xdm_ft.evaluation.trials import selection_value
from xdm_ft.report.analysed import method_looks
from xdm_ft.report.charts import Figure, Line, Look, curves
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.section import Cell, Section, Table, count_cell, long_table, metric_cell
from xdm_ft.report.words import EMPTY, axis_value, in_unit, listed
from xdm_ft.storage.tensorboard import Scalars, sub_run

MAX_SETS, MAX_PARTS = 8, 6  # held-out sets with figures of their own; parts of the loss
MAX_RATIO = 50  # of the largest to the smallest value of a linear axis
LOSS = "train/loss"
NO_PARTS = (LOSS, "train/lr", "train/heads")
Values = dict[int, float]  # {step: value}


class Recorded(NamedTuple):
    """The curves of a method on one held-out set."""

    method: str
    where: str
    models: list[tuple[Record, Scalars]]  # of the picked trial of each seed
    heads: list[Scalars]  # summaries of heads that trained together, if there are no curves of models


def section(run: Run) -> Section | None:
    """Curves per held-out set, and the picked steps; None if no model has a curve, as in older runs."""
    recorded = _recorded(run)
    sets = list(dict.fromkeys(one.where for one in recorded))
    tag = f"{'oracle' if run.own_rule == ORACLE else 'val'}/{run.metric}"
    figures = []
    for i, where in enumerate(sets[:MAX_SETS]):
        on_set = [one for one in recorded if one.where == where]
        figures += _figure(run, f"curve-{i}-loss", on_set, LOSS, "training loss", where)
        figures += _figure(run, f"curve-{i}-selection", on_set, tag, f"selection {in_unit(run.metric)}", where)
    for i, part in enumerate(_parts(recorded)[:MAX_PARTS]):
        words = part.removeprefix("train/").replace("_", " ")
        figures += _figure(run, f"curve-part-{i}", recorded, part, words, "")
    if not figures:
        return None
    about = (
        "What training measured: the loss (its mean since the last evaluation) and the value by which the selection "
        "rule compares steps. Methods add different terms to their losses: compare the course of one line, not the "
        "height of two."
    )
    if any(one.models for one in recorded):
        about += " A ring is the picked step, whose weights are the model."
    if any(one.heads for one in recorded):
        about += (
            " Heads that trained together are summarised: a line is their mean, a band goes from lowest to highest."
        )
    if len(sets) > MAX_SETS:
        about += f" {MAX_SETS} of {len(sets)} held-out sets are shown."
    return Section("curves", "Learning and selection curves", about, figures, [_table(run, recorded)])


def _recorded(run: Run) -> list[Recorded]:
    groups: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
    for record in run.picked:
        groups.setdefault((record.method, record.test_domains), []).append(record)
    recorded = []
    for (method, test_domains), records in groups.items():
        models = [(record, run.scalars[name]) for record in records if (name := sub_run(*record.key)) in run.scalars]
        folder = sub_run(method, test_domains, 0, 0).rpartition("/")[0]
        heads = [scalars for name, scalars in run.scalars.items() if name.startswith(f"{folder}/heads-from-")]
        if models or heads:
            recorded.append(Recorded(method, set_name(test_domains), models, [] if models else heads))
    order = {method: position for position, method in enumerate(method_looks(run))}
    return sorted(recorded, key=lambda one: order[one.method])


def _parts(recorded: Sequence[Recorded]) -> list[str]:
    """Returns the tags of parts of losses and of what methods log, unless they are 0 everywhere."""
    every = [scalars for one in recorded for scalars in (*(own for _, own in one.models), *one.heads)]
    tags = dict.fromkeys(tag for scalars in every for tag in scalars)
    parts = [tag for tag in tags if tag.startswith("train/") and tag not in NO_PARTS]
    return [tag for tag in parts if any(value for scalars in every for _, value in scalars.get(tag, ()))]


def _figure(run: Run, name: str, recorded: Sequence[Recorded], tag: str, what: str, where: str) -> list[Figure]:
    """Returns a line per method and its models; the held-out sets together if `where` is empty. [] without a value."""
    scale = axis_value(run.metric, 1.0) if tag.endswith(f"/{run.metric}") else 1.0
    styles, lines = method_looks(run), []
    for method in dict.fromkeys(one.method for one in recorded):
        own = [one for one in recorded if one.method == method]
        line = _line(own, tag, scale, styles[method], run.own_rule if where and tag != LOSS else None)
        lines += [] if line is None else [line]
    if not lines:
        return []
    ends = [f"{line.label} {line.points[-1][1]:.3g}" for line in lines if line.points]
    held_out = f", held out: {where}" if where else ", all held-out sets"
    alt = f"{what.capitalize()} per step{held_out}. Mean at the last step: {listed(ends, 8)}."
    several = any(line.thin for line in lines)
    caption = f"{what.capitalize()}{held_out}." + (" Thin lines: models; bold: their mean." if several else "")
    values = [value for line in lines for points in (line.points, *line.thin) for _, value in points]
    wide = bool(values) and min(values) > 0 and max(values) > MAX_RATIO * min(values)
    return [curves(name, alt, caption, {"": lines}, ("step", what), logarithmic_y=wide)]


def _line(own: Sequence[Recorded], tag: str, scale: float, look: Look, ring_rule: str | None) -> Line | None:
    """Returns the mean over models and summarised heads, at the steps that all of them have."""
    models, rings = list[Values](), []
    for record, scalars in (model for one in own for model in one.models if tag in model[1]):
        values = {step: scale * value for step, value in scalars[tag]}
        picked = None if ring_rule is None else record.selected[ring_rule].step
        rings += [(picked, values[picked])] if picked is not None and picked in values else []
        models.append(values)
    heads = [scalars for one in own for scalars in one.heads if tag in scalars]
    mean, low, high = (
        [{step: scale * value for step, value in scalars.get(name, scalars[tag])} for scalars in heads]
        for name in (tag, f"lowest/{tag}", f"highest/{tag}")
    )
    if not models and not heads:
        return None
    weights = [1.0] * len(models) + [max(n for _, n in scalars.get("train/heads", [(0, 1.0)])) for scalars in heads]
    every = [*models, *mean]
    points = [(step, fmean([values[step] for values in every], weights)) for step in _common(every)]
    band = [(step, min(one[step] for one in low), max(one[step] for one in high)) for step in _common([*low, *high])]
    thin = [[*values.items()] for values in models] if len(models) > 1 else []
    return Line(own[0].method, look, points, thin, band, rings)


def _common(values: Sequence[Values]) -> list[int]:
    """Returns the steps that all have: a model that stopped early moves no line."""
    return sorted(set(values[0]).intersection(*values[1:])) if values else []


def _table(run: Run, recorded: Sequence[Recorded]) -> Table:
    shown, rows = {(one.method, one.where) for one in recorded}, []
    for record in run.picked:
        where = set_name(record.test_domains)
        if (record.method, where) in shown:
            pick, value = record.selected[run.own_rule], selection_value(record, run.own_rule)
            start = [Cell(record.method), Cell(where), count_cell(record.seed), count_cell(pick.step)]
            rows.append([*start, metric_cell(value, run.metric), Cell("; ".join(pick.flags or ()) or EMPTY)])
    header = ["method", "held out", "seed", "picked step", "selection value", "doubts"]
    return long_table(f"Picked steps under {run.own_rule}, per model.", header, rows)
