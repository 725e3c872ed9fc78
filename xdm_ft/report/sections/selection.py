"""What selection saw: the trials of a search, learning curves with the picked steps, and WiSE-FT's curves over α."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Pick, Record, set_name
from xdm_ft.evaluation.trials import selection_value
from xdm_ft.report.charts import INK, Figure, Line, Look, curves, looks, scatter
from xdm_ft.report.finished import ORACLE, Run, items
from xdm_ft.report.means import Picked
from xdm_ft.report.section import Cell, Section, Table, cells, long_table, metric_cell
from xdm_ft.report.words import EMPTY, axis_value, in_unit, oracle_mark, setting_text
from xdm_ft.storage.tensorboard import Scalars, sub_run

# ------------------------------------------------------------------------------------------------------------- searches

MAX_SEARCH_FIGURES = 24
MAX_RATIO = 30  # of the largest to the smallest value of a linear axis of settings
MAX_POINTS, MAX_MARKED_SETS, MAX_NAMES = 200, 8, 8  # of a plot; held-out sets with markers; names on an axis
MAX_VALUES = 3  # different numbers of a cell; more are shown as a range
RING = Look(INK, "o", size=8, hollow=True)


class Trial(NamedTuple):
    """A trial with a selection value and a test value under the recipe's rule."""

    record: Record
    selection: float
    test: float
    picked: bool


def search(run: Run) -> Section | None:
    """Scatter plots of each searched hyper-parameter, and a table of the picked trials per method."""
    picked = {record.key for record in run.picked}
    by_method: dict[str, list[Trial]] = {label: [] for label in items(run.results)}
    for record in run.records:
        value, pick = selection_value(record, run.own_rule), record.selected.get(run.own_rule)
        test = None if pick is None else getattr(pick.metrics["test"], run.metric)
        if value is not None and test is not None:
            by_method.setdefault(record.method, []).append(Trial(record, value, test, record.key in picked))
    keys = {method: searched_keys(run, method) for method, trials in by_method.items() if trials}
    searches = [(method, keys[method], trials) for method, trials in by_method.items() if keys.get(method)]
    if not searches:
        return None

    unit, figures = in_unit(run.metric), []
    for i, (method, _, trials) in enumerate(searches):
        clouds = _clouds(trials, lambda t: (axis_value(run.metric, t.selection), axis_value(run.metric, t.test)))
        caption = f"{method}: every trial. {agreement(trials)}"
        alt = f"Test against selection value of {len(trials)} trials of {caption}"
        figures.append(scatter(f"search-{i}-all", alt, caption, [[(f"test {unit}", clouds)]], f"selection {unit}"))
    pairs = [(f"search-{i}-{j}", method, key, trials)
             for i, (method, keys_of, trials) in enumerate(searches) for j, key in enumerate(keys_of)]  # fmt: skip
    room = max(MAX_SEARCH_FIGURES - len(figures), 0)
    figures += [_against_key(run, *pair) for pair in pairs[:room]]
    about = (
        "Each point is one trial of the search. The trial with the best selection value is picked (ringed); test "
        "values are shown to see how well that works, and pick nothing. Where selection and test values do not rise "
        "together, more trials do not help. Held-out domains differ in level: compare points of one marker."
    )
    if run.own_rule == ORACLE:
        about += " This run's rule is oracle: it picks on test images, so its picks are no estimate."
    if len(pairs) > room:
        about += f" Plots of {room} of {len(pairs)} pairs of method and hyper-parameter are shown."

    tables = []
    for method, keys_of, trials in searches:
        rows = []
        for record, value, test, _ in (trial for trial in trials if trial.picked):
            settings: list[Any] = [record.hparams.get(key) for key in keys_of]
            shown = [Cell(setting_text(s), float(s) if _is_number(s) else None) for s in settings]
            start = cells(set_name(record.test_domains), record.seed, record.trial)
            rows.append([*start, *shown, metric_cell(value, run.metric), metric_cell(test, run.metric)])
        caption = f"{method}: the values that {run.own_rule} selected. Trial 0 has the recipe's own values."
        header = ["held out", "seed", "trial", *keys_of, "selection value", "test value"]
        tables.append(long_table(caption, header, rows))
    return Section("search", "Search", about, figures[:MAX_SEARCH_FIGURES], tables)


