"""The records of one method, as one selection rule reads them."""

from __future__ import annotations

from dataclasses import dataclass

from xdm_ft.evaluation.records import Record
from xdm_ft.tensors import Score

SPLIT = "test"

Held = tuple[str, ...]  # the test domains of one model: one (leave one domain out) or several (an official split)


@dataclass(frozen=True)
class Runs:
    """The records of one method, read under one selection rule."""

    method: str
    rule: str
    metric: str
    held_out: tuple[Held, ...]  # all that the experiment holds out, in order
    records: tuple[Record, ...]

    def value(self, record: Record) -> float | None:
        score = self.score(record)
        return None if score is None else getattr(score, self.metric)

    def score(self, record: Record) -> Score | None:
        """What the picked weights are worth on the test images; None where there are none."""
        pick = record.selected.get(self.rule)
        return pick.metrics[SPLIT] if record.status == "ok" and pick is not None else None

    @property
    def planned_seeds(self) -> list[int]:
        return sorted({record.seed for record in self.records})

    @property
    def values(self) -> dict[tuple[Held, int], float]:
        """(Held-out domains, seed) → the metric, for the records that have it."""
        pairs = ((r.test_domains, r.seed, self.value(r)) for r in self.records)
        return {(held, seed): value for held, seed, value in pairs if value is not None}

    @property
    def complete_seeds(self) -> list[int]:
        """The seeds that count: those with a value for every held-out domain."""
        values = self.values
        return [seed for seed in self.planned_seeds if all((held, seed) in values for held in self.held_out)]
