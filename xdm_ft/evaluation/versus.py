"""Compares rows of a table: from the values and predictions of two methods to a `Comparison`, before any correction."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from xdm_ft.evaluation.comparison import (
    PAIRED_SEEDS,
    SEEDS,
    Comparison,
    PValue,
    Term,
    here,
    over_images,
    over_paired_seeds,
    over_seeds,
    over_sets,
)
from xdm_ft.evaluation.jackknife import check_same_images, effective_number, jackknife_variance, without_each_group
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.runs import Held, Runs

FEW_GROUPS = 10  # below this effective number the note reports how many groups there are
FEWEST_SETS = 3  # held-out sets of a verdict on new domains


class Groups(NamedTuple):
    """The groups of one held-out set's test images."""

    number: int
    effective: float
    known: bool  # False: each image counts as one group


class Pair(NamedTuple):
    """A row and what it is compared with."""

    first: Runs
    second: Runs

    @property
    def deterministic(self) -> tuple[bool, bool]:
        return self.first.deterministic, self.second.deterministic

    @property
    def common(self) -> list[int]:
        """The complete seeds that both have; none if one of them is deterministic."""
        if any(self.deterministic):
            return []
        theirs = self.second.complete_seeds
        return [seed for seed in self.first.complete_seeds if seed in theirs]

    @property
    def seeds(self) -> tuple[list[int], list[int]]:
        """The seeds that count, of each side: the common ones if they are enough to pair, else all complete ones."""
        common = self.common
        if len(common) >= PAIRED_SEEDS:
            return common, common
        return self.first.complete_seeds, self.second.complete_seeds


class WithoutGroups:
    """The metric without each group of test images, as its mean over the seeds of each side of the comparisons.

    One pass over the predictions: of them, no more than one mean per side is kept.
    """

    def __init__(self, metric: str, pairs: Iterable[Pair], predictions: Iterable[Prediction]) -> None:
        """`predictions` of a method and held-out set come in the order of the seeds, which decides the rounding."""
        self.groups: dict[Held, Groups] = {}
        wanted: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        for pair in pairs:
            for runs, seeds in zip(pair, pair.seeds, strict=True):
                wanted.setdefault((runs.rule, runs.method), set()).add(tuple(seeds))
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
            for side in sides:
                total, count = self._sums.get((one.rule, one.method, held, side), (np.zeros_like(without), 0))
                total += without
                self._sums[one.rule, one.method, held, side] = total, count + 1

    def mean(self, runs: Runs, held: Held, seeds: Sequence[int]) -> np.ndarray | None:
        """The mean over these seeds, [groups]; None if a prediction is missing."""
        total, count = self._sums.get((runs.rule, runs.method, held, tuple(seeds)), (None, 0))
        return total / count if total is not None and count == len(seeds) else None