def searched_keys(run: Run, method: str) -> list[str]:
    """Returns the keys whose values differ between trials of one held-out set and seed."""
    values: dict[tuple[Any, ...], dict[str, set[str]]] = {}
    for entry in run.results["runs"]:
        if entry["method"] == method:
            of_trials = values.setdefault((*entry["test_domains"], entry["seed"]), {})
            for key, value in entry["hparams"].items():
                of_trials.setdefault(key, set()).add(json.dumps(value))
    return list(dict.fromkeys(key for of in values.values() for key, different in of.items() if len(different) > 1))


def agreement(trials: Sequence[Trial]) -> str:
    """Spearman's correlation of selection and test value, where three trials differ in both; the mean over sets."""
    from scipy.stats import rankdata

    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for trial in trials:
        groups.setdefault(trial.record.key[:3], []).append((trial.selection, trial.test))
    ranks = [[rankdata(side) for side in zip(*pairs, strict=True)] for pairs in groups.values() if len(pairs) >= 3]
    defined = [float(np.corrcoef(sides)[0, 1]) for sides in ranks if all(np.ptp(side) > 0 for side in sides)]
    if not defined:
        return "The rank correlation of selection and test value is not defined."
    mean = sum(defined) / len(defined)
    return f"Rank correlation of selection and test value: {mean:+.2f} (mean over held-out sets and seeds)."


