"""Looks at a growing run. Each look spends a part of the error rate, so that growing until a verdict comes is not free.

A look is a summary with new complete seeds or methods in which a comparison has a p value. The first one has α = 0.05,
an unplanned k-th one 0.05/2^k: 7.5% in all. Planned looks (`protocol.seeds: auto`) have 0.010, 0.015 and 0.025. What a
look has found stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from xdm_ft.evaluation.records import Runs, runs_by_method
from xdm_ft.evaluation.trials import ORACLE, picked_trials
from xdm_ft.evaluation.verdicts import ALPHA, NO_VERDICT, UNKNOWN, Comparison

PLANNED = {5: 0.010, 10: 0.015, 20: 0.025}  # {seeds of a planned look: its α}


@dataclass(frozen=True)
class Look:
    """One look: what was complete, its α, and the verdicts that it found. An entry of `looks` in results.json."""

    seeds: list[int]  # complete for a method
    methods: list[str]  # with a complete seed
    missing: dict[str, list[int]]  # {method: seeds that it lacks}
    alpha: float
    compare: list[list[str]] = field(default_factory=list)  # `report.compare` at that time
    found: list[list[str]] = field(default_factory=list)  # [selection, first, second, here, elsewhere] of verdicts

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def saw_the_same(self, other: Look) -> bool:
        return (self.seeds, self.methods, self.missing) == (other.seeds, other.methods, other.missing)

    def with_found(self, rows: Iterable[Comparison], before: Sequence[Look] = ()) -> Look:
        """Returns the look with the verdicts of `rows` that none of the looks before it has found."""
        verdicts = [[r.selection, r.first, r.second, r.here, r.elsewhere] for r in rows if r.is_found]
        return replace(self, found=[one for one in verdicts if all(one not in look.found for look in before)])


def look_at(runs: Iterable[Runs], compare: Sequence[Sequence[str]] = ()) -> Look:
    """Returns a look at these methods; its α is that of a first one."""
    complete = {one.method: (one.complete_seeds, one.deterministic) for one in runs if one.complete_seeds}
    seeds = sorted({seed for own, fixed in complete.values() if not fixed for seed in own})
    missing = {m: [s for s in seeds if s not in own] for m, (own, fixed) in complete.items() if not fixed}
    missing = {method: lacks for method, lacks in missing.items() if lacks}
    return Look(seeds, sorted(complete), missing, ALPHA, [list(pair) for pair in compare])


def place_of(now: Look, before: Sequence[Look], planned: bool) -> tuple[int, Look]:
    """Returns the number of a look, from 1 on, and the look with its α.

    A summary of what the last look saw is that look again. `planned`: whether the recipe plans its looks.
    """
    if before and before[-1].saw_the_same(now):
        return len(before), before[-1]
    number = len(before) + 1
    if planned and len(now.seeds) in PLANNED and all(one.methods == now.methods for one in before):
        now = replace(now, alpha=PLANNED[len(now.seeds)])
        if [(len(one.seeds), one.alpha) for one in (*before, now)] == [*PLANNED.items()][:number]:
            return number, now
    return number, replace(now, alpha=ALPHA if number == 1 else ALPHA / 2**number)


def with_earlier_verdicts(rows: Iterable[Comparison], before: Sequence[Look]) -> list[Comparison]:
    """Returns the comparisons with what earlier looks have found."""
    known: dict[tuple[str, ...], tuple[int, str]] = {}
    elsewhere: dict[tuple[str, ...], str] = {}
    for number, look in enumerate(before, 1):
        for selection, first, second, here, there in look.found:
            known.setdefault((selection, first, second), (number, here))
            if there != UNKNOWN:
                elsewhere.setdefault((selection, first, second), there)
    kept = []
    for row in rows:
        key = (row.selection, row.first, row.second)
        if key in known:
            number, here = known[key]
            note = "; ".join(note for note in row.note.split("; ") if not note.startswith(NO_VERDICT))
            row = replace(row, here=here, look=number, elsewhere=elsewhere.get(key, row.elsewhere), note=note)
        kept.append(row)
    return kept


def looks_of(results: Mapping[str, Any], comparisons: Iterable[Comparison]) -> list[Look]:
    """Returns the looks of results.json, whose `runs` are records.

    Verdicts that an earlier version wrote without looks, in `comparisons`, count as the first; the oracle's do not.
    """
    if "looks" in results:
        return [Look(**entry) for entry in results["looks"]]
    judged = [row for row in comparisons if row.p_here is not None and row.selection != ORACLE]
    if not judged:
        return []
    rule, metric = (results["recipe"]["protocol"][key] for key in ("selection", "metric"))
    labels = [row["method"] for row in results["summary"] if row["selection"] == rule]
    runs = runs_by_method(picked_trials(results["runs"], rule, metric), labels, rule, metric)
    # a method that had one seed beside others with several was deterministic
    most = max((len(one.planned_seeds) for one in runs.values()), default=1)
    seen = [replace(one, deterministic=len(one.planned_seeds) == 1 < most) for one in runs.values()]
    return [look_at(seen).with_found(judged)]
