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

    def with_found(self, rows: Iterable[Comparison], before: Sequence[Look] = ()) -> Look:
        """Returns the look with the verdicts of `rows` that none of the looks before it has found."""
        earlier = [verdict for look in before for verdict in look.found]
        verdicts = [[r.selection, r.first, r.second, r.here, r.elsewhere] for r in rows if r.is_found]
        return replace(self, found=[verdict for verdict in verdicts if verdict not in earlier])


def look_at(runs: Iterable[Runs], compare: Sequence[Sequence[str]] = ()) -> Look:
    """Returns a look at these methods; its α is that of a first one."""
    varying, methods = dict[str, list[int]](), list[str]()
    for own in runs:
        if complete := own.complete_seeds:
            methods.append(own.method)
            if not own.deterministic:
                varying[own.method] = complete
    seeds = sorted({seed for complete in varying.values() for seed in complete})
    missing = {method: lacking for method, complete in varying.items() if (lacking := sorted({*seeds} - {*complete}))}
    return Look(seeds, sorted(methods), missing, ALPHA, [list(pair) for pair in compare])


def place_of(now: Look, before: Sequence[Look], planned: bool) -> tuple[int, Look]:
    """Returns the number of a look, from 1 on, and the look with its α.

    A summary of what the last look saw is that look again. `planned`: whether the recipe plans its looks.
    """
    if before and all(getattr(before[-1], name) == getattr(now, name) for name in ("seeds", "methods", "missing")):
        return len(before), before[-1]
    number = len(before) + 1
    if planned and len(now.seeds) in PLANNED and all(look.methods == now.methods for look in before):
        now = replace(now, alpha=PLANNED[len(now.seeds)])
        if [(len(look.seeds), look.alpha) for look in (*before, now)] == [*PLANNED.items()][:number]:
            return number, now
    return number, replace(now, alpha=ALPHA if number == 1 else ALPHA / 2**number)


def with_earlier_verdicts(rows: Iterable[Comparison], before: Sequence[Look]) -> list[Comparison]:
    """Returns the comparisons with what earlier looks have found."""
    here: dict[tuple[str, ...], tuple[int, str]] = {}
    elsewhere: dict[tuple[str, ...], str] = {}
    for number, look in enumerate(before, 1):
        for selection, first, second, word, word_elsewhere in look.found:
            here.setdefault((selection, first, second), (number, word))
            if word_elsewhere != UNKNOWN:
                elsewhere.setdefault((selection, first, second), word_elsewhere)
    kept = []
    for row in rows:
        key = (row.selection, row.first, row.second)
        if key in here:
            number, word = here[key]
            note = "; ".join(note for note in row.note.split("; ") if not note.startswith(NO_VERDICT))
            row = replace(row, here=word, look=number, elsewhere=elsewhere.get(key, row.elsewhere), note=note)
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
    most = max((len(own.planned_seeds) for own in runs.values()), default=1)
    seen = [replace(own, deterministic=len(own.planned_seeds) == 1 < most) for own in runs.values()]
    return [look_at(seen).with_found(judged)]
