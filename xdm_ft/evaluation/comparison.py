"""Whether one method differs from the reference: intervals, p values and verdicts.

Two questions, each answered by a t test. Would it hold on *other domains*? The differences on the held-out domains
vary. Would it hold with *other seeds and images*? Training differs by seed, and the test images are a sample of groups.
With several held-out domains the larger p counts. With one held-out set (an official split is one, however many domains
it holds) only the second question can be asked, and the verdict is about that set.

A verdict needs three seeds, however many domains are held out: with fewer, the spread over seeds says next to nothing
(two seeds leave one degree of freedom, one seed none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit  # scipy.stats takes 50 times as long for one number

from xdm_ft.evaluation.jackknife import jackknife_variance
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER

ALPHA = 0.05  # of verdicts and intervals: 95%
SEEDS = 3  # the fewest that a verdict needs
NO_VERDICT = "no verdict"
EQUAL = "not distinguishable"


class Interval(NamedTuple):
    """95%, both ends in the unit of what it is around."""

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
        """Of a mean of 0, two-sided."""
        if self.error == 0:
            return float(self.value == 0)
        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error))


class HeldOut(NamedTuple):
    """What one held-out set says of method − reference."""

    by_seed: np.ndarray  # paired differences, float64 [S]
    variance: float | None  # of their mean, over groups of test images; None: not estimated
    groups: float  # effective number of groups


class Comparison(NamedTuple):
    """method − reference. `p` is None, and there is no verdict, where a source of variation is not estimated."""

    difference: float
    domains: Interval | None  # over held-out domains
    seeds_and_images: Interval | None
    p: float | None


class Verdict(NamedTuple):
    p: float | None  # of the row alone
    p_holm: float | None  # corrected for all rows
    verdict: str


def paired(
    own: np.ndarray,
    reference: np.ndarray,
    without: tuple[np.ndarray, np.ndarray] | None,
    groups: float,
) -> HeldOut:
    """One held-out set: the metric of each side's seeds, float64 [S], seed beside seed.

    A deterministic side is [1] and is compared with every seed of the other. `without`: the same metrics without each
    group of test images, [S,groups] or [1,groups] (`jackknife.without_each_group`); None where they are unknown.
    """
    variance = None
    if without is not None and groups >= 2:  # less than two leave no degree of freedom
        variance = jackknife_variance(without[0].mean(0) - without[1].mean(0))
    return HeldOut(own - reference, variance, groups)


def compare(sets: Sequence[HeldOut]) -> Comparison:
    """The mean difference over held-out sets and seeds. All sets have the same seeds in the same order."""
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
    """SE² = V_groups + V_seeds, both of the mean over seeds and D held-out sets; None where one is not estimated.

    V_groups = Σ_d V_d / D², for sets that share no group; V_seeds = s²/S of the seeds' means over the sets, which is
    their jackknife. Variation of single images from seed to seed is in both: the sum errs to the careful side. Degrees
    of freedom are those of the smaller source, min(seeds, effective groups) − 1, with the set of the fewest effective
    groups: Welch and Satterthwaite's number for a sum of variances is never below that of its smallest part.
    """
    seeds = _over(np.mean([one.by_seed for one in sets], axis=0))  # [S]
    variances = [one.variance for one in sets if one.variance is not None]
    if seeds is None or len(variances) < len(sets):
        return None
    error = (seeds.error**2 + sum(variances) / len(sets) ** 2) ** 0.5
    return Estimate(seeds.value, error, min(seeds.freedom, min(one.groups for one in sets) - 1))


def _over(values: Sequence[float] | np.ndarray) -> Estimate | None:
    """The mean of independent values, its error s/√n with ddof 1; None for fewer than two."""
    n = len(values)
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / n**0.5), n - 1) if n > 1 else None


def holm(p: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down p values: with those below 0.05 rejected, any false one has a chance of at most 5%.

    Whatever the tests have in common: here all rows share the reference's models and the test images.
    """
    adjusted, largest = [0.0] * len(p), 0.0
    for place, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        adjusted[i] = largest
    return adjusted


def verdicts(metric: str, rows: Mapping[str, Comparison], where: str = "") -> dict[str, Verdict]:
    """The verdict of each row under one selection rule; `where`: words that limit it ("on this domain").

    A row without a p is no test: it can get no verdict, true or false, and whether it has a p depends on seeds and
    predictions, not on its difference. So it does not count in Holm's correction.
    """
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
