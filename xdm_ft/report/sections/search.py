"""What a search tried and what it picked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from xdm_ft.evaluation.records import Record, set_name
from xdm_ft.evaluation.trials import selection_value
from xdm_ft.report.charts import INK, Cloud, Figure, Look, looks, scatter
from xdm_ft.report.finished import ORACLE, Run, items
from xdm_ft.report.frame import Picked
from xdm_ft.report.section import Cell, Section, Table, count_cell, long_table, metric_cell, texts
from xdm_ft.report.words import EMPTY, axis_value, in_unit, oracle_mark, setting_text

MAX_FIGURES = 24
MAX_RATIO = 30  # of the largest to the smallest value of a linear axis
MAX_POINTS, MAX_SETS, MAX_NAMES = 200, 8, 8  # of a plot; held-out sets with markers; names on an axis
MAX_VALUES = 3  # different numbers of a cell; more are shown as a range
RING = Look(INK, "o", size=8, hollow=True)


class Trial(NamedTuple):
    """A trial with a selection value and a test value under the recipe's rule."""

    record: Record
    selection: float
    test: float
    picked: bool


@dataclass(frozen=True)
class Search:
    """The trials of one method."""

    method: str
    keys: list[str]  # the hyper-parameters that differ between trials
    trials: list[Trial]

    @property
    def agreement(self) -> str:
        """The rank correlation of selection value and test value, the mean over held-out sets and seeds."""
        groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
        for trial in self.trials:
            groups.setdefault(trial.record.key[:3], []).append((trial.selection, trial.test))
        defined = [value for pairs in groups.values() if (value := _rank_correlation(pairs)) is not None]
        if not defined:
            return "The rank correlation of selection and test value is not defined."
        mean = sum(defined) / len(defined)
        return f"Rank correlation of selection and test value: {mean:+.2f} (mean over held-out sets and seeds)."


def section(run: Run) -> Section | None:
    """Scatter plots of each searched hyper-parameter, and a table of the picked trials; None without a search."""
    searches = [search for search in _searches(run) if search.keys]
    if not searches:
        return None
    figures = [_overall(run, f"search-{i}-all", search) for i, search in enumerate(searches)]
    pairs = [(f"search-{i}-{j}", one, key) for i, one in enumerate(searches) for j, key in enumerate(one.keys)]
    room = max(MAX_FIGURES - len(figures), 0)
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
    return Section("search", "Search", about, figures[:MAX_FIGURES], [_table(run, search) for search in searches])


def _searches(run: Run) -> list[Search]:
    picked = {record.key for record in run.picked}
    trials: dict[str, list[Trial]] = {label: [] for label in items(run.results)}
    for record in run.records:
        value, pick = selection_value(record, run.own_rule), record.selected.get(run.own_rule)
        test = None if pick is None else getattr(pick.metrics["test"], run.metric)
        if value is not None and test is not None:
            trials.setdefault(record.method, []).append(Trial(record, value, test, record.key in picked))
    return [Search(label, searched_keys(run, label), own) for label, own in trials.items() if own]


def searched_keys(run: Run, method: str) -> list[str]:
    """Returns the keys whose values differ between trials of one held-out set and seed."""
    values: dict[tuple[Any, ...], dict[str, set[str]]] = {}
    for entry in run.results["runs"]:
        if entry["method"] == method:
            of_trials = values.setdefault((*entry["test_domains"], entry["seed"]), {})
            for key, value in entry["hparams"].items():
                of_trials.setdefault(key, set()).add(json.dumps(value))
    return list(dict.fromkeys(key for of in values.values() for key, different in of.items() if len(different) > 1))


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns Spearman's correlation; None for fewer than three pairs, or if one side is constant."""
    from scipy.stats import rankdata

    ranks = [rankdata(side) for side in zip(*pairs, strict=True)]
    if len(pairs) < 3 or any(np.ptp(side) == 0 for side in ranks):
        return None
    return float(np.corrcoef(ranks)[0, 1])


def _overall(run: Run, name: str, search: Search) -> Figure:
    scale = axis_value(run.metric, 1.0)
    clouds = _clouds(search.trials, lambda trial: (scale * trial.selection, scale * trial.test))
    alt = f"Test against selection value of {len(search.trials)} trials of {search.method}. {search.agreement}"
    caption = f"{search.method}: every trial. {search.agreement}"
    unit = in_unit(run.metric)
    return scatter(name, alt, caption, [[(f"test {unit}", clouds)]], f"selection {unit}")


