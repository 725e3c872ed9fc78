"""Selects trials, methods and models by the value of a selection rule. No test result enters, except by `oracle`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Record, SummaryRow


def selection_value(record: Record, rule: str) -> float | None:
    """The selection metric of the step that the rule picked; None if it picked none or the metric is not defined."""
    pick = record.selected.get(rule) if record.status == "ok" else None
    return None if pick is None else pick.value


def picked_trials(records: Iterable[Record], rule: str, metric: str) -> list[Record]:
    """Returns one record per method, held-out domains and seed: the trial with the best selection value.

    Of equal values the first trial is returned; if no trial has a value, the first trial too.
    """
    groups: dict[tuple[str, tuple[str, ...], int], list[Record]] = {}
    for record in records:
        groups.setdefault(record.key[:3], []).append(record)
    return [_best_record(trials, rule, metric) or trials[0] for trials in groups.values()]


def _best_record(records: Sequence[Record], rule: str, metric: str) -> Record | None:
    """Returns the record with the best selection value, the first one of several; None if none has a value."""
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    values = {place: selection_value(record, rule) for place, record in enumerate(records)}
    known = {place: value for place, value in values.items() if value is not None}
    return records[max(known, key=lambda place: sign * known[place])] if known else None


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


def best(values: Mapping[str, float], metric: str) -> str:
    """Returns the method with the best value; the first one of several with equal values."""
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    return max(values, key=lambda method: sign * values[method])


def picked_model(records: Sequence[Record], rule: str, metric: str) -> Record | None:
    """Returns the model with the best selection value; the first one of several with equal values.

    `records` are those of one method that `picked_trials` returned. Returns None if no trained model has a value, and
    for `oracle`, whose values are test results.
    """
    return None if rule == "oracle" else _best_record(records, rule, metric)
