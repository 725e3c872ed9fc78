"""Selects trials, methods and models by the value of a selection rule. No test result enters, except by `oracle`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

from xdm_ft.core import ORACLE, DomainSet, Score, honest_rule
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.results.model import TEST, Record, by_site, group_by
from xdm_ft.results.table import SummaryRow


def selection_value(record: Record, rule: str) -> float | None:
    """The selection metric of the step that the rule picked; None if it picked none or the metric is not defined."""
    pick = record.selected.get(rule) if record.status == "ok" else None
    return None if pick is None else pick.value


def pick_trials(records: Iterable[Record], rule: str, metric: str) -> list[Record]:
    """Returns one record per method, held-out domains and seed: the trial with the best selection value.

    Of equal values the first trial is returned, by `oracle` the one that the `honest_rule` picks if it is among them.
    If no trial has a value, the first trial is returned.
    """
    groups: dict[tuple[str, tuple[str, ...], int], list[Record]] = {}
    for record in records:
        groups.setdefault(record.key[:3], []).append(record)
    return [_best_record(trials, rule, metric) or trials[0] for trials in groups.values()]


def _best_record(records: Sequence[Record], rule: str, metric: str) -> Record | None:
    """Returns the record with the best selection value, as `pick_trials` has it; None if none has a value."""
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
    for record in pick_trials(records, rule, metric):
        by_method.setdefault(record.method, []).append(selection_value(record, rule))
    means = {}
    for row in rows:
        values = [value for value in by_method.get(row.method, ()) if value is not None]
        complete = values and len(values) == len(by_method[row.method])
        if complete and row.mean is not None and row.reason is None:
            means[row.method] = math.fsum(values) / len(values)  # exact in any order of the records
    return means


class MethodCandidate(NamedTuple):
    """What a choice among methods reads of one."""

    values: dict[Any, float]  # {held-out set, or held-out set and seed: value of the metric}
    nll: dict[Any, float | None]
    settings: int  # how many were compared on the validation images of one held-out set and seed
    parameters: int  # that were trained
    holds_training_features: bool  # such a head hands features of every training image to all who get the model
    fold_of: Mapping[Any, int | None] = {}  # {held-out set: its fold, whose sets share models}

    @property
    def value(self) -> float:
        return math.fsum(self.values.values()) / len(self.values)  # exact in any order of the records

    def without(self, keys: Collection[Any]) -> MethodCandidate:
        values = {other: value for other, value in self.values.items() if other not in keys}
        return self._replace(values=values, nll={other: nll for other, nll in self.nll.items() if other not in keys})


class Preferred(NamedTuple):
    """One of several candidates, and why."""

    method: str
    best: str  # of the methods that could be chosen, the one with the best value
    within_reach: tuple[str, ...]  # methods within one standard error of the best one, `method` among them
    reason: str  # what decided among those within reach
    by_name_only: tuple[str, ...]  # methods whose heads hold training features


@dataclass(frozen=True)
class MethodChoice:
    """The method to use, and why.

    With several held-out sets it is chosen by what methods do there; else by validation, and no test result enters.
    """

    method: str
    selection: str  # the selection rule
    metric: str
    values: dict[str, float]  # {method: mean over held-out sets (seeds averaged), or of selection values}
    within_reach: tuple[str, ...]
    best: str
    reason: str
    by_name_only: tuple[str, ...]
    at: dict[DomainSet, str] = field(default_factory=dict)
    """{held-out set: the method that the other sets choose}; empty: chosen by validation."""

    def to_json(self) -> dict[str, Any]:
        """Returns `chosen_by` of results.json."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        del values["method"]
        values["at"] = [{"test_domains": list(held), "method": method} for held, method in self.at.items()]
        return values

    def __str__(self) -> str:
        """One line: the rule that chose this method, and its value. `values` has those of the others."""

        is_nll = self.metric == "nll"
        shown = {name: f"{value:.3f}" if is_nll else f"{100 * value:.1f}" for name, value in self.values.items()}
        own, of = shown[self.method], "held-out results" if self.at else self.selection
        if len(shown) == 1:
            return f"{self.method} is the only method with a value of {of} ({self.method} {own})"
        rule = f"the best {self.metric.replace('_', ' ')} of {of} ({self.best} {shown[self.best]})"
        if len(self.within_reach) > 1:
            criterion, count = self.reason.partition(" (")[0], len(self.within_reach)
            rule = f"{criterion} among the {count} within one standard error of {rule}"
        parts = [f"{self.method} is chosen of {len(shown)} methods by {rule}"]
        if self.method != self.best:
            parts.append(f"{self.method} has {own}")
        if self.by_name_only:
            held = ", ".join(f"{name} {shown[name]}" for name in self.by_name_only)
            parts.append(f"chosen by name only, as the head holds features of training images: {held}")
        quoted = "the quoted value is from choices that did not see the domain"
        return "; ".join([*parts, quoted if self.at else "no test result was read for this choice"])