def _against_key(run: Run, name: str, search: Search, key: str) -> Figure:
    """Selection value above, test value below, against one hyper-parameter."""
    values: list[Any] = [trial.record.hparams.get(key) for trial in search.trials]
    names = None if all(map(_is_number, values)) else sorted({str(value) for value in values})
    if names is not None and len(names) > MAX_NAMES:
        names = [*names[: MAX_NAMES - 1], "others"]
    logarithmic = names is None and _is_logarithmic(run, search.method, key, [float(value) for value in values])

    def x(trial: Trial) -> float:
        value: Any = trial.record.hparams.get(key)
        if names is None:
            return float(value)
        return float(names.index(str(value)) if str(value) in names else len(names) - 1)

    scale, unit = axis_value(run.metric, 1.0), in_unit(run.metric)
    above = _clouds(search.trials, lambda trial: (x(trial), scale * trial.selection))
    below = _clouds(search.trials, lambda trial: (x(trial), scale * trial.test))
    picked = list(dict.fromkeys(setting_text(trial.record.hparams.get(key)) for trial in search.trials if trial.picked))
    alt = (
        f"Selection and test value of {search.method} against {key}, {len(search.trials)} trials; "
        f"picked values: {', '.join(picked[:8])}{' and more' if len(picked) > 8 else ''}."
    )
    caption = f"{search.method}: {key}{' (logarithmic axis)' if logarithmic else ''}."
    grid = [[(f"selection\n{unit}", above)], [(f"test\n{unit}", below)]]
    return scatter(name, alt, caption, grid, key, x_names=names, logarithmic_x=logarithmic, height=3.3)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_logarithmic(run: Run, label: str, key: str, values: Sequence[float]) -> bool:
    """Whether the recipe draws the logarithm uniformly, or the values span more than `MAX_RATIO`."""
    space = run.results["recipe"].get("search", {}).get("space", {})
    parts = str(items(run.results).get(label, {}).get("name", label)).split("+")
    drawn = next((own for part in parts if (own := space.get(f"{part}.{key}"))), None) or space.get(key) or {}
    positive = [value for value in values if value > 0]
    if not positive or min(values) < 0:
        return False
    return bool(drawn.get("log_uniform")) or max(positive) > MAX_RATIO * min(positive)


def _clouds(trials: Sequence[Trial], point: Callable[[Trial], tuple[float, float]]) -> list[Cloud]:
    """Returns the points of each held-out set, and rings around those of picked trials."""
    by_set: dict[str, list[Trial]] = {}
    for trial in trials:
        by_set.setdefault(set_name(trial.record.test_domains), []).append(trial)
    few = len(by_set) <= MAX_SETS
    clouds = []
    for where, look in looks(by_set).items():
        shown = _thinned(by_set[where], max(MAX_POINTS // len(by_set), 1))
        style = look._replace(marker=look.marker if few else "o", size=3.5)
        clouds.append(Cloud(where if few and len(by_set) > 1 else "", style, [point(trial) for trial in shown]))
    picked = _thinned([trial for trial in trials if trial.picked], MAX_POINTS // 2)
    return [*clouds, Cloud("picked", RING, [point(trial) for trial in picked])]


def _thinned(trials: Sequence[Trial], most: int) -> list[Trial]:
    """Returns at most about `most` trials, evenly over their numbers, and every picked one."""
    step = max(1, -(-len(trials) // most))
    return [trial for i, trial in enumerate(trials) if i % step == 0 or trial.picked]


def _table(run: Run, search: Search) -> Table:
    rows = []
    for trial in (trial for trial in search.trials if trial.picked):
        record = trial.record
        settings: list[Any] = [record.hparams.get(key) for key in search.keys]
        cells = [Cell(setting_text(value), float(value) if _is_number(value) else None) for value in settings]
        start = [Cell(set_name(record.test_domains)), count_cell(record.seed), count_cell(record.trial)]
        rows.append([*start, *cells, metric_cell(trial.selection, run.metric), metric_cell(trial.test, run.metric)])
    caption = f"{search.method}: the values that {run.own_rule} selected. Trial 0 has the recipe's own values."
    return long_table(caption, ["held out", "seed", "trial", *search.keys, "selection value", "test value"], rows)


def selected_section(run: Run, rule: str) -> Section | None:
    """The hyper-parameters that the rule selected on each held-out set; None if it selected none."""
    picked, rows = Picked(run, rule), []
    for method in (row.method for row in run.rows if row.selection == rule):
        records = [record for record in picked.of(method) if rule in record.selected]
        within_training = [key for record in records for key in record.selected[rule].hparams]
        for key in dict.fromkeys([*searched_keys(run, method), *within_training]):
            by_set = [[record for record in records if record.test_domains == held] for held in picked.held_out]
            rows.append(texts(method, key, *(_values(own, key, rule) for own in by_set)))
    if not rows:
        return None
    caption = f"One value per seed; of more than {MAX_VALUES} different numbers, the lowest and the highest."
    header = [f"method{oracle_mark(rule)}", "hyper-parameter", *map(set_name, picked.held_out)]
    about = "What the selection rule picked in a search, or within one training."
    return Section("selected", "Selected hyper-parameters", about, tables=[Table(caption, header, rows, labels=2)])


def _values(records: Sequence[Record], key: str, rule: str) -> str:
    every: list[Mapping[str, Any]] = [record.hparams | record.selected[rule].hparams for record in records]
    values = [settings[key] for settings in every if key in settings]
    different = list(dict.fromkeys(map(setting_text, values)))
    if len(different) <= 1:
        return next(iter(different), EMPTY)
    if len(different) <= MAX_VALUES or not all(isinstance(value, int | float) for value in values):
        return ", ".join(map(setting_text, values))
    return f"{setting_text(min(values))} to {setting_text(max(values))}"
