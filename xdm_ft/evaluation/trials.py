"""Selects the trial of a search: the one with the best value of the selection rule."""

from __future__ import annotations

from collections.abc import Iterable

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Record


def selection_value(record: Record, rule: str) -> float | None:
    """The selection metric of the step that the rule picked; None if it picked none or the metric is not defined."""
    pick = record.selected.get(rule) if record.status == "ok" else None
    return None if pick is None else pick.value


def picked_trials(records: Iterable[Record], rule: str, metric: str) -> list[Record]:
    """Returns one record per method, held-out domains and seed: the trial with the best selection value.

    Of equal values the first trial is returned; if no trial has a value, the first trial too.
    """
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    groups: dict[tuple[str, tuple[str, ...], int], list[Record]] = {}
    for record in records:
        groups.setdefault(record.key[:3], []).append(record)
    picked = []
    for trials in groups.values():
        values = {place: selection_value(record, rule) for place, record in enumerate(trials)}
        known = {place: value for place, value in values.items() if value is not None}
        picked.append(trials[max(known, key=lambda place: sign * known[place]) if known else 0])
    return picked