def choose_method(records: Sequence[Record], rows: Sequence[SummaryRow], rule: str, metric: str) -> MethodChoice | None:
    """Returns the method to use; None if no method can be chosen.

    Candidates are the methods within one standard error of the best value: s/√n of the differences to the best method
    (s with ddof 1; 0 for n = 1), with folds of sites that of the folds' means if it is larger. Of these it is the one
    with the lowest mean NLL (skipped if a candidate has none), then the fewest tuned settings, then the fewest trained
    parameters, then the first in the recipe. Methods whose heads hold training features are left out, unless there are
    no others. `rows`: the summary under this rule.

    Values and NLL are those of the n ≥ 2 held-out sets, seeds averaged: validation images of known domains prefer what
    fits these. With one set, official splits among them, and for oracle, they are those of validation, paired by
    held-out set and seed.
    """
    picked = _picked_of_methods(records, rows, rule, metric)
    results = {method: _held_out_results(picks, rule, metric) for method, picks in picked.items()}
    # a set without a value of any method is one where the metric is not defined
    sets = set[DomainSet]().union(*results.values())
    fold_of = {held: record.fold for picks in picked.values() for record in picks for held in record.held_out}
    if len(sets) < 2 or rule == ORACLE:
        return choose_by_validation(records, rows, rule, metric)
    candidates = {
        method: _candidate(records, picks, results[method], fold_of)
        for method, picks in picked.items()
        if len(results[method]) == len(sets)
    }
    if not candidates:
        return choose_by_validation(records, rows, rule, metric)
    units = group_by(sorted(sets), lambda held: held if fold_of[held] is None else fold_of[held])
    at = dict[DomainSet, str]()
    for unit in units.values() if len(units) > 1 else ():
        others = {method: of.without(unit) for method, of in candidates.items()}
        at |= dict.fromkeys(unit, prefer(others, metric, "held-out").method)
    return _choice(candidates, rule, metric, {held: at[held] for held in fold_of if held in at})


def choose_by_validation(
    records: Sequence[Record], rows: Sequence[SummaryRow], rule: str, metric: str
) -> MethodChoice | None:
    """Returns the method that `choose_method` takes of one held-out set."""
    picked = _picked_of_methods(records, rows, rule, metric)
    candidates = {
        method: _candidate(records, picks, _validation_results(picks, rule)) for method, picks in picked.items()
    }
    return _choice(candidates, rule, metric, {}) if candidates else None


def _picked_of_methods(
    records: Sequence[Record], rows: Sequence[SummaryRow], rule: str, metric: str
) -> dict[str, list[Record]]:
    """Returns the picked trials of each method with a selection value."""
    picked: dict[str, list[Record]] = {method: [] for method in selection_values(records, rows, rule, metric)}
    for record in pick_trials(records, rule, metric):
        if record.method in picked:
            picked[record.method].append(record)
    return picked


def _choice(
    candidates: Mapping[str, MethodCandidate], rule: str, metric: str, at: dict[DomainSet, str]
) -> MethodChoice:
    preferred = prefer(candidates, metric, "held-out" if at else "validation")
    values = {method: candidate.value for method, candidate in candidates.items()}
    return MethodChoice(selection=rule, metric=metric, values=values, at=at, **preferred._asdict())