def compared(pair: Pair, without: WithoutGroups, no_verdict: str = "") -> Comparison | None:
    """Returns the difference first − second with its errors and plain p values; None if a side has no complete seed.

    `no_verdict`: why it has no p in any case; "": it may have one.
    """
    (first, second), held_out = pair, pair.first.held_out
    seeds = pair.seeds
    if not all(seeds):
        return None
    paired = len(pair.common) >= PAIRED_SEEDS
    values = [_values(runs, own) for runs, own in zip(pair, seeds, strict=True)]  # [D,S] each
    by_set = values[0].mean(1) - values[1].mean(1)  # [D]
    varying = [len(own) for own, fixed in zip(seeds, pair.deterministic, strict=True) if not fixed]
    fewest = min(varying, default=None)
    reasons = [no_verdict] if no_verdict else []
    if fewest is not None and fewest < SEEDS:
        few = "is" if fewest == 1 else "are"
        reasons.append(f"it needs {SEEDS} seeds, and {fewest} {few} complete")
    images, lacks = _over_images(pair, seeds, without)
    reasons += [lacks] if lacks else []
    of_seeds = None if fewest == 1 else _over_seeds(pair, values, paired)
    on_these, sets = None, len(held_out)
    if of_seeds is not None and images is not None:
        on_these = here(float(by_set.mean()), of_seeds, images, sets=sets, paired=paired)
    on_others = over_sets(by_set)
    p_here = None if on_these is None or reasons else on_these.p()
    if on_these is not None and p_here is None and not reasons:
        reasons.append("nothing varies, so there is no error to compare with")
    p_elsewhere = None
    if p_here is not None and on_others is not None and sets >= FEWEST_SETS and on_others.error > 0:
        p_elsewhere = on_others.p()
    shown = [f"no verdict: {reason}" for reason in reasons]
    if not reasons and sets == FEWEST_SETS - 1:
        shown.append("new domains: two held-out domains are too few")
    shown += _about_groups([without.groups[held] for held in held_out if held in without.groups])
    other = None
    at_the_border = fewest in (PAIRED_SEEDS - 1, PAIRED_SEEDS)
    if images is not None and at_the_border and len(pair.common) == len(seeds[0]) == len(seeds[1]):
        other = here(0.0, _over_seeds(pair, values, not paired), images, sets=sets, paired=not paired)
    share = None
    if of_seeds is not None and images is not None and (total := of_seeds.variance + images.variance):
        share = of_seeds.variance / total
    return Comparison(
        selection=first.rule,
        first=first.method,
        second=second.method,
        sets=sets,
        domains=sum(map(len, held_out)),
        seeds=fewest,
        paired=paired,
        difference=float(by_set.mean()),
        error=None if on_these is None else on_these.error,
        freedom=None if on_these is None else _finite(on_these.freedom),
        share_seeds=share,
        share_images=None if share is None else 1 - share,
        freedom_seeds=None if of_seeds is None else _finite(of_seeds.freedom),
        freedom_images=None if images is None else _finite(images.freedom),
        other_error=None if other is None else other.error,
        other_freedom=None if other is None else _finite(other.freedom),
        error_elsewhere=None if on_others is None else on_others.error,
        p_here=None if p_here is None else PValue(p_here, None),
        p_elsewhere=None if p_elsewhere is None else PValue(p_elsewhere, None),
        note="; ".join(shown),
    )


def _values(runs: Runs, seeds: Sequence[int]) -> np.ndarray:
    values = runs.values
    return np.array([[values[held, seed] for seed in seeds] for held in runs.held_out])


def _over_seeds(pair: Pair, values: Sequence[np.ndarray], paired: bool) -> Term:
    if paired:
        return over_paired_seeds(values[0] - values[1])
    varying = [v[:, :0] if fixed else v for v, fixed in zip(values, pair.deterministic, strict=True)]
    return over_seeds(varying[0], varying[1])


def _over_images(
    pair: Pair, seeds: tuple[Sequence[int], Sequence[int]], without: WithoutGroups
) -> tuple[Term | None, str]:
    """Returns V_I, or None and the reason why it can not be estimated."""
    variances, numbers = list[float](), list[float]()
    for held in pair.first.held_out:
        sides = [without.mean(runs, held, own) for runs, own in zip(pair, seeds, strict=True)]
        if sides[0] is None or sides[1] is None:
            return None, "predictions are missing"
        difference = sides[0] - sides[1]
        # a metric that needs many images is jackknifed over blocks, which may be fewer than the groups
        groups = min(without.groups[held].effective, len(difference))
        variance = jackknife_variance(difference)
        if groups < 2:
            what = "groups" if without.groups[held].known else "images"
            return None, f"a test domain has effectively {groups:.1f} {what}, and it needs 2"
        if variance is None:
            return None, "the metric is not defined without one of the groups of test images"
        variances.append(variance)
        numbers.append(groups)
    return over_images(variances, numbers), ""


def _finite(freedom: float) -> float | None:
    return freedom if math.isfinite(freedom) else None


def _about_groups(sets: Collection[Groups]) -> list[str]:
    notes = [] if all(groups.known for groups in sets) else ["images assumed independent"]
    few = min(sets, key=lambda groups: groups.effective, default=None)
    if few is not None and few.effective < FEW_GROUPS:
        what = "groups" if few.known else "images"
        notes.append(f"only {few.number} {what} in a test domain, effectively {few.effective:.1f}")
    return notes
