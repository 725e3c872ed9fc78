"""Learning curves: the training loss and its parts, and the values among which selection picked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xdm_ft.evaluation.records import Record
from xdm_ft.evaluation.trials import selection_value
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.page.analysed import bounded
from xdm_ft.report.page.curve_figures import Band, Curve, Lines, curves_svg
from xdm_ft.report.page.numbers import axis_label, axis_value, set_name
from xdm_ft.report.page.panel import Cell, Figure, Panel, Table
from xdm_ft.report.page.styles import listed, method_styles
from xdm_ft.report.table_rows import EMPTY, number
from xdm_ft.storage.tensorboard import Scalars, heads_sub_run, sub_run

MOST_SETS = 8  # held-out sets with figures of their own
MOST_PARTS = 6
LOSS = "train/loss"
NO_PARTS = (LOSS, "train/lr", "train/heads")


class Recorded(NamedTuple):
    """The curves of a method on one held-out set."""

    method: str
    where: str
    models: list[tuple[Record, Scalars]]  # of the picked trial of each seed
    heads: list[Scalars]  # summaries of heads that trained together, if there are no curves of models


def panel(run: Run) -> Panel | None:
    """Curves per held-out set, and the picked steps; None if no model has a curve, as in older runs."""
    found = _recorded(run)
    if not found:
        return None
    sets = list(dict.fromkeys(own.where for own in found))
    tag = f"{'oracle' if run.own_rule == ORACLE else 'val'}/{run.metric}"
    figures = []
    for place, where in enumerate(sets[:MOST_SETS]):
        own = [one for one in found if one.where == where]
        figures += _figure(run, f"curve-{place}-loss", own, LOSS, "training loss", where)
        figures += _figure(run, f"curve-{place}-selection", own, tag, axis_label(run.metric, "selection"), where)
    for place, part in enumerate(_parts(found)[:MOST_PARTS]):
        figures += _figure(run, f"curve-part-{place}", found, part, part.removeprefix("train/").replace("_", " "), "")
    about = (
        "What training measured: the loss (its mean since the last evaluation) and the value by which the selection "
        "rule compares steps. Methods add different terms to their losses: compare the course of one line, not the "
        "height of two."
    )
    if any(own.models for own in found):
        about += " A ring is the picked step, whose weights are the model."
    if any(own.heads for own in found):
        about += (
            " Heads that trained together are summarised: a line is their mean, a band goes from lowest to highest."
        )
    if len(sets) > MOST_SETS:
        about += f" {MOST_SETS} of {len(sets)} held-out sets are shown."
    if not figures:
        return None
    return Panel("curves", "Learning and selection curves", about, figures, [_table(run, found)])


def _recorded(run: Run) -> list[Recorded]:
    groups: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
    for record in run.picked:
        groups.setdefault((record.method, record.test_domains), []).append(record)
    found = []
    for (method, test_domains), records in groups.items():
        models = [(record, run.scalars[name]) for record in records if (name := sub_run(*record.key)) in run.scalars]
        folder = heads_sub_run(method, test_domains, 0, 0).rpartition("/")[0]
        heads = [scalars for name, scalars in run.scalars.items() if name.startswith(f"{folder}/heads-from-")]
        if models or heads:
            found.append(Recorded(method, set_name(test_domains), models, [] if models else heads))
    order = {method: place for place, method in enumerate(method_styles(run))}
    return sorted(found, key=lambda one: order[one.method])


def _parts(found: Sequence[Recorded]) -> list[str]:
    """Tags of the parts of losses and of what methods log, unless they are 0 everywhere."""
    every = [scalars for one in found for scalars in (*(s for _, s in one.models), *one.heads)]
    tags = (tag for scalars in every for tag in scalars)
    own = [tag for tag in dict.fromkeys(tags) if tag.startswith("train/") and tag not in NO_PARTS]
    return [tag for tag in own if any(value for scalars in every for _, value in scalars.get(tag, ()))]


def _figure(run: Run, name: str, found: Sequence[Recorded], tag: str, what: str, where: str) -> list[Figure]:
    """One line per method and its models; the held-out sets together, if `where` is empty. [] without a value."""
    scale = axis_value(run.metric, 1.0) if tag.endswith(f"/{run.metric}") else 1.0
    looks = method_styles(run)
    lines: dict[str, Lines] = {}
    for one in found:
        own = lines.setdefault(one.method, Lines(one.method, looks[one.method], [], []))
        for record, scalars in one.models:
            if tag in scalars:
                picked = record.selected[run.own_rule].step if where and tag != LOSS else None
                own.curves.append(Curve([(step, scale * value) for step, value in scalars[tag]], picked))
        own.bands.extend(band for scalars in one.heads if (band := _band(scalars, tag, scale)) is not None)
    known = [own for own in lines.values() if own.curves or own.bands]
    if not known:
        return []
    ends = [f"{own.name} {own.last:.3g}" for own in known if own.last is not None]
    place = f", held out: {where}" if where else ", all held-out sets"
    alt = f"{what.capitalize()} per step{place}. Mean at the last step: {listed(ends, 8)}."
    several = max(len(own.curves) for own in known) > 1
    caption = f"{what.capitalize()}{place}." + (" Thin lines: models; bold: their mean." if several else "")
    return [Figure(name, curves_svg(name, known, what), alt, caption)]


def _band(scalars: Scalars, tag: str, scale: float) -> Band | None:
    if tag not in scalars:
        return None
    mean, low, high = (
        {step: scale * value for step, value in scalars.get(name, scalars[tag])}
        for name in (tag, f"lowest/{tag}", f"highest/{tag}")
    )
    return Band(max(heads for _, heads in scalars.get("train/heads", [(0, 1.0)])), mean, low, high)


def _table(run: Run, found: Sequence[Recorded]) -> Table:
    rows = []
    shown = {(one.method, one.where) for one in found}
    for record in run.picked:
        if (record.method, set_name(record.test_domains)) in shown:
            pick, value = record.selected[run.own_rule], selection_value(record, run.own_rule)
            rows.append(
                [
                    Cell(record.method),
                    Cell(set_name(record.test_domains)),
                    Cell(str(record.seed), record.seed),
                    Cell(str(pick.step), pick.step),
                    Cell(number(value, run.metric), value),
                    Cell("; ".join(pick.flags or ()) or EMPTY),
                ]
            )
    caption = f"Picked steps under {run.own_rule}, per model."
    return bounded(rows, caption, ["method", "held out", "seed", "picked step", "selection value", "doubts"])
