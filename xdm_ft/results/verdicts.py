"""Whether one row of a table differs from another: verdicts, and what the table could have found.

Two questions have two verdicts. *Here*: does the difference hold on these domains, with other seeds and test images?
*Elsewhere*: does it hold on new domains? The first test adds the variance over seeds (V_S) and that over groups of test
images (V_I); the second uses the spread of the difference over the D held-out sets alone.

Below `PAIRED_SEEDS` common seeds the two sides are not paired: few paired differences have too few degrees of freedom.
Degrees of freedom of a sum are a weighted harmonic mean, V / Σ V_i/f_i, with a limit (`estimate_here`), not Welch and
Satterthwaite's: these are too liberal with ten slides, or with three paired seeds (`benchmarks/verdicts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # scipy.stats takes 50 times as long for one number

from xdm_ft.core import ALPHA, DomainSet, sets_noun
from xdm_ft.evaluation.estimates import (
    FEWEST_SETS,
    Estimate,
    Term,
    estimate_here,
    holm,
    over_images,
    over_paired_seeds,
    over_seeds,
    over_sites,
)
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.predictions import (
    HeldOutImages,
    Prediction,
    check_same_images,
    effective_number,
    jackknife_variance,
    without_each_group,
)
from xdm_ft.results import Runs, seeds_by_set
from xdm_ft.results.table import BETTER, EQUAL, UNDECLARED, UNKNOWN, WORSE, Comparison, PValue

SEEDS = 3  # fewest seeds of a verdict, of each side that is not deterministic
PAIRED_SEEDS = 10  # from so many common seeds on, the two sides are paired by seed


def judge(
    metric: str,
    rows: Sequence[Comparison],
    family: Sequence[bool],
    *,
    alpha: float = ALPHA,
    look: int = 1,
    margin: float | None = None,
) -> list[Comparison]:
    """Returns the comparisons under one selection rule with corrected p values and verdicts.

    Holm's correction runs over the M comparisons of the family that have a p. This selects none by its difference:
    whether it has a p depends on seeds and predictions alone.

    Args:
        rows: with plain p values.
        family: whether each of them is in the family; the others have no verdict, and their note says so.
        alpha: significance level of this look.
        look: its number.
        margin: rows whose two-sided interval at level 1 − 2α/M lies within ±margin are equal within it (two one-sided
            tests).
    """
    judged = [replace(row, look=look) for row in rows]
    tested = list[int]()
    for i, row in enumerate(rows):
        if row.p_here is not None and family[i]:
            tested.append(i)
        elif row.p_here is not None:
            judged[i] = replace(judged[i], note="; ".join(filter(None, [UNDECLARED, row.note])))
    of_here = holm([rows[i].p_here.plain for i in tested])  # type: ignore[union-attr]
    # a row without a p of elsewhere counts as one that cannot be shown
    of_elsewhere = holm([1.0 if (p := rows[i].p_elsewhere) is None else p.plain for i in tested])

    for i, p_here, p_elsewhere in zip(tested, of_here, of_elsewhere, strict=True):
        row, both = rows[i], max(p_here, p_elsewhere)
        assert row.p_here is not None
        assert row.on_these is not None
        word = BETTER if (row.difference > 0) == HIGHER_IS_BETTER[metric] else WORSE
        ends = row.on_these.interval(1 - 2 * alpha / len(tested))
        equal = margin is not None and -margin < ends.low and ends.high < margin
        judged[i] = replace(
            judged[i],
            p_here=PValue(row.p_here.plain, p_here),
            p_elsewhere=row.p_elsewhere and PValue(row.p_elsewhere.plain, both),
            here=word if p_here < alpha else EQUAL,
            elsewhere=word if row.p_elsewhere is not None and both < alpha else UNKNOWN,
            equal_within=margin if equal else None,
        )
    return judged


# From the values and predictions of two methods to a comparison, before any correction

FEW_GROUPS = 10  # below this effective number the note reports how many groups there are


class Pair(NamedTuple):
    """A row and what it is compared with."""

    first: Runs
    second: Runs

    @property
    def common(self) -> list[int]:
        """The complete seeds that both have; none if one of them is deterministic."""
        if self.first.deterministic or self.second.deterministic:
            return []
        return [seed for seed in self.first.complete_seeds if seed in self.second.complete_seeds]

    @property
    def seeds(self) -> tuple[list[int], list[int]]:
        """The seeds that count, of each side: the common ones if they are enough to pair, else all complete ones."""
        common = self.common
        if len(common) >= PAIRED_SEEDS:
            return common, common
        return self.first.complete_seeds, self.second.complete_seeds


class OverImages(NamedTuple):
    """How the mean over some seeds of a method, on one held-out set, varies with the test images."""

    variance: float | None  # None: it cannot be estimated
    effective: float  # number of groups
    groups: int | None  # None: images assumed independent


class WithoutGroups:
    """The metric without each group of test images, as its mean over the seeds of each side of the comparisons.

    One pass over the predictions: of them, no more than one mean per side is kept.
    """

    def __init__(
        self,
        metric: str,
        pairs: Iterable[Pair],
        predictions: Iterable[Prediction] = (),
        alone: Iterable[Runs] = (),
    ) -> None:
        """`predictions` are added. `alone`: methods whose own error is wanted, over the seeds of `seeds_by_set`."""
        self.metric = metric
        self.images: dict[DomainSet, HeldOutImages] = {}
        self._first: dict[DomainSet, Prediction] = {}
        self._sides: dict[tuple[str, str, DomainSet], set[tuple[int, ...]]] = {}  # by rule and method
        for pair in pairs:
            for runs, seeds in zip(pair, pair.seeds, strict=True):
                self._want(runs, dict.fromkeys(runs.held_out, seeds))
        for runs in alone:
            self._want(runs, seeds_by_set(runs))
        self._sums: dict[tuple[str, str, DomainSet, tuple[int, ...]], tuple[np.ndarray, int]] = {}
        for prediction in predictions:
            self.add(prediction)

    def _want(self, runs: Runs, seeds: Mapping[DomainSet, Sequence[int]]) -> None:
        for held, of_set in seeds.items():
            self._sides.setdefault((runs.rule, runs.method, held), set()).add(tuple(of_set))

    def add(self, prediction: Prediction) -> None:
        """Those of a method and held-out set come in the order of the seeds, which decides the rounding."""
        key = prediction.rule, prediction.method, tuple(prediction.test_domains)
        check_same_images(self._first.setdefault(key[2], prediction), prediction)
        self.images[key[2]] = self._first[key[2]].images
        sides = [seeds for seeds in self._sides.get(key, ()) if prediction.seed in seeds]
        if not sides or (self.metric == "auroc" and prediction.per_image is None):  # the AUROC is not defined
            return
        without = without_each_group(self.metric, prediction)
        for side in sides:
            total, count = self._sums.get((*key, side), (np.zeros_like(without), 0))
            self._sums[(*key, side)] = total + without, count + 1

    def over_images(self, runs: Runs, held: DomainSet, seeds: Sequence[int]) -> OverImages | None:
        """Returns how the mean over these seeds varies; None without predictions."""
        if held not in self.images:
            return None
        images, mean = self.images[held], self.mean(runs, held, seeds)
        effective = effective_number(images.sizes) if mean is None else _effective(images, mean)
        variance = None if mean is None or effective < 2 else jackknife_variance(mean)
        return OverImages(variance, effective, None if images.groups is None else len(images.sizes))

    def mean(self, runs: Runs, held: DomainSet, seeds: Sequence[int]) -> np.ndarray | None:
        """The mean over these seeds, [groups]; None if a prediction is missing."""
        total, count = self._sums.get((runs.rule, runs.method, held, tuple(seeds)), (None, 0))
        return total / count if total is not None and count == len(seeds) else None


def compared(pair: Pair, without: WithoutGroups, no_verdict: str = "") -> Comparison | None:
    """Returns the difference first − second with its errors and plain p values; None if a side has no complete seed.

    `no_verdict`: why it has no p in any case; "": it may have one.
    """
    held_out, seeds, common = pair.first.held_out, pair.seeds, pair.common
    if not all(seeds):
        return None
    sets, paired, folds = len(held_out), len(common) >= PAIRED_SEEDS, pair.first.folds
    if not sets:
        return None
    values = [
        np.array([[runs.values[held, seed] for seed in side] for held in held_out])  # [D,S]
        for runs, side in zip(pair, seeds, strict=True)
    ]
    by_set = values[0].mean(1) - values[1].mean(1)  # [D]
    difference = float(by_set.mean())
    fewest = min((len(side) for runs, side in zip(pair, seeds, strict=True) if not runs.deterministic), default=None)

    def v_seeds(paired: bool) -> Term:
        if paired:
            return over_paired_seeds(values[0] - values[1])
        first, second = (v[:, :0] if runs.deterministic else v for runs, v in zip(pair, values, strict=True))
        return over_seeds(first, second, folds)

    images, lacking = _over_images(pair, seeds, without)
    of_seeds = None if fewest == 1 else v_seeds(paired)
    reasons = [no_verdict] if no_verdict else []
    if fewest is not None and fewest < SEEDS:
        reasons.append(f"it needs {SEEDS} seeds, and {fewest} {'is' if fewest == 1 else 'are'} complete")
    if lacking:
        reasons.append(lacking)

    on_these = on_these_otherwise = share = None
    if of_seeds is not None and images is not None:
        on_these = estimate_here(difference, of_seeds, images, sets=sets, paired=paired)
        if total := of_seeds.variance + images.variance:
            share = of_seeds.variance / total
    # one seed more or less changes the regime, and with it the error: reports show both errors there
    at_the_border = fewest in (PAIRED_SEEDS - 1, PAIRED_SEEDS)
    if images is not None and at_the_border and len(common) == len(seeds[0]) == len(seeds[1]):
        on_these_otherwise = estimate_here(difference, v_seeds(not paired), images, sets=sets, paired=not paired)
    on_others = over_sites(by_set, folds)
    p_here = on_these.p() if on_these and not reasons else None
    if on_these and p_here is None and not reasons:
        reasons.append("nothing varies, so there is no error to compare with")
    p_elsewhere = None
    if p_here is not None and on_others is not None and sets >= FEWEST_SETS and on_others.error > 0:
        p_elsewhere = on_others.p()

    notes = [f"no verdict: {reason}" for reason in reasons]
    if not reasons and sets == FEWEST_SETS - 1:
        notes.append(f"new domains: two {sets_noun(held_out)} are too few")
    notes += _about_groups([without.images[held] for held in held_out if held in without.images])
    return Comparison(
        selection=pair.first.rule,
        first=pair.first.method,
        second=pair.second.method,
        sets=sets,
        domains=sum(map(len, held_out)),
        seeds=fewest,
        paired=paired,
        difference=difference,
        error=on_these and on_these.error,
        freedom=_finite_freedom(on_these),
        share_seeds=share,
        share_images=None if share is None else 1 - share,
        freedom_seeds=_finite_freedom(of_seeds),
        freedom_images=_finite_freedom(images),
        other_error=on_these_otherwise and on_these_otherwise.error,
        other_freedom=_finite_freedom(on_these_otherwise),
        error_elsewhere=on_others and on_others.error,
        freedom_elsewhere=on_others and on_others.freedom if folds else None,
        p_here=None if p_here is None else PValue(p_here, None),
        p_elsewhere=None if p_elsewhere is None else PValue(p_elsewhere, None),
        note="; ".join(notes),
    )


def _finite_freedom(of: Term | Estimate | None) -> float | None:
    return of.freedom if of is not None and math.isfinite(of.freedom) else None


def _over_images(
    pair: Pair, seeds: tuple[Sequence[int], Sequence[int]], without: WithoutGroups
) -> tuple[Term | None, str]:
    """Returns V_I, or None and the reason why it cannot be estimated."""
    variances, numbers = list[float](), list[float]()
    for held in pair.first.held_out:
        first, second = (without.mean(runs, held, side) for runs, side in zip(pair, seeds, strict=True))
        if first is None or second is None:
            return None, "predictions are missing"
        images, difference = without.images[held], first - second
        groups = _effective(images, difference)
        if groups < 2:
            noun = "images" if images.groups is None else "groups"
            return None, f"a test domain has effectively {groups:.1f} {noun}, and it needs 2"
        variance = jackknife_variance(difference)
        if variance is None:
            return None, "the metric is not defined without one of the groups of test images"
        variances.append(variance)
        numbers.append(groups)
    return over_images(variances, numbers), ""


def _effective(images: HeldOutImages, without: np.ndarray) -> float:
    """Returns the effective number of groups of an estimate from values without each group."""
    # a metric that needs many images is jackknifed over blocks, which may be fewer than the groups
    return min(effective_number(images.sizes), len(without))


def _about_groups(sets: Sequence[HeldOutImages]) -> list[str]:
    notes = ["images assumed independent"] if any(images.groups is None for images in sets) else []
    few = min(sets, key=lambda images: effective_number(images.sizes), default=None)
    if few is not None and effective_number(few.sizes) < FEW_GROUPS:
        noun = "images" if few.groups is None else "groups"
        number = effective_number(few.sizes)
        notes.append(f"only {len(few.sizes)} {noun} in a test domain, effectively {number:.1f}")
    return notes


# What a table could have found

POWER = 0.8


def smallest(alpha: float, comparisons: int, freedom: float, error: float) -> float:
    """Returns (t_{1 − α/2M} + t_{0.8}) · error: the difference that Holm's first step finds with probability 0.8."""
    return float(stdtrit(freedom, 1 - alpha / (2 * comparisons)) + stdtrit(freedom, POWER)) * error