_Results = dict[Any, tuple[float, float | None]]  # {held-out set, or held-out set and seed: (value, NLL)}


def _held_out_results(picks: Sequence[Record], rule: str, metric: str) -> _Results:
    """Returns the results on each held-out set of which every seed has a value, the means over the seeds."""
    by_set: dict[DomainSet, list[Score | None]] = {}
    for record in by_site(picks):
        pick = record.selected.get(rule) if record.status == "ok" else None
        by_set.setdefault(record.test_domains, []).append(None if pick is None else pick.metrics.get(TEST))
    means: _Results = {}
    for held, scores in by_set.items():
        values = [None if score is None else getattr(score, metric) for score in scores]
        nll = [score.nll for score in scores if score is not None]
        known = [value for value in values if value is not None]
        if len(known) == len(scores):
            means[held] = fmean(known), fmean(nll)
    return means


def _validation_results(picks: Sequence[Record], rule: str) -> _Results:
    results: _Results = {}
    for record in picks:
        if (value := selection_value(record, rule)) is not None:
            results[record.key[1:3]] = value, record.selected[rule].validation_nll
    return results


def _candidate(
    records: Sequence[Record], picks: Sequence[Record], results: _Results, fold_of: Mapping[Any, int | None] = {}
) -> MethodCandidate:
    """Returns the candidate of one method. `records`: of all methods and trials; `picks`: the picked ones of this."""
    tuned = Counter[tuple[Any, ...]]()
    for record in records:
        if record.method == picks[0].method:
            tuned[record.key[1:3]] += record.tuned_settings or 1
    return MethodCandidate(
        {key: value for key, (value, _) in results.items()},
        {key: nll for key, (_, nll) in results.items()},
        max(tuned.values()),
        max(record.trained_parameters or 0 for record in picks),
        any(record.training_features for record in picks),
        fold_of,
    )


def prefer(candidates: Mapping[str, MethodCandidate], metric: str, images: str) -> Preferred:
    """Returns one of the candidates, as `choose_method` describes it. `images`: on which they were measured."""
    holding = [method for method, candidate in candidates.items() if candidate.holds_training_features]
    by_name_only = tuple(holding) if len(holding) < len(candidates) else ()
    eligible = {method: candidate for method, candidate in candidates.items() if method not in by_name_only}
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    best = max(eligible, key=lambda method: sign * eligible[method].value)
    within, fold_of = dict[str, MethodCandidate](), eligible[best].fold_of
    for method, candidate in eligible.items():
        of_best = eligible[best].values
        differences = {key: of_best[key] - value for key, value in candidate.values.items() if key in of_best}
        by_fold = group_by(differences.items(), lambda item: fold_of.get(item[0]))
        means = [fmean(value for _, value in of) for fold, of in by_fold.items() if fold is not None]
        error = max(_standard_error([*differences.values()]), _standard_error(means))
        if sign * (eligible[best].value - candidate.value) <= error:
            within[method] = candidate
    method, reason = _among(within, images)
    return Preferred(method, best, tuple(within), reason, by_name_only)


def _standard_error(values: Sequence[float]) -> float:
    """Returns s/√n (ddof 1), 0 for fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _among(within: Mapping[str, MethodCandidate], images: str) -> tuple[str, str]:
    """Returns one of the methods within reach, and what it has that the others have not, with the numbers of all."""
    criteria: dict[str, dict[str, float]] = {
        "the fewest tuned settings": {method: candidate.settings for method, candidate in within.items()},
        "the fewest trained parameters": {method: candidate.parameters for method, candidate in within.items()},
    }
    nll = {method: [*candidate.nll.values()] for method, candidate in within.items()}
    if all(value is not None for values in nll.values() for value in values):
        means = {method: fmean(value for value in values if value is not None) for method, values in nll.items()}
        criteria = {f"the lowest {images} NLL": means} | criteria

    left, reason = list(within), "the first place in the recipe"
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
