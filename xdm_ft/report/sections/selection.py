"""What selection saw: the roads from zero-shot, the trials of a search, and learning curves with the picked steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from xdm_ft.core import ORACLE, set_name
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.report import Cell, Section, Table, cells, long_table, make_section, metric_cell
from xdm_ft.report.charts import INK, Figure, Line, SeriesStyle, curves, looks, scatter
from xdm_ft.report.comparisons import from_zero_shot_table, from_zero_shot_words
from xdm_ft.report.sections.results import domain_interval
from xdm_ft.report.words import EMPTY, axis_value, each_once, in_unit, number, oracle_mark, setting_text
from xdm_ft.results.measured import Picked
from xdm_ft.results.model import Record, group_by
from xdm_ft.results.run import Run
from xdm_ft.results.table import NO_VERDICT
from xdm_ft.results.trials import selection_value
from xdm_ft.runtime.errors import join_names, signed
from xdm_ft.storage.tensorboard import Scalars, sub_run

# ------------------------------------------------------------------------------------------------------------- searches

MAX_SEARCH_FIGURES = 24
MAX_RATIO = 30  # of the largest to the smallest value of a linear axis of settings
MAX_POINTS, MAX_MARKED_SETS, MAX_NAMES = 200, 8, 8  # of a plot; held-out sets with markers; names on an axis
MAX_VALUES = 3  # different numbers of a cell; more are shown as a range
RING = SeriesStyle(INK, "o", size=8, hollow=True)


class Trial(NamedTuple):
    """A trial with a selection value and a test value under the recipe's rule."""

    record: Record
    selection: float
    test: float
    picked: bool


def search(run: Run) -> Section | None:
    """Scatter plots of each searched hyper-parameter, and a table of the picked trials per method."""
    picked = {record.key for record in run.picked}
    by_method: dict[str, list[Trial]] = {label: [] for label in run.drawn_methods}
    for record in run.records:
        value, pick = selection_value(record, run.recipe_rule), record.selected.get(run.recipe_rule)
        test = None if pick is None else getattr(pick.metrics["test"], run.metric)
        if value is not None and test is not None:
            by_method.setdefault(record.method, []).append(Trial(record, value, test, record.key in picked))
    keys = {method: searched_keys(run, method) for method, trials in by_method.items() if trials}
    searches = [(method, keys[method], trials) for method, trials in by_method.items() if keys.get(method)]
    if not searches:
        return None

    unit, figures, tables = in_unit(run.metric), [], []
    for i, (method, keys_of, trials) in enumerate(searches):
        text = partial(_trial_text, run, keys_of)
        clouds = _clouds(trials, lambda t: (axis_value(run.metric, t.selection), axis_value(run.metric, t.test)), text)
        caption = f"{method}: every trial. {agreement(trials)}"
        alt = f"Test against selection value of {len(trials)} trials of {caption}"
        figures.append(scatter(f"search-{i}-all", alt, caption, [[(f"test {unit}", clouds)]], f"selection {unit}"))

        rows = []
        for record, value, test, _ in (trial for trial in trials if trial.picked):
            settings: list[Any] = [record.hparams.get(key) for key in keys_of]
            shown = [Cell(setting_text(s), float(s) if _is_number(s) else None) for s in settings]
            values = metric_cell(value, run.metric), metric_cell(test, run.metric)
            rows.append(cells(record.held_out_name, record.seed, record.trial, *shown, *values))
        caption = f"{method}: the values that {run.recipe_rule} selected. Trial 0 has the recipe's own values."
        tables.append(
            long_table(caption, ["held out", "seed", "trial", *keys_of, "selection value", "test value"], rows)
        )
    pairs = [(f"search-{i}-{j}", method, keys_of, key, trials)
             for i, (method, keys_of, trials) in enumerate(searches) for j, key in enumerate(keys_of)]  # fmt: skip
    room = max(MAX_SEARCH_FIGURES - len(figures), 0)
    figures += [_against_key(run, *pair) for pair in pairs[:room]]
    oracle = " This run's rule is oracle: it picks on test images, so its picks are no estimate."
    more = f" Plots of {room} of {len(pairs)} pairs of method and hyper-parameter are shown."
    return make_section(
        "search",
        figures[:MAX_SEARCH_FIGURES],
        tables,
        oracle=oracle if run.recipe_rule == ORACLE else "",
        more=more if len(pairs) > room else "",
    )


