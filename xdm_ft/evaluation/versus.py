"""Compares methods with each other: the `versus_erm` of the summary's rows, and its pairs of encoders."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from xdm_ft.evaluation.comparison import SEEDS, Comparison, compare, paired, verdicts
from xdm_ft.evaluation.jackknife import check_same_images, effective_number, without_each_group
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.runs import Held, Runs

K = TypeVar("K", bound=Hashable)
FEW_GROUPS = 10  # below this effective number the note reports how many groups there are


class Groups(NamedTuple):
    """The groups of one held-out set's test images."""

    number: int
    effective: float
    known: bool  # False: each image counts as one group


Pair = tuple[Runs, Runs]
"""The method and what it is compared with."""


class WithoutGroups:
    """The metric without each group of test images, as its mean over the seeds of each side of the comparisons.

    One pass over the predictions: of them, no more than one mean per side is kept.
    """

    def __init__(self, metric: str, pairs: Iterable[Pair], predictions: Iterable[Prediction]) -> None:
        """`predictions` of a method and held-out set come in the order of the seeds, which decides the rounding."""
        self.metric = metric
        self.groups: dict[Held, Groups] = {}
        wanted: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        for pair in pairs:
            for runs, paired_seeds in zip(pair, _paired_seeds(*pair), strict=True):
                wanted.setdefault((runs.rule, runs.method), set()).add(tuple(paired_seeds))
        self._sums: dict[tuple[str, str, Held, tuple[int, ...]], tuple[np.ndarray, int]] = {}
        first: dict[Held, Prediction] = {}
        for one in predictions:
            if metric == "auroc" and one.per_image is None:  # the AUROC is not defined
                continue
            held, images = tuple(one.test_domains), one.images
            if held not in first:
                first[held] = one
                self.groups[held] = Groups(len(images.sizes), effective_number(images.sizes), images.groups is not None)
            check_same_images(first[held], one)
            sides = [seeds for seeds in wanted.get((one.rule, one.method), ()) if one.seed in seeds]
            if not sides:
                continue
            without = without_each_group(metric, one)
            for seeds in sides:
                total, count = self._sums.get((one.rule, one.method, held, seeds), (np.zeros_like(without), 0))
                total += without
                self._sums[one.rule, one.method, held, seeds] = total, count + 1

    def mean(self, runs: Runs, held: Held, seeds: Sequence[int]) -> np.ndarray | None:
        """The mean over these seeds, [groups]; None if a prediction is missing."""
        total, count = self._sums.get((runs.rule, runs.method, held, tuple(seeds)), (None, 0))
        return total / count if total is not None and count == len(seeds) else None


def versus(pairs: Mapping[K, Pair], without: WithoutGroups) -> dict[K, dict[str, Any]]:
    """Returns the differences first − second, paired by held-out domain and seed, under one selection rule.

    All `pairs` are one family of Holm's correction. A pair without a common seed is not in the result.
    """
    comparisons: dict[K, Comparison] = {}
    notes: dict[K, str] = {}
    for key, (first, second) in pairs.items():
        own, theirs = _paired_seeds(first, second)
        if own and theirs:
            comparisons[key], notes[key] = _compared(first, second, own, theirs, without)
    held_out = next(iter(pairs.values()))[0].held_out if pairs else ()
    found = verdicts(without.metric, comparisons, _where(held_out))
    return {
        key: {
            "difference": one.difference,
            "domains": one.domains._asdict() if one.domains else None,
            "seeds_and_images": one.seeds_and_images._asdict() if one.seeds_and_images else None,
            **found[key]._asdict(),
            "note": notes[key],
        }
        for key, one in comparisons.items()
    }


def _where(held_out: Sequence[Held]) -> str:
    if len(held_out) != 1:
        return ""
    return "on these domains" if len(held_out[0]) > 1 else "on this domain"


def _paired_seeds(runs: Runs, reference: Runs) -> tuple[list[int], list[int]]:
    """Returns the seeds to compare, of the method and of its reference: those that both have completed.

    If one of them has a single planned seed and the other several, it is deterministic and compared with each seed.
    """
    own, theirs = runs.complete_seeds, reference.complete_seeds
    planned = len(runs.planned_seeds), len(reference.planned_seeds)
    if min(planned) == 1 < max(planned):
        return own, theirs
    common = [seed for seed in own if seed in theirs]
    return common, common


def _compared(
    runs: Runs, reference: Runs, own: Sequence[int], theirs: Sequence[int], without: WithoutGroups
) -> tuple[Comparison, str]:
    """Returns the comparison, and the note that explains it."""
    ours, base, sets, missing = runs.values, reference.values, [], False
    for held in runs.held_out:
        values = np.array([ours[held, s] for s in own]), np.array([base[held, s] for s in theirs])
        of_own, of_reference = without.mean(runs, held, own), without.mean(reference, held, theirs)
        both = None if of_own is None or of_reference is None else (of_own, of_reference)
        missing |= both is None
        groups = without.groups[held].effective if held in without.groups else 0.0
        sets.append(paired(*values, both, groups))
    seeds = len(sets[0].by_seed)
    notes = ["variation between domains not estimated"] if len(sets) == 1 else []
    if seeds < SEEDS:
        notes.append(f"no verdict: it needs {SEEDS} seeds, and {seeds} {'is' if seeds == 1 else 'are'} complete")
    if missing:
        notes.append("variation between images not estimated: predictions are missing")
    elif any(one.variance is None for one in sets):
        notes.append("variation between images not estimated: too few groups, or the metric needs all of them")
    notes += _about_groups([without.groups[held] for held in runs.held_out if held in without.groups])
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
