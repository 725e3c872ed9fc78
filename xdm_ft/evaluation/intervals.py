"""What to expect at a new site (hospital, region, camera, style) from the values at the held-out ones, and the error of
a method's own mean.

Ranks. If the new site and the D held-out sets are exchangeable, each of the D + 1 has the worst value with probability
1/(D + 1), whatever the distribution of the values.

The prediction interval. Let x_d be the metric at held-out set d of D, a mean over S seeds, with mean m and standard
deviation s (ddof 1). It is assumed that the new site is one more draw from the distribution of the x_d. Then a model's
value there differs from m with variance s²(1 + 1/D) + (1 − 1/S)w²: s² holds the variation of sites and 1/S of that of
seeds, whose variance is w² (the mean over the sets), and the new site is seen by one model. The interval is
m ± t(D − 1) times the root (Student's prediction interval; for S = 1 exactly m ± t·s·√(1 + 1/D)). s² also holds the
sampling error of the test images, so the interval is rather too wide. Two sets would give t(1) = 12.7 and one gives
none, so D ≥ 3 is needed; an official split is one held-out set.

An accuracy near 1 has a short way up and a long way down, so it is transformed first: with x of n images right it is
logit((x + ½)/(n + 1)), which is finite for x = n too. The ends are transformed back. Other metrics stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from scipy.special import expit, stdtrit
from scipy.stats import binomtest

from xdm_ft.core import ALPHA, DomainSet, Interval
from xdm_ft.evaluation.estimates import FEWEST_SETS, Estimate, Term, over_sets, welch
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.runtime.errors import signed

LEVELS = (0.8, 1 - ALPHA)  # of the intervals that are printed
Bounds = tuple[float, float]
Scale = Literal["plain", "logit"]
Shares = TypeVar("Shares", float, np.ndarray)


class NewSite(NamedTuple):
    """The distribution of a metric at a new site: center + spread · t(freedom), on a scale."""

    center: float
    spread: float
    freedom: int
    scale: Scale = "plain"

    def between(
        self,
        metric: str,
        level: float = 1 - ALPHA,
        error: float = 0.0,
        freedom: float = math.inf,
        images: float = math.inf,
    ) -> Bounds:
        """Returns the prediction interval of the metric itself, as it would be measured on this many images.

        `error`: the standard error, on the scale, of what is measured at the site, with its degrees of freedom. The
        variances add. Welch and Satterthwaite's degrees of freedom of the sum are not fewer than the fewer of both.
        """
        half = float(stdtrit(min(self.freedom, freedom), (1 + level) / 2)) * math.hypot(self.spread, error)
        ends = self.center - half, self.center + half
        if self.scale == "logit":  # p = (x + ½)/(n + 1), so x/n = p + (p − ½)/n
            low, high = (float(p + (p - 0.5) / images) for p in expit(ends))
            return within_bounds(metric, low, high)
        return within_bounds(metric, *ends)


def smooth_share(share: Shares, images: float) -> Shares:
    """Returns (x + ½)/(n + 1) for a share x/n of n images: never 0 or 1."""
    return (share * images + 0.5) / (images + 1)


def new_site(
    by_set: Sequence[np.ndarray], scale: Scale = "plain", folds: Sequence[Sequence[int]] | None = None
) -> NewSite | None:
    """Returns the distribution at a new site from the values [S] of each held-out set, which are on `scale`.

    `folds`: positions of sets that share models; m then varies by 1/D s² or by what its folds show, whichever is more.
    Returns None for fewer than three sets.
    """
    if (sets := len(by_set)) < FEWEST_SETS:
        return None
    means = np.array([values.mean() for values in by_set])
    of_seeds = [values.var(ddof=1) * (1 - 1 / len(values)) for values in by_set if len(values) > 1]
    of_mean = means.var(ddof=1) / sets
    if folds is not None and (of_folds := over_sets([means[fold].mean() for fold in folds])) is not None:
        of_mean = max(of_mean, of_folds.error**2)
    variance = means.var(ddof=1) + of_mean + sum(of_seeds) / sets
    return NewSite(float(means.mean()), float(variance**0.5), sets - 1, scale)


def rank_words(
    metric: str, held_out: Sequence[DomainSet], values: Sequence[float], shown: Callable[[float], str]
) -> str:
    """Returns in words where a new site ranks among the held-out sets. `values`: of these; `shown` formats one."""
    higher, sets = HIGHER_IS_BETTER[metric], len(values)
    worse, worst = ("below", min(values)) if higher else ("above", max(values))
    if sets == 1:
        site = "site" if len(held_out[0]) == 1 else "set of sites"
        return f"a new {site} like the held-out one lies {worse} it ({shown(worst)}) with probability 1 in 2"
    return (
        f"a new site like these lies {worse} the worst of the {sets} held-out ones ({shown(worst)}) with probability "
        f"1 in {sets + 1}, between worst and best with {sets - 1} in {sets + 1}"
    )


def gain_words(metric: str, gain: float) -> str:
    amount = signed(gain, 3) if metric == "nll" else f"{signed(100 * gain)} points"
    return f"one more training domain brought {amount}{'' if HIGHER_IS_BETTER[metric] else ' (lower is better)'}"


def within_bounds(metric: str, low: float, high: float) -> Bounds:
    """Cuts an interval off where the metric cannot be."""
    return max(low, 0.0), high if metric == "nll" else min(high, 1.0)


class HeldOutValues(NamedTuple):
    """The values of one method on one held-out set."""

    by_seed: np.ndarray  # float64 [S]
    variance: float | None  # of their mean, over groups of test images; None if it cannot be estimated
    groups: float  # effective number of groups


def over_seeds_and_groups(sets: Sequence[HeldOutValues]) -> Estimate | None:
    """The mean over seeds and D held-out sets, with SE² = V_groups + V_seeds, as `verdicts` has it for differences.

    `by_seed` of each set are values of the metric, of the same seeds. V_groups = Σ_d V_d / D². With one seed the
    variance is that over images alone. The degrees of freedom are Welch and Satterthwaite's, (Σ V)² / Σ V²/df; the
    smaller number that verdicts use would make this description as wide as 0% to 100% with two seeds. Returns None if
    the variance over images cannot be estimated.
    """
    terms = [Term(held.variance / len(sets) ** 2, held.groups - 1) for held in sets if held.variance is not None]
    if not sets or len(terms) < len(sets) or any(term.freedom < 1 for term in terms):
        return None
    seeds = np.mean([held.by_seed for held in sets], axis=0)  # [S]
    if len(seeds) > 1:
        terms.append(Term(float(seeds.var(ddof=1)) / len(seeds), len(seeds) - 1))
    total = welch(terms)
    freedom = total.freedom if total.variance > 0 else min(term.freedom for term in terms)
    return Estimate(float(seeds.mean()), total.variance**0.5, freedom)


def interval_of(metric: str, estimate: Estimate | None, groups: float) -> Interval | None:
    """Returns the 95% interval of an estimate over this effective number of groups; None if its error is unknown.

    Images that are all right, or all wrong, do not vary, so the jackknife finds an error of 0, though another image can
    differ. Then an accuracy has Clopper and Pearson's (1934) interval, the groups being the trials; other metrics none.
    """
    if estimate is None:
        return None
    if estimate.error > 0:
        return Interval(*within_bounds(metric, *estimate.interval()))
    if metric != "accuracy" or estimate.value not in (0, 1):
        return None
    trials = max(1, math.floor(groups))
    exact = binomtest(int(estimate.value) * trials, trials).proportion_ci(1 - ALPHA)
    return Interval(float(exact.low), float(exact.high))


MAX_WIDTH = 0.5  # of the interval for one new site; a mean in a wider one would promise what nobody knows
