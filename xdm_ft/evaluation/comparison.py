"""Whether one method differs from its reference: intervals, p values and verdicts.

Two t tests answer two questions. Would the difference hold on *other domains*? This test uses the spread over held-out
domains. Would it hold with *other seeds and images*? This test uses the spread over training seeds and over groups of
test images. With several held-out domains the larger p counts. With one held-out set (an official split is one set,
however many domains it has) only the second test is possible, and the verdict is about that set.

A verdict needs three seeds, however many domains are held out: two seeds leave one degree of freedom for the spread
over seeds, one seed leaves none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.special import stdtr, stdtrit  # scipy.stats takes 50 times as long for one number

from xdm_ft.evaluation.jackknife import jackknife_variance
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER

K = TypeVar("K", bound=Hashable)
ALPHA = 0.05  # significance level of verdicts; intervals are 95%
SEEDS = 3  # smallest number of seeds that gives a verdict
NO_VERDICT = "no verdict"
EQUAL = "not distinguishable"


class Interval(NamedTuple):
    """The two ends of a 95% interval, in the unit of the estimate."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean whose error follows a t distribution."""

    value: float
    error: float  # standard error
    freedom: float  # degrees of freedom; a fraction where groups are unequal

    def interval(self) -> Interval:
        half = float(stdtrit(self.freedom, 1 - ALPHA / 2)) * self.error
        return Interval(self.value - half, self.value + half)

    def p(self) -> float:
        """Two-sided p value of the hypothesis that the mean is 0."""
        if self.error == 0:  # deterministic methods can agree exactly; t would be 0/0
            return float(self.value == 0)
        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error))


class HeldOut(NamedTuple):
    """The differences method − reference on one held-out set."""

    by_seed: np.ndarray  # paired differences, float64 [S]
    variance: float | None  # of their mean, over groups of test images; None if it can not be estimated
    groups: float  # effective number of groups


class Comparison(NamedTuple):
    """The difference method − reference. `p` is None, and there is no verdict, if a variance can not be estimated."""

    difference: float
    domains: Interval | None  # over held-out domains
    seeds_and_images: Interval | None  # over seeds and groups of test images
    p: float | None  # the larger p of both tests


class Verdict(NamedTuple):
    p: float | None  # of this row alone
    p_holm: float | None  # corrected for all comparisons of the table
    verdict: str  # "better", "worse", `EQUAL` or `NO_VERDICT`


def paired(
    own: np.ndarray,
    reference: np.ndarray,
    without: tuple[np.ndarray, np.ndarray] | None,
    groups: float,
) -> HeldOut:
    """Returns the paired differences of two methods on one held-out set.

    Args:
        own: the method's metric by seed, float64 [S]; [1] if it is deterministic: it is compared with every seed.
        reference: the reference's metric, in the same order of seeds; [1] if it is deterministic.
        without: both metrics without each group of test images in turn (`jackknife.without_each_group`), the mean over
            their seeds, [groups]; None if they are unknown.
        groups: effective number of groups of test images.
    """
    variance = None
    if without is not None and groups >= 2:  # fewer than two leave no degree of freedom
        variance = jackknife_variance(without[0] - without[1])
    return HeldOut(own - reference, variance, groups)


def compare(sets: Sequence[HeldOut]) -> Comparison:
    """Returns the mean difference over held-out sets and seeds. All sets have the same seeds in the same order."""
    images = over_seeds_and_images(sets)
    domains = _over([float(one.by_seed.mean()) for one in sets])
    known = [estimate for estimate in (domains, images) if estimate is not None]
    tested = images is not None and len(sets[0].by_seed) >= SEEDS
    return Comparison(
        difference=float(np.mean([one.by_seed for one in sets])),
        domains=domains.interval() if domains else None,
        seeds_and_images=images.interval() if images else None,
        p=max(estimate.p() for estimate in known) if tested else None,
    )


def over_seeds_and_images(sets: Sequence[HeldOut]) -> Estimate | None:
    """The mean over seeds and D held-out sets, with SE² = V_groups + V_seeds; None if one of the two is unknown.

    V_groups = Σ_d V_d / D² is the variance over groups of test images; the sets share no group. V_seeds = s²/S is the
    variance over seeds, s² that of the seeds' means over the sets; it equals the jackknife's. Both terms contain the
    variation of single images from seed to seed, so the sum is rather too large. Degrees of freedom: min(seeds,
    effective groups of the set that has the fewest) − 1. This is conservative, since Welch and Satterthwaite's number
    for a sum of variances is never smaller than that of the term with the fewest.
    """
    seeds = _over(np.mean([one.by_seed for one in sets], axis=0))  # [S]
    variances = [one.variance for one in sets if one.variance is not None]
    if seeds is None or len(variances) < len(sets):
        return None
    error = (seeds.error**2 + sum(variances) / len(sets) ** 2) ** 0.5
    return Estimate(seeds.value, error, min(seeds.freedom, min(one.groups for one in sets) - 1))


def _over(values: Sequence[float] | np.ndarray) -> Estimate | None:
    """The mean of n independent values with standard error s/√n (ddof 1); None for fewer than two values."""
    n = len(values)
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / n**0.5), n - 1) if n > 1 else None


def holm(p: Sequence[float]) -> list[float]:
    """Returns Holm's (1979) step-down p values, in the order of `p`.

    If every hypothesis with a value below 0.05 is rejected, the probability of any false rejection is at most 5%. This
    holds for dependent tests too; here all rows share the reference's models and the test images.
    """
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        # the smallest p is multiplied by n, the next by n − 1, …; a later value is never below an earlier one
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def verdicts(metric: str, rows: Mapping[K, Comparison], where: str = "") -> dict[K, Verdict]:
    """Returns the verdict of each comparison under one selection rule.

    `where` is appended to "better" and "worse", for example "on this domain".
    """
    # A row without p is no test and does not count in Holm's correction. This selects no rows by their difference:
    # whether a row has a p depends on its seeds and predictions alone.
    tested = {name: row.p for name, row in rows.items() if row.p is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    found = {}
    for name, row in rows.items():
        p = corrected.get(name)
        if p is None:
            words = NO_VERDICT
        elif p >= ALPHA:
            words = EQUAL
        else:
            above = (row.difference > 0) == HIGHER_IS_BETTER[metric]
            words = f"{'better' if above else 'worse'} {where}".strip()
        found[name] = Verdict(row.p, p, words)
    return found
