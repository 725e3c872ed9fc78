"""Which trial of a search counts: the one that the selection rule likes best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER

Record = Mapping[str, Any]


def selection_value(record: Record, rule: str) -> float | None:
    """What the rule saw of the step that it picked; None where it picked none, or saw nothing that is defined."""
    selected = record["selected"].get(rule) if record["status"] == "ok" else None
    value = None if selected is None else selected.get("value")
    return None if value is None else float(value)


def picked_trials(records: Sequence[Record], rule: str, metric: str) -> list[Record]:
    """One record per method, held-out domains and seed: the trial of the best selection value, the first of equals.

    Where no trial has one, the first record stands for all.
    """
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    groups: dict[tuple[str, tuple[str, ...], int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["method"], tuple(record["test_domains"]), record["seed"]), []).append(record)
    picked = []
    for trials in groups.values():
        values = {place: selection_value(record, rule) for place, record in enumerate(trials)}
        known = {place: value for place, value in values.items() if value is not None}
        picked.append(trials[max(known, key=lambda place: sign * known[place]) if known else 0])
    return picked
