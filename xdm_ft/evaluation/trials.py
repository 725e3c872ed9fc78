"""Selects trials, methods and models by the value of a selection rule. No test result enters, except by `oracle`."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Record, SummaryRow

ORACLE = "oracle"  # the selection rule that reads labels of the held-out domain


def honest_rule(rules: Iterable[str]) -> str | None:
    """Returns the first rule that reads no label of the held-out domain; None if there is none.

    Of steps, trials and candidates that are equally good for `oracle`, it takes the one that this rule picks, so that
    a difference between both is never one of two ties.
    """
    return next((rule for rule in rules if rule != ORACLE), None)


def selection_value(record: Record, rule: str) -> float | None:
    """The selection metric of the step that the rule picked; None if it picked none or the metric is not defined."""
    pick = record.selected.get(rule) if record.status == "ok" else None
    return None if pick is None else pick.value


def picked_trials(records: Iterable[Record], rule: str, metric: str) -> list[Record]:
    """Returns one record per method, held-out domains and seed: the trial with the best selection value.

    Of equal values the first trial is returned, by `oracle` the one that the `honest_rule` picks if it is among them.
    If no trial has a value, the first trial is returned.
    """
    groups: dict[tuple[str, tuple[str, ...], int], list[Record]] = {}
    for record in records:
        groups.setdefault(record.key[:3], []).append(record)
    return [_best_record(trials, rule, metric) or trials[0] for trials in groups.values()]


def _best_record(records: Sequence[Record], rule: str, metric: str) -> Record | None:
    """Returns the record with the best selection value, the first one of several; None if none has a value.

    Of several, `oracle` returns the one that the `honest_rule` picks, if it is among them.
    """
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    values = {place: selection_value(record, rule) for place, record in enumerate(records)}
    known = {place: value for place, value in values.items() if value is not None}
    if not known:
        return None
    best_value = max(known.values(), key=lambda value: sign * value)
    tied = [records[place] for place, value in known.items() if value == best_value]
    followed = honest_rule(name for record in records for name in record.selected) if rule == ORACLE else None
    picked = None if followed is None else _best_record(records, followed, metric)
    return next((record for record in tied if record is picked), tied[0])


def selection_values(records: Sequence[Record], rows: Sequence[SummaryRow], rule: str, metric: str) -> dict[str, float]:
    """Returns {method: mean selection value over held-out domains and seeds, of the trials that the rule picked}.

    Test images do not enter these values. A method is left out if one of its runs has no such value, or if `rows`
    (those of the same rule) hold no estimate for it.
    """
    picked: dict[str, list[Record]] = {}
    for record in picked_trials(records, rule, metric):
        picked.setdefault(record.method, []).append(record)
    found = {}
    for row in rows:
        seen = [selection_value(record, rule) for record in picked.get(row.method, ())]
        known = [value for value in seen if value is not None]
        if known and len(known) == len(seen) and row.mean is not None and row.reason is None:
            found[row.method] = math.fsum(known) / len(known)
    return found


@dataclass(frozen=True)
class MethodChoice:
    """The method that validation prefers, and why. No test result enters."""

    method: str
    selection: str  # the selection rule
    metric: str
    values: dict[str, float]  # {method: mean selection value over held-out sets and seeds}, in the recipe's order
    within_reach: tuple[str, ...]  # methods within one standard error of the best one, `method` among them
    best: str  # of the methods that could be chosen, the one with the best value
    reason: str  # what decided among those within reach
    by_name_only: tuple[str, ...]  # methods whose heads hold training features

    def to_json(self) -> dict[str, Any]:
        """Returns `chosen_by` of results.json."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "method"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def __str__(self) -> str:
        """One line: the values, who else was within reach, and why this one."""
        values = ", ".join(f"{method} {_shown(self.metric, value)}" for method, value in self.values.items())
        if len(self.values) == 1:
            return f"{self.method} is the only method with a value of {self.selection} ({values})"
        parts = [
            f"{self.method} is chosen of {len(self.values)} methods by {self.metric} of {self.selection}: {values}"
        ]
        others = [method for method in self.within_reach if method != self.best]
        if others:
            reach = f"within one standard error of the best, {self.best}: {', '.join(others)}"
            parts.append(f"{reach}; of these {len(others) + 1}, {self.method} has {self.reason}")
        else:
            parts.append("no other one is within one standard error of it")
        if self.by_name_only:
            held = ", ".join(self.by_name_only)
            parts.append(f"chosen by name only, as the head holds features of training images: {held}")
        return "; ".join([*parts, "no test result was read for this choice"])


