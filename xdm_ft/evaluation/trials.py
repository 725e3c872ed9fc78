"""Which trial of a search counts: the one that the selection rule likes best."""

from __future__ import annotations

from collections.abc import Iterable

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Record


def selection_value(record: Record, rule: str) -> float | None:
    """What the rule saw of the step that it picked; None where it picked none, or saw nothing that is defined."""
    pick = record.selected.get(rule) if record.status == "ok" else None
    return None if pick is None else pick.value


def picked_trials(records: Iterable[Record], rule: str, metric: str) -> list[Record]:
    """One record per method, held-out domains and seed: the trial of the best selection value, the first of equals.

    Where no trial has one, the first record stands for all.
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
