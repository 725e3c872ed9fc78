"""The `versus_erm` of the summary's rows: records and predictions paired, compared, and given a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xdm_ft.evaluation.comparison import SEEDS, Comparison, compare, paired, verdicts
from xdm_ft.evaluation.jackknife import check_same_images, effective_number, group_sizes, without_each_group
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.runs import Held, Runs

FEW_GROUPS = 10  # effective ones, below which the table says how many


class Groups(NamedTuple):
    """The groups of one held-out set's test images."""

    number: int
    effective: float
    known: bool  # False: every image is one


class WithoutGroups:
    """The metric of every prediction without each group of its test images, computed once."""

    def __init__(self, metric: str, held_out: Sequence[Held], predictions: Sequence[Prediction]) -> None:
        self.metric, self.held_out = metric, tuple(held_out)
        self.metrics: dict[tuple[str, str, Held, int], np.ndarray] = {}
        self.groups: dict[Held, Groups] = {}
        for held in held_out:
            runs = [p for p in predictions if tuple(p.test_domains) == held]
            if metric == "auroc":
                runs = [p for p in runs if p.per_image is not None]  # None where it is not defined
            if not runs:
                continue
            check_same_images(runs)
            sizes = group_sizes(runs[0])
            self.groups[held] = Groups(len(sizes), effective_number(sizes), runs[0].groups is not None)
            for p in runs:
                self.metrics[p.rule, p.method, held, p.seed] = without_each_group(metric, p)

    def of(self, view: Runs, held: Held, seeds: Sequence[int]) -> np.ndarray | None:
        """[seeds, groups]; None where a prediction is missing."""
        rows = [self.metrics.get((view.rule, view.method, held, seed)) for seed in seeds]
        known = [row for row in rows if row is not None]
        return np.stack(known) if len(known) == len(rows) else None


def versus(
    views: Mapping[str, Runs], references: Mapping[str, Runs], without: WithoutGroups
) -> dict[str, dict[str, Any]]:
    """The difference of each method to its reference, paired by held-out domain and seed, under one selection rule.

    `references` holds that of each method which has one. Methods with nothing to pair are left out.
    """
    comparisons: dict[str, Comparison] = {}
    notes: dict[str, str] = {}
    for method, reference in references.items():
        own, theirs = _paired_seeds(views[method], reference)
        if method != reference.method and own and theirs:
            comparisons[method], notes[method] = _compared(views[method], reference, own, theirs, without)
            if len({one.method for one in references.values()}) > 1:
                notes[method] = "; ".join(filter(None, (f"compared with {reference.method}", notes[method])))
    found = verdicts(without.metric, comparisons, _where(without.held_out))
    return {
        method: {
            "difference": one.difference,
            "domains": one.domains._asdict() if one.domains else None,
            "seeds_and_images": one.seeds_and_images._asdict() if one.seeds_and_images else None,
            **found[method]._asdict(),
            "note": notes[method],
        }
        for method, one in comparisons.items()
    }


def _where(held_out: Sequence[Held]) -> str:
    if len(held_out) > 1:
        return ""
    return "on these domains" if len(held_out[0]) > 1 else "on this domain"


def _paired_seeds(view: Runs, reference: Runs) -> tuple[list[int], list[int]]:
    """The seeds to compare on either side: those that both completed.

    A method with one seed where the other has several is a deterministic one: it is compared with each of them.
    """
    own, theirs = view.complete_seeds, reference.complete_seeds
    planned = len(view.planned_seeds), len(reference.planned_seeds)
    if min(planned) == 1 < max(planned):
        return own, theirs
    common = [seed for seed in own if seed in theirs]
    return common, common


def _compared(
    view: Runs, reference: Runs, own: Sequence[int], theirs: Sequence[int], without: WithoutGroups
) -> tuple[Comparison, str]:
    """The comparison, and what to know about it."""
    ours, base, sets, missing = view.values, reference.values, [], False
    for held in view.held_out:
        parts = without.of(view, held, own), without.of(reference, held, theirs)
        missing |= parts[0] is None or parts[1] is None
        values = np.array([ours[held, s] for s in own]), np.array([base[held, s] for s in theirs])
        both = None if parts[0] is None or parts[1] is None else (parts[0], parts[1])
        groups = without.groups[held].effective if held in without.groups else 0.0
        sets.append(paired(*values, both, groups))
    seeds = len(sets[0].by_seed)
    notes = ["variation between domains not estimated"] if len(sets) == 1 else []
    if seeds < SEEDS:
        notes.append(f"no verdict below {SEEDS} seeds, here {'is' if seeds == 1 else 'are'} {seeds}")
    if missing:
        notes.append("variation between images not estimated: predictions are missing")
    elif any(one.variance is None for one in sets):
        notes.append("variation between images not estimated: too few groups, or the metric needs all of them")
    notes += _about_groups([without.groups[held] for held in view.held_out if held in without.groups])
    if len(own) != len(theirs):
        notes.append(f"one seed, compared with each of {seeds}")
    return compare(sets), "; ".join(notes)


def _about_groups(sets: Sequence[Groups]) -> list[str]:
    notes = [] if all(groups.known for groups in sets) else ["images assumed independent"]
    few = min(sets, key=lambda groups: groups.effective, default=None)
    if few is not None and few.effective < FEW_GROUPS:
        what = "groups" if few.known else "images"
        notes.append(f"only {few.number} {what} in a test domain, effectively {few.effective:.1f}")
    return notes
