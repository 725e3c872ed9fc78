"""Selects trials, methods and models by the value of a selection rule. No test result enters, except by `oracle`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from xdm_ft.evaluation import Record, SummaryRow
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER

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
    """Returns the record with the best selection value, as `picked_trials` has it; None if none has a value."""
    pairs = [(record, value) for record in records if (value := selection_value(record, rule)) is not None]
    if not pairs:
        return None
    best = (max if HIGHER_IS_BETTER[metric] else min)(value for _, value in pairs)
    tied = [record for record, value in pairs if value == best]
    honest = honest_rule(name for record in records for name in record.selected) if rule == ORACLE else None
    preferred = None if honest is None else _best_record(records, honest, metric)
    return next((record for record in tied if record is preferred), tied[0])


def selection_values(records: Sequence[Record], rows: Sequence[SummaryRow], rule: str, metric: str) -> dict[str, float]:
    """Returns {method: mean selection value over held-out domains and seeds, of the trials that the rule picked}.

    Test images do not enter these values. A method is left out if one of its runs has no such value, or if `rows`
    (those of the same rule) hold no estimate for it.
    """
    by_method: dict[str, list[float | None]] = {}
    for record in picked_trials(records, rule, metric):
        by_method.setdefault(record.method, []).append(selection_value(record, rule))
    means = {}
    for row in rows:
        values = [value for value in by_method.get(row.method, ()) if value is not None]
        complete = values and len(values) == len(by_method[row.method])
        if complete and row.mean is not None and row.reason is None:
            means[row.method] = math.fsum(values) / len(values)  # exact in any order of the records
    return means


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
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        del values["method"]
        return values

    def __str__(self) -> str:
        """One line: the rule that chose this method, and its value. `values` has those of the others."""

        is_nll = self.metric == "nll"
        shown = {name: f"{value:.3f}" if is_nll else f"{100 * value:.1f}" for name, value in self.values.items()}
        own = shown[self.method]
        if len(shown) == 1:
            return f"{self.method} is the only method with a value of {self.selection} ({self.method} {own})"
        rule = f"the best {self.metric} of {self.selection} ({self.best} {shown[self.best]})"
        if len(self.within_reach) > 1:
            criterion, count = self.reason.partition(" (")[0], len(self.within_reach)
            rule = f"{criterion} among the {count} within one standard error of {rule}"
        parts = [f"{self.method} is chosen of {len(shown)} methods by {rule}"]
        if self.method != self.best:
            parts.append(f"{self.method} has {own}")
        if self.by_name_only:
            held = ", ".join(f"{name} {shown[name]}" for name in self.by_name_only)
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
    # such a head hands features of every training image to all who get the model
    holding = [method for method in values if any(record.training_features for record in picked[method])]
    by_name_only = tuple(holding) if len(holding) < len(values) else ()
    eligible = [method for method in values if method not in by_name_only]
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    best = max(eligible, key=lambda method: sign * values[method])

    of_best = {record.key[1:3]: selection_value(record, rule) for record in picked[best]}
    within = []
    for method in eligible:
        pairs = [(of_best.get(record.key[1:3]), selection_value(record, rule)) for record in picked[method]]
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        if sign * (values[best] - values[method]) <= error:
            within.append(method)
    chosen, reason = _preferred(records, {method: picked[method] for method in within}, rule)
    return MethodChoice(chosen, rule, metric, values, tuple(within), best, reason, by_name_only)


def _preferred(records: Sequence[Record], picked: Mapping[str, Sequence[Record]], rule: str) -> tuple[str, str]:
    """Returns one of the methods within reach, and what it has that the others have not, with the numbers of all."""
    nll = {method: [record.selected[rule].validation_nll for record in picks] for method, picks in picked.items()}
    # how many settings were compared on the validation images of one held-out set and seed
    tuned = {method: Counter[tuple[Any, ...]]() for method in picked}
    for record in records:
        if record.method in tuned:
            tuned[record.method][record.key[1:3]] += record.tuned_settings or 1
    criteria: dict[str, dict[str, float]] = {
        "the fewest tuned settings": {method: max(counts.values()) for method, counts in tuned.items()},
        "the fewest trained parameters": {
            method: max(record.trained_parameters or 0 for record in picks) for method, picks in picked.items()
        },
    }
    if all(value is not None for values in nll.values() for value in values):
        means = {method: fmean(value for value in values if value is not None) for method, values in nll.items()}
        criteria = {"the lowest validation NLL": means} | criteria

    left, reason = list(picked), "the first place in the recipe"
    for name, measured in criteria.items():
        least = min(measured[method] for method in left)
        lowest = [method for method in left if measured[method] == least]
        if len(lowest) < len(left):
            others = [float(measured[method]) for method in left if method not in lowest]
            # as many digits as tell the lowest from the others
            digits = next(n for n in range(4, 18) if f"{least:.{n}g}" not in {f"{other:.{n}g}" for other in others})
            numbers = ", ".join(f"{method} {measured[method]:.{digits}g}" for method in left)
            left, reason = lowest, f"{name} ({numbers})"
    return left[0], reason