def choose_method(records: Sequence[Record], rows: Sequence[SummaryRow], rule: str, metric: str) -> MethodChoice | None:
    """Returns the method to use; None if no method has a selection value.

    Candidates are the methods within one standard error of the best selection value: s/√n of the differences to the
    best method, paired by held-out set and seed (n pairs, s with ddof 1; 0 for n = 1). Of these it is the one with the
    lowest mean validation NLL (skipped if a candidate has none), then the fewest tuned settings, then the fewest
    trained parameters, then the first in the recipe. Methods whose heads hold training features are left out, unless
    there are no others. `rows`: the summary under this rule.
    """
    values = selection_values(records, rows, rule, metric)
    if not values:
        return None
    picked = {method: list[Record]() for method in values}
    for record in picked_trials(records, rule, metric):
        if record.method in picked:
            picked[record.method].append(record)
    holding = [method for method, own in picked.items() if any(one.training_features for one in own)]
    by_name_only = tuple(holding) if len(holding) < len(values) else ()
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    eligible = [method for method in values if method not in by_name_only]
    best = max(eligible, key=lambda method: sign * values[method])
    within = [
        method
        for method in eligible
        if sign * (values[best] - values[method]) <= _standard_error(picked[best], picked[method], rule)
    ]
    chosen, reason = _preferred(records, {method: picked[method] for method in within}, rule)
    return MethodChoice(chosen, rule, metric, values, tuple(within), best, reason, by_name_only)


def _standard_error(first: Sequence[Record], second: Sequence[Record], rule: str) -> float:
    """Returns s/√n of the differences of selection values in the n pairs of held-out set and seed; 0 for n < 2."""
    of_first = {one.key[1:3]: selection_value(one, rule) for one in first}
    pairs = [(of_first.get(one.key[1:3]), selection_value(one, rule)) for one in second]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    return stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0


def _preferred(records: Sequence[Record], picked: Mapping[str, Sequence[Record]], rule: str) -> tuple[str, str]:
    """Returns one of the methods within reach, and what it has that the others have not, with the numbers of all."""
    nll = {method: [one.selected[rule].validation_nll for one in own] for method, own in picked.items()}
    criteria: list[tuple[str, dict[str, float]]] = []
    if all(value is not None for values in nll.values() for value in values):
        means = {method: fmean(value for value in values if value is not None) for method, values in nll.items()}
        criteria.append(("the lowest validation NLL", means))
    tuned = {method: float(_tuned_settings(records, method)) for method in picked}
    criteria.append(("the fewest tuned settings", tuned))
    parameters = {method: float(max(one.trained_parameters or 0 for one in own)) for method, own in picked.items()}
    criteria.append(("the fewest trained parameters", parameters))
    left, reason = list(picked), "the first place in the recipe"
    for name, measured in criteria:
        least = min(measured[method] for method in left)
        lowest = [method for method in left if measured[method] == least]
        if len(lowest) < len(left):
            others = [measured[method] for method in left if method not in lowest]
            digits = next(n for n in range(4, 18) if f"{least:.{n}g}" not in {f"{one:.{n}g}" for one in others})
            numbers = ", ".join(f"{method} {measured[method]:.{digits}g}" for method in left)
            left, reason = lowest, f"{name} ({numbers})"
    return left[0], reason


def _tuned_settings(records: Sequence[Record], method: str) -> int:
    """Returns how many settings were compared on the validation images of one held-out set and seed."""
    found = Counter[tuple[Any, ...]]()
    for record in records:
        if record.method == method:
            found[record.key[1:3]] += record.tuned_settings or 1
    return max(found.values())


def _shown(metric: str, value: float) -> str:
    return f"{value:.3f}" if metric == "nll" else f"{100 * value:.1f}"