@dataclass(frozen=True)
class Family:
    """The comparisons of one family that have a p and an error: what they could have found, in the metric's unit."""

    rows: Sequence[Comparison]
    alpha: float
    count: int  # M, comparisons that Holm's correction counts

    @classmethod
    def of(cls, comparisons: Iterable[Comparison], alpha: float) -> Family | None:
        """Returns the family of comparisons under one selection rule; None if none of them could be tested."""
        counted = [row for row in comparisons if row.p_here is not None and row.p_here.holm is not None]
        tested = [row for row in counted if row.error]  # equal predictions have a p of 1, and no error
        return cls(tested, alpha, len(counted)) if tested else None

    @property
    def seeds(self) -> int | None:
        """The smallest number of complete seeds of the sides that vary; None: no side does."""
        return min((row.seeds for row in self.rows if row.seeds is not None), default=None)

    @property
    def sets(self) -> int:
        return self.rows[0].sets

    @property
    def images_limit(self) -> bool:
        """Whether the variance over test images is larger than that over seeds."""
        return median(row.share_images or 0.0 for row in self.rows) > 0.5

    def detectable_here(self, seeds: int | None = None) -> float:
        """Returns the smallest difference here, at the median error.

        With another number of seeds S' it is a forecast, with V_S·S/S' + V_I and f_S·(S' − 1)/(S − 1) degrees of
        freedom of the first part. From below ten seeds to above, the rows count as not paired.
        """
        terms = list[Term]()
        for row in self.rows:
            v = (row.error or 0.0) ** 2
            term = Term(v, row.freedom or 0.0)
            if seeds is not None:
                of_seeds = Term(0.0, 0.0)
                if row.seeds is not None and row.freedom_seeds is not None:
                    freedom = row.freedom_seeds * (seeds - 1) / (row.seeds - 1)
                    of_seeds = Term(v * (row.share_seeds or 0.0) * row.seeds / seeds, freedom)
                of_images = Term(v * (row.share_images or 0.0), row.freedom_images or 0.0)
                forecast = estimate_here(0.0, of_seeds, of_images, sets=row.sets, paired=row.paired)
                term = Term(forecast.error**2, forecast.freedom)
            terms.append(term)
        return self._smallest(terms)

    @property
    def detectable_if_pairing_changed(self) -> float | None:
        """The same in the other regime, paired by seed or not; None unless there are 9 or 10 seeds."""
        terms = [Term(r.other_error**2, r.other_freedom) for r in self.rows if r.other_error and r.other_freedom]
        return self._smallest(terms) if terms else None

    def elsewhere(self, comparisons: int | None = None) -> float | None:
        """Returns the smallest difference on new domains; None with fewer than three held-out sets.

        `comparisons`: as if so many were declared.
        """
        if self.sets < FEWEST_SETS:
            return None
        others = [row.on_others for row in self.rows if row.on_others is not None]
        if not others:
            return None
        return median(smallest(self.alpha, comparisons or self.count, of.freedom, of.error) for of in others)

    def _smallest(self, terms: Sequence[Term]) -> float:
        freedom, variance = median(f for _, f in terms), median(v for v, _ in terms)
        return smallest(self.alpha, self.count, freedom, variance**0.5)


def more_seeds(seeds: int) -> int:
    """Returns the number of seeds to forecast: 10, where rows are paired, or twice as many."""
    return PAIRED_SEEDS if seeds < PAIRED_SEEDS else 2 * seeds
