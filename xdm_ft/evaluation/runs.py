"""The records of one method, as one selection rule reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPLIT = "test"

Held = tuple[str, ...]  # the test domains of one model: one (leave one domain out) or several (an official split)
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Runs:
    """The records of one method, read under one selection rule."""

    method: str
    rule: str
    metric: str
    held_out: tuple[Held, ...]  # all that the experiment holds out, in order
    records: tuple[Record, ...]

    def value(self, record: Record) -> float | None:
        return self.metrics(record).get(self.metric)

    def metrics(self, record: Record) -> Mapping[str, Any]:
        selected = record.get("selected", {}).get(self.rule)
        return selected["metrics"][SPLIT] if record["status"] == "ok" and selected else {}

    @property
    def planned_seeds(self) -> list[int]:
        return sorted({record["seed"] for record in self.records})

    @property
    def values(self) -> dict[tuple[Held, int], float]:
        """(Held-out domains, seed) → the metric, for the records that have it."""
        pairs = ((held_out_of(r), r["seed"], self.value(r)) for r in self.records)
        return {(held, seed): value for held, seed, value in pairs if value is not None}

    @property
    def complete_seeds(self) -> list[int]:
        """The seeds that count: those with a value for every held-out domain."""
        values = self.values
        return [seed for seed in self.planned_seeds if all((held, seed) in values for held in self.held_out)]


def held_out_of(record: Record) -> Held:
    return tuple(record["test_domains"])
