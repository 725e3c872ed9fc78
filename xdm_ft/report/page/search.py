"""What a search tried and what it picked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xdm_ft.evaluation.records import ModelKey, Record
from xdm_ft.evaluation.trials import selection_value
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.more_tables import searched_keys
from xdm_ft.report.page.analysed import bounded
from xdm_ft.report.page.numbers import own_models, set_name
from xdm_ft.report.page.panel import Cell, Figure, Panel, Table
from xdm_ft.report.page.search_figures import Axis, Shown, against_each_other, against_key
from xdm_ft.report.table_rows import EMPTY, items, number

MOST_FIGURES = 24
WIDE = 30  # ratio of the largest to the smallest value from which an axis is logarithmic


@dataclass(frozen=True)
class Trials:
    """The trials of one method: those with a selection value and a test value under the recipe's rule."""

    method: str
    name: str  # of the method in the recipe, whose parts have keys of their own
    space: dict[str, Any]  # the recipe's `search.space`
    keys: list[str]  # the hyper-parameters that differ between trials
    shown: list[Shown]

    def axis(self, key: str) -> Axis:
        """Logarithmic if the recipe draws the logarithm uniformly, or if the values span more than `WIDE`."""
        values = [one.record.hparams.get(key) for one in self.shown]
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
        if len(numbers) < len(values):
            return Axis(key, "names")
        drawn = next((found for part in self.name.split("+") if (found := self.space.get(f"{part}.{key}"))), None)
        positive = [value for value in numbers if value > 0]
        if not positive or min(numbers) < 0:
            return Axis(key, "linear")
        log = (drawn or self.space.get(key) or {}).get("log_uniform") or max(positive) > WIDE * min(positive)
        return Axis(key, "log" if log else "linear")

    @property
    def correlation(self) -> float | None:
        """Rank correlation of selection value and test value, the mean over held-out sets and seeds."""
        groups: dict[ModelKey | tuple[Any, ...], list[Shown]] = {}
        for one in self.shown:
            groups.setdefault(one.record.key[:3], []).append(one)
        known = [c for own in groups.values() if (c := _ranks_agree([(o.selection, o.test) for o in own])) is not None]
        return sum(known) / len(known) if known else None


def panel(run: Run) -> Panel | None:
    """Scatter plots of each searched hyper-parameter, and a table of the picked trials; None without a search."""
    found = [trials for trials in _methods(run) if trials.keys]
    if not found:
        return None
    figures = [_overall(run, i, trials) for i, trials in enumerate(found)]
    pairs = [(i, trials, key) for i, trials in enumerate(found) for key in trials.keys]
    room = max(MOST_FIGURES - len(figures), 0)
    figures += [_of_key(run, i, trials, key) for i, trials, key in pairs[:room]]
    about = (
        "Each point is one trial of the search. The trial with the best selection value is picked (ringed); test "
        "values are shown to see how well that works, and pick nothing. Where selection and test values do not rise "
        "together, more trials do not help. Held-out domains differ in level: compare points of one marker."
    )
    if run.own_rule == ORACLE:
        about += " This run's rule is oracle: it picks on test images, so its picks are no estimate."
    if len(pairs) > room:
        about += f" Plots of {room} of {len(pairs)} pairs of method and hyper-parameter are shown."
    return Panel("search", "Search", about, figures[:MOST_FIGURES], [_table(run, trials) for trials in found])


def _methods(run: Run) -> list[Trials]:
    settings = items(run.results)
    space = run.results["recipe"].get("search", {}).get("space", {})
    picked = {record.key for record in run.picked}
    shown: dict[str, list[Shown]] = {label: [] for label in settings}
    for record in run.records:
        value, test = selection_value(record, run.own_rule), _test(run, record)
        if value is not None and test is not None:
            shown.setdefault(record.method, []).append(Shown(record, value, test, record.key in picked))
    names = {label: str(item["name"]) for label, item in settings.items()}
    models = own_models(run)
    return [
        Trials(label, names.get(label, label), space, searched_keys(models, label), own)
        for label, own in shown.items()
        if own
    ]


def _test(run: Run, record: Record) -> float | None:
    pick = record.selected.get(run.own_rule)
    value: float | None = getattr(pick.metrics["test"], run.metric) if pick is not None else None
    return value


def _ranks_agree(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's correlation; None for fewer than three pairs, or if one side is constant."""
    ranks = [_ranks(np.array(side)) for side in zip(*pairs, strict=True)]
    if len(pairs) < 3 or any(np.ptp(side) == 0 for side in ranks):
        return None
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks [n]; equal values get the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places]


def _agreement(trials: Trials) -> str:
    found = trials.correlation
    if found is None:
        return "The rank correlation of selection and test value is not defined."
    return f"Rank correlation of selection and test value: {found:+.2f} (mean over held-out sets and seeds)."


def _overall(run: Run, place: int, trials: Trials) -> Figure:
    name = f"search-{place}-all"
    alt = f"Test against selection value of {len(trials.shown)} trials of {trials.method}. {_agreement(trials)}"
    caption = f"{trials.method}: every trial. {_agreement(trials)}"
    return Figure(name, against_each_other(name, trials.shown, run.metric), alt, caption)


def _of_key(run: Run, place: int, trials: Trials, key: str) -> Figure:
    name, axis = f"search-{place}-{trials.keys.index(key)}", trials.axis(key)
    picked = list(dict.fromkeys(_text(one.record.hparams.get(key)) for one in trials.shown if one.picked))
    alt = (
        f"Selection and test value of {trials.method} against {key}, {len(trials.shown)} trials; "
        f"picked values: {', '.join(picked[:8])}{' and more' if len(picked) > 8 else ''}."
    )
    scale = " (logarithmic axis)" if axis.kind == "log" else ""
    return Figure(name, against_key(name, trials.shown, run.metric, axis), alt, f"{trials.method}: {key}{scale}.")


def _table(run: Run, trials: Trials) -> Table:
    header = ["held out", "seed", "trial", *trials.keys, "selection value", "test value"]
    rows = []
    for one in trials.shown:
        if one.picked:
            record = one.record
            settings = [Cell(_text(v), _value(v)) for v in (record.hparams.get(key) for key in trials.keys)]
            rows.append(
                [
                    Cell(set_name(record.test_domains)),
                    Cell(str(record.seed), record.seed),
                    Cell(str(record.trial), record.trial),
                    *settings,
                    Cell(number(one.selection, run.metric), one.selection),
                    Cell(number(one.test, run.metric), one.test),
                ]
            )
    caption = f"{trials.method}: the values that {run.own_rule} selected. Trial 0 has the recipe's own values."
    return bounded(rows, caption, header)


def _text(value: Any) -> str:
    if value is None:
        return EMPTY
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _value(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