def _against_key(run: Run, name: str, method: str, key: str, trials: Sequence[Trial]) -> Figure:
    """Selection value above, test value below, against one hyper-parameter."""
    values: list[Any] = [trial.record.hparams.get(key) for trial in trials]
    names = None if all(map(_is_number, values)) else sorted({str(value) for value in values})
    if names is not None and len(names) > MAX_NAMES:
        names = [*names[: MAX_NAMES - 1], "others"]
    logarithmic = False
    if names is None and max(values) > 0 and min(values) >= 0:
        # where the recipe draws the logarithm uniformly, or the values span much
        space = run.results["recipe"].get("search", {}).get("space", {})
        parts = str(items(run.results).get(method, {}).get("name", method)).split("+")
        drawn = next((own for part in parts if (own := space.get(f"{part}.{key}"))), None) or space.get(key) or {}
        positive = [float(value) for value in values if value > 0]
        logarithmic = bool(drawn.get("log_uniform")) or max(positive) > MAX_RATIO * min(positive)

    def x(trial: Trial) -> float:
        value: Any = trial.record.hparams.get(key)
        if names is None:
            return float(value)
        return float(names.index(str(value)) if str(value) in names else len(names) - 1)

    unit = in_unit(run.metric)
    above = _clouds(trials, lambda trial: (x(trial), axis_value(run.metric, trial.selection)))
    below = _clouds(trials, lambda trial: (x(trial), axis_value(run.metric, trial.test)))
    picked = list(dict.fromkeys(setting_text(trial.record.hparams.get(key)) for trial in trials if trial.picked))
    values_text = f"{', '.join(picked[:8])}{' and more' if len(picked) > 8 else ''}"
    alt = f"Selection and test value of {method} against {key}, {len(trials)} trials; picked values: {values_text}."
    caption = f"{method}: {key}{' (logarithmic axis)' if logarithmic else ''}."
    grid = [[(f"selection\n{unit}", above)], [(f"test\n{unit}", below)]]
    return scatter(name, alt, caption, grid, key, x_names=names, logarithmic_x=logarithmic, height=3.3)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _clouds(trials: Sequence[Trial], point: Callable[[Trial], tuple[float, float]]) -> list[Line]:
    """Returns the points of each held-out set, thinned evenly, and rings around those of picked trials."""
    by_set: dict[str, list[Trial]] = {}
    for trial in trials:
        by_set.setdefault(set_name(trial.record.test_domains), []).append(trial)

    def thinned(of_set: Sequence[Trial], most: int) -> list[tuple[float, float]]:
        step = max(1, -(-len(of_set) // most))
        return [point(trial) for i, trial in enumerate(of_set) if i % step == 0 or trial.picked]

    few = len(by_set) <= MAX_MARKED_SETS
    clouds = []
    for where, look in looks(by_set).items():
        style = look._replace(marker=look.marker if few else "o", size=3.5)
        label = where if few and len(by_set) > 1 else ""
        clouds.append(Line(label, style, thinned(by_set[where], max(MAX_POINTS // len(by_set), 1))))
    return [*clouds, Line("picked", RING, thinned([trial for trial in trials if trial.picked], MAX_POINTS // 2))]


def selected(run: Run, rule: str) -> Section | None:
    """The hyper-parameters that the rule selected on each held-out set; None if it selected none."""
    picked, rows = Picked(run, rule), []
    for method in (row.method for row in run.rows if row.selection == rule):
        records = [record for record in picked.records if record.method == method and rule in record.selected]
        within_training = [key for record in records for key in record.selected[rule].hparams]
        for key in dict.fromkeys([*searched_keys(run, method), *within_training]):
            settings = {
                held: [record.hparams | record.selected[rule].hparams
                       for record in records if record.test_domains == held]
                for held in picked.held_out
            }  # fmt: skip
            values = ([of_seed[key] for of_seed in seeds if key in of_seed] for seeds in settings.values())
            rows.append(cells(method, key, *map(_values_text, values)))
    if not rows:
        return None
    caption = f"One value per seed; of more than {MAX_VALUES} different numbers, the lowest and the highest."
    header = [f"method{oracle_mark(rule)}", "hyper-parameter", *map(set_name, picked.held_out)]
    about = "What the selection rule picked in a search, or within one training."
    return Section("selected", "Selected hyper-parameters", about, tables=[Table(caption, header, rows, labels=2)])


def _values_text(values: Sequence[Any]) -> str:
    different = list(dict.fromkeys(map(setting_text, values)))
    if len(different) <= 1:
        return next(iter(different), EMPTY)
    if len(different) <= MAX_VALUES or not all(isinstance(value, int | float) for value in values):
        return ", ".join(map(setting_text, values))
    return f"{setting_text(min(values))} to {setting_text(max(values))}"


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
    recorded = _recorded(run)
    sets = list(dict.fromkeys(curve.where for curve in recorded))
    tag = f"{'oracle' if run.own_rule == ORACLE else 'val'}/{run.metric}"
    figures = []
    for i, where in enumerate(sets[:MAX_SETS]):
        on_set = [curve for curve in recorded if curve.where == where]
        figures += _curves_figure(run, f"curve-{i}-loss", on_set, LOSS, "training loss", where)
        figures += _curves_figure(run, f"curve-{i}-selection", on_set, tag, f"selection {in_unit(run.metric)}", where)
    every = [scalars for curve in recorded for scalars in (*(scalars for _, scalars in curve.models), *curve.heads)]
    tags = [tag for tag in dict.fromkeys(tag for scalars in every for tag in scalars) if tag.startswith("train/")]
    # parts of losses and what methods log, unless they are 0 everywhere
    parts = [
        tag for tag in tags if tag not in NO_PARTS and any(v for scalars in every for _, v in scalars.get(tag, ()))
    ]
    for i, part in enumerate(parts[:MAX_PARTS]):
        words = part.removeprefix("train/").replace("_", " ")
        figures += _curves_figure(run, f"curve-part-{i}", recorded, part, words, "")
    if not figures:
        return None

    about = (
        "What training measured: the loss (its mean since the last evaluation) and the value by which the selection "
        "rule compares steps. Methods add different terms to their losses: compare the course of one line, not the "
        "height of two."
    )
    if any(curve.models for curve in recorded):
        about += " A ring is the picked step, whose weights are the model."
    if any(curve.heads for curve in recorded):
        about += (
            " Heads that trained together are summarised: a line is their mean, a band goes from lowest to highest."
        )
    if len(sets) > MAX_SETS:
        about += f" {MAX_SETS} of {len(sets)} held-out sets are shown."
    rows, shown = [], {(curve.method, curve.where) for curve in recorded}
    for record in run.picked:
        where, pick = set_name(record.test_domains), record.selected[run.own_rule]
        if (record.method, where) in shown:
            value = metric_cell(selection_value(record, run.own_rule), run.metric)
            doubts = "; ".join(pick.flags or ()) or EMPTY
            rows.append([*cells(record.method, where, record.seed, pick.step), value, Cell(doubts)])
    header = ["method", "held out", "seed", "picked step", "selection value", "doubts"]
    table = long_table(f"Picked steps under {run.own_rule}, per model.", header, rows)
    return Section("curves", "Learning and selection curves", about, figures, [table])


def _recorded(run: Run) -> list[Recorded]:
    groups: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
    for record in run.picked:
        groups.setdefault((record.method, record.test_domains), []).append(record)
    recorded = []
    for (method, held), records in groups.items():
        models = [(record, run.scalars[name]) for record in records if (name := sub_run(*record.key)) in run.scalars]
        folder = sub_run(method, held, 0, 0).rpartition("/")[0]
        heads = [scalars for name, scalars in run.scalars.items() if name.startswith(f"{folder}/heads-from-")]
        if models or heads:
            recorded.append(Recorded(method, set_name(held), models, [] if models else heads))
    order = list(run.looks)
    return sorted(recorded, key=lambda curve: order.index(curve.method))


def _curves_figure(run: Run, name: str, recorded: Sequence[Recorded], tag: str, what: str, where: str) -> list[Figure]:
    """Returns a line per method and its models; the held-out sets together if `where` is empty. [] without a value."""
    scale = axis_value(run.metric, 1.0) if tag.endswith(f"/{run.metric}") else 1.0
    ring_rule = run.own_rule if where and tag != LOSS else None
    by_method: dict[str, list[Recorded]] = {}
    for curve in recorded:
        by_method.setdefault(curve.method, []).append(curve)
    lines = [
        line for method, own in by_method.items() if (line := _line(own, tag, scale, run.looks[method], ring_rule))
    ]
    if not lines:
        return []
    title = f"{what.capitalize()}{f', held out: {where}' if where else ', all held-out sets'}."
    caption = title + (" Thin lines: models; bold: their mean." if any(line.thin for line in lines) else "")
    values = [value for line in lines for points in (line.points, *line.thin) for _, value in points]
    wide = bool(values) and min(values) > 0 and max(values) > MAX_LINEAR_RATIO * min(values)
    return [curves(name, title.rstrip("."), caption, {"": lines}, ("step", what), logarithmic_y=wide)]


def _line(recorded: Sequence[Recorded], tag: str, scale: float, look: Look, ring_rule: str | None) -> Line | None:
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

    weights = [1.0] * len(models) + [max(n for _, n in scalars.get("train/heads", [(0, 1.0)])) for scalars in heads]
    every = [*models, *mean]
    points = [(step, fmean([values[step] for values in every], weights)) for step in common(every)]
    band = [(step, min(head[step] for head in low), max(head[step] for head in high)) for step in common([*low, *high])]
    thin = [[*values.items()] for values in models] if len(models) > 1 else []
    return Line(recorded[0].method, look, points, thin, band, rings)


# -------------------------------------------------------------------------------------------------------------- WiSE-FT

ALPHA, TEST = "alpha", "test"
HALF = 0.5  # the authors' choice without validation
MAX_WISE_FT_FIGURES = 12


def wise_ft(run: Run) -> Section | None:
    """Accuracy along the line from the initial weights to the trained ones, per method and held-out set."""
    groups: dict[tuple[str, str], list[tuple[Record, Pick]]] = {}
    for record in run.picked:
        pick = record.selected[run.own_rule]
        if pick.curve and all(ALPHA in point for point in pick.curve):
            groups.setdefault((record.method, set_name(record.test_domains)), []).append((record, pick))
    if not groups:
        return None
    rows = []
    for record, pick in (model for group in groups.values() for model in group):
        test = {point[ALPHA]: point.get(TEST) for point in pick.curve or ()}
        defined = [value for value in test.values() if value is not None]
        alpha = pick.hparams.get(ALPHA)
        best = (max if HIGHER_IS_BETTER[run.metric] else min)(defined, default=None)
        values = *(test.get(a) for a in (0.0, HALF, 1.0, alpha)), best
        start = cells(record.method, set_name(record.test_domains), record.seed)
        picked = Cell(EMPTY if alpha is None else f"{alpha:g}", alpha)
        rows.append([*start, picked, *(metric_cell(value, run.metric) for value in values)])
    about = (
        "WiSE-FT's weights are (1 − α) · initial + α · trained: α = 0 is zero-shot, α = 1 is fine-tuned. The "
        "selection rule picks α on validation images; the authors use 0.5 without validation (dotted). The test curve "
        "shows what another α would have given, and picks nothing. Rings on it: the picked α of each seed."
    )
    shown = list(groups.items())[:MAX_WISE_FT_FIGURES]
    figures = [_wise_ft_figure(run, i, *key, [pick for _, pick in group]) for i, (key, group) in enumerate(shown)]
    at = [f"test at {what}" for what in ("α = 0", "α = 0.5", "α = 1", "the picked α")]
    header = ["method", "held out", "seed", "picked α", *at, "best on test"]
    table = long_table(f"Test {in_unit(run.metric)} along the curve, per model.", header, rows)
    return Section("wise-ft", "From zero-shot to fine-tuned", about, figures, [table])


def _wise_ft_figure(run: Run, i: int, method: str, where: str, picks: Sequence[Pick]) -> Figure:
    alphas = [pick.hparams[ALPHA] for pick in picks if ALPHA in pick.hparams]
    lines = []
    for look, split in zip(looks(("a", "b")).values(), dict.fromkeys((TEST, run.own_rule)), strict=False):
        of_seeds = []
        for pick in picks:
            values = {point[ALPHA]: point.get(split) for point in pick.curve or ()}
            defined = {a: axis_value(run.metric, v) for a, v in values.items() if a is not None and v is not None}
            of_seeds += [defined] if defined else []
        if of_seeds:  # their α may differ
            every = sorted({a for values in of_seeds for a in values})
            mean = {a: fmean(values[a] for values in of_seeds if a in values) for a in every}
            label = "test images" if split == TEST else f"{split} (selection)"
            thin = [[*values.items()] for values in of_seeds] if len(of_seeds) > 1 else []
            rings = [(alpha, mean[alpha]) for alpha in alphas if split == TEST and alpha in mean]
            lines.append(Line(label, look, [*mean.items()], thin, rings=rings))
    chosen = ", ".join(dict.fromkeys(f"{a:g}" for a in alphas)) or EMPTY
    title = f"Test {in_unit(run.metric)} of {method} on {where}; picked α: {chosen}"
    seeds = f" Thin lines: {len(picks)} seeds; with markers: their mean." if len(picks) > 1 else ""
    caption, axes = f"{method}, held out: {where}.{seeds}", ("α: 0 zero-shot, 1 fine-tuned", in_unit(run.metric))
    return curves(f"wise-ft-{i}", title, caption, {"": lines}, axes, vertical=HALF)