def searched_keys(run: Run, method: str) -> list[str]:
    """Returns the keys whose values differ between trials of one held-out set and seed."""
    values: dict[tuple[Any, ...], dict[str, set[str]]] = {}
    for entry in run.results["runs"]:
        if entry["method"] == method:
            of_trials = values.setdefault((*entry["test_domains"], entry["seed"]), {})
            for key, value in entry["hparams"].items():
                # as JSON: a value may be a list, which a set cannot hold
                of_trials.setdefault(key, set()).add(json.dumps(value))
    return list(dict.fromkeys(key for of in values.values() for key, different in of.items() if len(different) > 1))


def agreement(trials: Sequence[Trial]) -> str:
    """Spearman's correlation of selection and test value, where three trials differ in both; the mean over sets."""
    from scipy.stats import rankdata

    defined = []
    for group in group_by(trials, lambda trial: trial.record.key[:3]).values():
        ranks = [rankdata(side) for side in zip(*((trial.selection, trial.test) for trial in group), strict=True)]
        if len(group) >= 3 and all(np.ptp(side) > 0 for side in ranks):
            defined.append(float(np.corrcoef(ranks)[0, 1]))
    if not defined:
        return "The rank correlation of selection and test value is not defined."
    mean = sum(defined) / len(defined)
    return f"Rank correlation of selection and test value: {signed(mean, 2)} (mean over held-out sets and seeds)."


def _trial_text(run: Run, keys: Sequence[str], trial: Trial) -> str:
    """Returns what the page shows of a trial under the pointer."""
    record = trial.record
    values = [f"{key} {setting_text(record.hparams.get(key))}" for key in keys]
    tested = f"selection {number(trial.selection, run.metric)}, test {number(trial.test, run.metric)}"
    model = f"trial {record.trial}, seed {record.seed}, held out {record.held_out_name}"
    return "; ".join([model, tested, *values])


