"""The records of one method under one selection rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xdm_ft.evaluation.records import Record
from xdm_ft.runtime.tensors import Score

SPLIT = "test"

Held = tuple[str, ...]  # held-out domains of one model: one (leave one domain out) or several (official split)


@dataclass(frozen=True)
class Runs:
    """The records of one method; values are those of one selection rule and metric."""

    method: str
    rule: str
    metric: str
    held_out: tuple[Held, ...]  # all held-out sets of the experiment, in order
    records: tuple[Record, ...]
    deterministic: bool = False  # whether all seeds would give the same model

    def value(self, record: Record) -> float | None:
        score = self.score(record)
        return None if score is None else getattr(score, self.metric)

    def score(self, record: Record) -> Score | None:
        """The picked weights' metrics on the test images; None if the rule picked none."""
        pick = record.selected.get(self.rule)
        return pick.metrics[SPLIT] if record.status == "ok" and pick is not None else None

    @property
    def planned_seeds(self) -> list[int]:
        return sorted({record.seed for record in self.records})

    @property
    def values(self) -> dict[tuple[Held, int], float]:
        """{(held-out domains, seed): metric} of the records that have a value."""
        pairs = ((r.test_domains, r.seed, self.value(r)) for r in self.records)
        return {(held, seed): value for held, seed, value in pairs if value is not None}

    @property
    def complete_seeds(self) -> list[int]:
        """The seeds that have a value for every held-out set; only they enter means."""
        values = self.values
        return [seed for seed in self.planned_seeds if all((held, seed) in values for held in self.held_out)]

    @property
    def by_seed(self) -> list[list[float]]:
        """The values of each complete seed, in the order of the held-out sets."""
        values = self.values
        return [[values[held, seed] for held in self.held_out] for seed in self.complete_seeds]


def set_name(held: Held) -> str:
    """The name of a set of held-out domains, as the summary's columns have it."""
    return " + ".join(held)


def runs_by_method(
    records: Sequence[Record], methods: Sequence[str], rule: str, metric: str, deterministic: Collection[str] = ()
) -> dict[str, Runs]:
    """Returns {method: its records}, in the order of `methods`; methods without a record are left out."""
    held_out = tuple(dict.fromkeys(record.test_domains for record in records))
    by_method = {m: tuple(r for r in records if r.method == m) for m in methods}
    return {m: Runs(m, rule, metric, held_out, own, m in deterministic) for m, own in by_method.items() if own}
