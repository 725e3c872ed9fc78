"""The error of a method's own mean, for descriptions. Verdicts compare two methods: `evaluation.comparison`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import binomtest

from xdm_ft.evaluation.comparison import ALPHA, Estimate, HeldOut, Interval
from xdm_ft.evaluation.new_site import within_bounds


def over_seeds_and_groups(sets: Sequence[HeldOut]) -> Estimate | None:
    """The mean over seeds and D held-out sets, with SE² = V_groups + V_seeds, as `comparison` has it for differences.

    `by_seed` of each set are values of the metric, of the same seeds. V_groups = Σ_d V_d / D². With one seed the
    variance is that over images alone. The degrees of freedom are Welch and Satterthwaite's, (Σ V)² / Σ V²/df; the
    smaller number that verdicts use would make this description as wide as 0% to 100% with two seeds. Returns None if
    the variance over images can not be estimated.
    """
    terms = [(one.variance / len(sets) ** 2, one.groups - 1) for one in sets if one.variance is not None]
    if not sets or len(terms) < len(sets) or any(freedom < 1 for _, freedom in terms):
        return None
    seeds = np.mean([one.by_seed for one in sets], axis=0)  # [S]
    if len(seeds) > 1:
        terms.append((float(seeds.var(ddof=1)) / len(seeds), len(seeds) - 1))
    total = math.fsum(variance for variance, _ in terms)
    if total == 0:
        return Estimate(float(seeds.mean()), 0.0, min(freedom for _, freedom in terms))
    freedom = total**2 / math.fsum(variance**2 / freedom for variance, freedom in terms)
    return Estimate(float(seeds.mean()), total**0.5, freedom)


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