def _against_key(run: Run, name: str, method: str, keys: Sequence[str], key: str, trials: Sequence[Trial]) -> Figure:
    """Selection value above, test value below, against one hyper-parameter."""
    values: list[Any] = [trial.record.hparams.get(key) for trial in trials]
    names = None if all(map(_is_number, values)) else sorted({str(value) for value in values})
    if names is not None and len(names) > MAX_NAMES:
        names = [*names[: MAX_NAMES - 1], "others"]
    logarithmic = False
    if names is None and max(values) > 0 and min(values) >= 0:
        # where the recipe draws the logarithm uniformly, or the values span much
        space = run.recipe.search.space
        parts = run.recipe.item(method).block.name.split("+")
        drawn = next((own for part in parts if (own := space.get(f"{part}.{key}"))), None) or space.get(key)
        positive = [float(value) for value in values if value > 0]
        logarithmic = (drawn is not None and drawn.log_uniform is not None) or max(positive) > MAX_RATIO * min(positive)

    def x(trial: Trial) -> float:
        value: Any = trial.record.hparams.get(key)
        if names is None:
            return float(value)
        return float(names.index(str(value)) if str(value) in names else len(names) - 1)

    unit = in_unit(run.metric)
    text = partial(_trial_text, run, keys)
    above = _clouds(trials, lambda trial: (x(trial), axis_value(run.metric, trial.selection)), text)
    below = _clouds(trials, lambda trial: (x(trial), axis_value(run.metric, trial.test)), text)
    picked = list(dict.fromkeys(setting_text(trial.record.hparams.get(key)) for trial in trials if trial.picked))
    values_text = f"{', '.join(picked[:8])}{' and more' if len(picked) > 8 else ''}"
    alt = f"Selection and test value of {method} against {key}, {len(trials)} trials; picked values: {values_text}."
    caption = f"{method}: {key}{' (logarithmic axis)' if logarithmic else ''}."
    grid = [[(f"selection\n{unit}", above)], [(f"test\n{unit}", below)]]
    return scatter(name, alt, caption, grid, key, x_names=names, logarithmic_x=logarithmic, height=3.3)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _clouds(
    trials: Sequence[Trial], point: Callable[[Trial], tuple[float, float]], text: Callable[[Trial], str]
) -> list[Line]:
    """Returns the points of each held-out set, thinned evenly, and rings around those of picked trials."""

    def thinned(of_set: Sequence[Trial], most: int) -> list[Trial]:
        step = max(1, -(-len(of_set) // most))
        return [trial for i, trial in enumerate(of_set) if i % step == 0 or trial.picked]

    by_set = group_by(trials, lambda trial: trial.record.held_out_name)
    few = len(by_set) <= MAX_MARKED_SETS
    clouds = []
    for held, look in looks(by_set).items():
        style = look._replace(marker=look.marker if few else "o", size=3.5)
        label = held if few and len(by_set) > 1 else ""
        shown = thinned(by_set[held], max(MAX_POINTS // len(by_set), 1))
        button, texts = shown[0].record.method, [*map(text, shown)]
        clouds.append(Line(label, style, [*map(point, shown)], button=button, texts=texts))
    picked = thinned([trial for trial in trials if trial.picked], MAX_POINTS // 2)
    return [*clouds, Line("picked", RING, [*map(point, picked)], button=trials[0].record.method)]


def selected(run: Run, rule: str) -> Section | None:
    """The hyper-parameters that the rule selected on each held-out set; None if it selected none."""

    def cell(values: Sequence[Any]) -> str:
        different = list(dict.fromkeys(map(setting_text, values)))
        if len(different) <= 1:
            return next(iter(different), EMPTY)
        if len(different) <= MAX_VALUES or not all(isinstance(value, int | float) for value in values):
            return ", ".join(map(setting_text, values))
        return f"{setting_text(min(values))} to {setting_text(max(values))}"

    picked, rows = Picked(run.every, rule, run.metric), []
    for method in (row.method for row in run.rows if row.selection == rule):
        records = [record for record in picked.records if record.method == method and rule in record.selected]
        within_training = [key for record in records for key in record.selected[rule].hparams]
        settings = group_by(records, lambda record: record.test_domains)
        for key in dict.fromkeys([*searched_keys(run, method), *within_training]):
            line = [method, key]
            for held in picked.held_out:
                of_seeds = [record.hparams | record.selected[rule].hparams for record in settings.get(held, ())]
                line.append(cell([of_seed[key] for of_seed in of_seeds if key in of_seed]))
            rows.append(cells(*line))
    if not rows:
        return None
    caption = f"One value per seed; of more than {MAX_VALUES} different numbers, the lowest and the highest."
    header = [f"method{oracle_mark(rule)}", "hyper-parameter", *map(set_name, picked.held_out)]
    return make_section("selected", tables=[Table(caption, header, rows, labels=2)])


# ------------------------------------------------------------------------------------------------------ learning curves

MAX_SETS, MAX_PARTS = 8, 6  # held-out sets with figures of their own; parts of the loss
MAX_LINEAR_RATIO = 50  # of the largest to the smallest value of a linear axis
LOSS = "train/loss"
NO_PARTS = (LOSS, "train/lr", "train/heads")


class Recorded(NamedTuple):
    """The curves of a method on one held-out set."""

    method: str
    where: str
    models: list[tuple[Record, Scalars]]  # of the picked trial of each seed
    heads: list[Scalars]  # summaries of heads that trained together, if there are no curves of models


def learning_curves(run: Run) -> Section | None:
    """The training loss, its parts, and the values of selection, per held-out set; and the picked steps."""
    recorded: list[Recorded] = []
    for (method, held), records in group_by(run.picked, lambda record: (record.method, record.test_domains)).items():
        models = [(record, run.scalars[name]) for record in records if (name := sub_run(*record.key)) in run.scalars]
        folder = sub_run(method, held, 0, 0).rpartition("/")[0]
        heads = [scalars for name, scalars in run.scalars.items() if name.startswith(f"{folder}/heads-from-")]
        if models or heads:
            recorded.append(Recorded(method, records[0].held_out_name, models, [] if models else heads))
    order = run.drawn_methods
    recorded.sort(key=lambda curve: order.index(curve.method))
    by_set = group_by(recorded, lambda curve: curve.where)

    tag = run.selection_tag
    every = [scalars for curve in recorded for scalars in (*(scalars for _, scalars in curve.models), *curve.heads)]
    figures: list[Figure] = []
    for i, (where, on_set) in enumerate(list(by_set.items())[:MAX_SETS]):
        wide = _spans_decades(every, LOSS), _spans_decades(every, tag)  # of all sets: their axes are alike
        figures += _curves_figure(run, f"curve-{i}-loss", on_set, LOSS, "training loss", where, wide[0])
        words = f"selection {in_unit(run.metric)}"
        figures += _curves_figure(run, f"curve-{i}-selection", on_set, tag, words, where, wide[1])
    tags = [tag for tag in dict.fromkeys(tag for scalars in every for tag in scalars) if tag.startswith("train/")]
    # parts of losses and what methods log, unless they are 0 everywhere
    parts = [
        tag for tag in tags if tag not in NO_PARTS and any(v for scalars in every for _, v in scalars.get(tag, ()))
    ]
    for i, part in enumerate(parts[:MAX_PARTS]):
        words = part.removeprefix("train/").replace("_", " ")
        figures += _curves_figure(run, f"curve-part-{i}", recorded, part, words, "", _spans_decades(every, part))
    if not figures and not run.lost_curves:
        return None

    rows, shown = [], {(curve.method, curve.where) for curve in recorded}
    for record in run.picked:
        where, pick = record.held_out_name, record.selected[run.recipe_rule]
        if (record.method, where) in shown:
            value = metric_cell(selection_value(record, run.recipe_rule), run.metric)
            rows.append(
                cells(record.method, where, record.seed, pick.step, value, "; ".join(pick.flags or ()) or EMPTY)
            )
    header = ["method", "held out", "seed", "picked step", "selection value", "doubts"]
    table = long_table(f"Picked steps under {run.recipe_rule}, per model.", header, rows)
    ring = " A ring is the picked step, whose weights are the model."
    band = " Heads that trained together are summarised: a line is their mean, a band goes from lowest to highest."
    more = f" {MAX_SETS} of {len(by_set)} held-out sets are shown."
    lost = [f"{path.relative_to(run.path)} {problem}." for path, problem in run.lost_curves.items()]
    return make_section(
        "curves",
        figures,
        [table],
        lost,
        models=ring if any(curve.models for curve in recorded) else "",
        heads=band if any(curve.heads for curve in recorded) else "",
        more=more if len(by_set) > MAX_SETS else "",
    )


def _spans_decades(every: Iterable[Scalars], tag: str) -> bool:
    """Returns whether the values of a curve need a logarithmic axis."""
    values = [value for scalars in every for _, value in scalars.get(tag, ())]
    return bool(values) and min(values) > 0 and max(values) > MAX_LINEAR_RATIO * min(values)


def _curves_figure(
    run: Run, name: str, recorded: Sequence[Recorded], tag: str, label: str, context: str, logarithmic: bool
) -> list[Figure]:
    """Returns a line per method and its models; all held-out sets together without `context`. [] without a value."""
    scale = axis_value(run.metric, 1.0) if tag.endswith(f"/{run.metric}") else 1.0
    ring_rule = run.recipe_rule if context and tag != LOSS else None
    by_method = group_by(recorded, lambda curve: curve.method).items()
    lines = [
        line
        for method, of in by_method
        if (line := _line(of, tag, scale, looks(run.drawn_methods)[method], ring_rule)) is not None
    ]
    if not lines:
        return []
    title = f"{label.capitalize()}{f', held out: {context}' if context else ', all held-out sets'}."
    caption = title + (" Thin lines: models; bold: their mean." if any(line.thin for line in lines) else "")
    axes = "step", label
    return [curves(name, title.rstrip("."), caption, {"": lines}, axes, logarithmic_y=logarithmic, width=4.6)]


def _line(
    recorded: Sequence[Recorded], tag: str, scale: float, look: SeriesStyle, ring_rule: str | None
) -> Line | None:
    """Returns the mean over models and summarised heads, at the steps that all of them have."""
    models, rings = list[dict[int, float]](), []  # {step: value}
    for record, scalars in (model for curve in recorded for model in curve.models if tag in model[1]):
        values = {step: scale * value for step, value in scalars[tag]}
        picked = None if ring_rule is None else record.selected[ring_rule].step
        rings += [(picked, values[picked])] if picked is not None and picked in values else []
        models.append(values)
    heads = [scalars for curve in recorded for scalars in curve.heads if tag in scalars]
    if not models and not heads:
        return None
    mean, low, high = (
        [{step: scale * value for step, value in scalars.get(name, scalars[tag])} for scalars in heads]
        for name in (tag, f"lowest/{tag}", f"highest/{tag}")
    )

    def common(of_all: Sequence[Mapping[int, float]]) -> list[int]:
        """Returns the steps that all have: a model that stopped early moves no line."""
        return sorted(set(of_all[0]).intersection(*of_all[1:])) if of_all else []

    # a summary counts as all the heads that it holds
    weights = [1.0] * len(models) + [max(n for _, n in scalars.get("train/heads", [(0, 1.0)])) for scalars in heads]
    every = [*models, *mean]
    points = [(step, fmean([values[step] for values in every], weights)) for step in common(every)]
    band = [(step, min(head[step] for head in low), max(head[step] for head in high)) for step in common([*low, *high])]
    thin = [[*values.items()] for values in models] if len(models) > 1 else []
    method = recorded[0].method
    return Line(method, look, points, thin, band, rings, button=method)


# ----------------------------------------------------------------------------------------- from zero-shot to fine-tuned

TEST, HALF = "test", 0.5  # HALF: the α of WiSE-FT's authors without validation
ROADS = {"alpha": "α: 1 is fine-tuned", "gda_alpha": "α of GDA", "l2": "l2, the penalty: weaker to the right"}
"""{what a road varies: words at its axis}"""
MAX_ROADS = 12  # figures
START = "zero-shot"
UNUSED = "; what test images show of the others picks nothing"
LACKS = "without a row of zero_shot there are no verdicts: add zero_shot to methods"


class Road(NamedTuple):
    """The test metric of a model along a curve that begins at zero-shot."""

    record: Record
    varies: str  # a key of `ROADS`
    picked: float | None
    test: dict[float | None, float | None]  # {what it varies: metric}; zero-shot, 0 or None, comes first

    @property
    def held(self) -> str:
        return self.record.held_out_name


def road(run: Run) -> Section | None:
    """The test metric between zero-shot and fine-tuned, per method and held-out set, and where fine-tuning helps."""
    rule, by_method = run.recipe_rule, dict[str, list[Road]]()
    for record in sorted(run.picked, key=lambda record: run.drawn_methods.index(record.method)):
        pick = record.selected[rule]
        for key in ROADS if pick.curve else ():
            test = {point[key]: point.get(TEST) for point in pick.curve or () if key in point}
            if test and not next(iter(test)):
                by_method.setdefault(record.method, []).append(Road(record, key, pick.hparams.get(key), test))
    if not by_method:
        return None
    versus = {key: row for key, row in run.from_zero_shot(rule).items() if key[0] in by_method}
    zero_shot = {method: row.second for (method, _), row in versus.items()}
    figures = [_road_figure(run, i, by_method[m], zero_shot.get(m)) for i, m in enumerate([*by_method][:MAX_ROADS])]
    notes = each_once((method, from_zero_shot_words(run, method, versus)) for method in by_method)
    every_note = (note for row in versus.values() for note in row.note.split("; "))
    notes += dict.fromkeys(note for note in every_note if note.startswith(NO_VERDICT))
    if rule != ORACLE and not any(record.deterministic for record in run.every):
        notes.append(LACKS)
    tables = [_road_table(run, chain.from_iterable(by_method.values()))]
    if versus:
        tables.insert(0, from_zero_shot_table(run, versus))
    return make_section("road", figures, tables, notes, unused="" if rule == ORACLE else UNUSED)


def _road_table(run: Run, roads: Iterable[Road]) -> Table:
    rows, best_of = [], max if HIGHER_IS_BETTER[run.metric] else min
    for road in roads:
        along, half = [*road.test.values()], road.test.get(HALF) if road.varies == "alpha" else None
        best = best_of((value for value in along if value is not None), default=None)
        tested = (metric_cell(v, run.metric) for v in (along[0], half, along[-1], road.test.get(road.picked), best))
        setting = Cell(f"{road.picked:g}" if road.picked else START, road.picked or None)
        rows.append(cells(road.record.method, road.held, road.record.seed, setting, *tested))
    at = [f"at {what}" for what in (START, "α = 0.5", "the end", "the picked point")]
    unused = "" if run.recipe_rule == ORACLE else " (never used)"
    header = [f"method{oracle_mark(run.recipe_rule)}", "held out", "seed", "picked", *at, f"best on test{unused}"]
    return long_table(f"Test {in_unit(run.metric)} along the road, per model.", header, rows)


def _road_figure(run: Run, i: int, roads: Sequence[Road], zero_shot: str | None) -> Figure:
    """The roads of one method. `zero_shot`: the row whose intervals are drawn."""
    method = roads[0].record.method
    settings = zip_longest(*(road.test for road in roads))  # gda's last α depends on the number of images
    names = [START, *(f"{fmean(filter(None, of_roads)):.3g}" for of_roads in [*settings][1:])]
    beside = next((row for row in run.recipe_rows if row.method == zero_shot), None)
    by_set, lines, chosen = group_by(roads, lambda road: road.held), list[Line](), list[str]()
    for held, look in looks([*by_set][:MAX_SETS]).items():
        columns = zip_longest(*(road.test.values() for road in by_set[held]))
        defined = [[axis_value(run.metric, v) for v in column if v is not None] for column in columns]
        mean = {k: fmean(column) for k, column in enumerate(defined) if column}
        picked = [[*road.test].index(road.picked) for road in by_set[held] if road.picked in road.test]
        chosen.append(f"{held}: {join_names(list(dict.fromkeys(names[k] for k in picked))) or EMPTY}")
        # beside each other, left of the road
        ends, x = beside and domain_interval(beside, held), -0.12 * (len(lines) + 1)
        interval = [(x, axis_value(run.metric, ends.low), axis_value(run.metric, ends.high))] if ends else []
        rings = [(k, mean[k]) for k in picked if k in mean]
        lines.append(Line(held, look, [*mean.items()], rings=rings, ends=interval))
    title = f"Test {in_unit(run.metric)} of {method}; picked: {join_names(chosen, MAX_SETS, '; ')}"
    known = f" Vertical lines: 95% intervals of {beside.method}." if beside else ""
    more = f" The first {MAX_SETS} of {len(by_set)} held-out sets." if len(by_set) > MAX_SETS else ""
    caption = f"{method}: means over seeds. Rings: picked points.{known}{more}"
    axes = ROADS[roads[0].varies], f"test {in_unit(run.metric)}"
    return curves(f"road-{i}", title, caption, {"": lines}, axes, x_names=names)
