"""What to expect at a new site (hospital, region, camera, style), from the values at the held-out ones.

The prediction interval. Let x_d be the metric at held-out set d of D, a mean over S seeds, with mean m and standard
deviation s (ddof 1). It is assumed that the new site is one more draw from the distribution of the x_d. Then a model's
value there differs from m with variance s²(1 + 1/D) + (1 − 1/S)w²: s² holds the variation of sites and 1/S of that of
seeds, whose variance is w² (the mean over the sets), and the new site is seen by one model. The interval is
m ± t(D − 1) times the root (Student's prediction interval; for S = 1 exactly m ± t·s·√(1 + 1/D)). s² also holds the
sampling error of the test images, so the interval is rather too wide. Two sets would give t(1) = 12.7 and one gives
none, so D ≥ 3 is needed; an official split is one held-out set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from xdm_ft.evaluation.comparison import ALPHA
from xdm_ft.evaluation.runs import Held, Runs

FEWEST_SETS = 3  # held-out sets that a prediction interval needs
Bounds = tuple[float, float]


class NewSite(NamedTuple):
    """The distribution of a metric at a new site: mean + spread · t(freedom)."""

    mean: float
    spread: float
    freedom: int

    def half_width(self, error: float = 0.0, freedom: float = math.inf) -> float:
        """Half of the 95% interval of a value that is measured with this standard error and its degrees of freedom.

        The variances add. Welch and Satterthwaite's degrees of freedom of the sum are not fewer than the fewer of both.
        """
        fewer = min(self.freedom, freedom)
        return float(stdtrit(fewer, 1 - ALPHA / 2)) * math.hypot(self.spread, error)


def new_site(by_set: Sequence[np.ndarray]) -> NewSite | None:
    """Returns the distribution at a new site from the values [S] of each held-out set; None for fewer than three."""
    if (sets := len(by_set)) < FEWEST_SETS:
        return None
    means = np.array([values.mean() for values in by_set])
    of_seeds = [values.var(ddof=1) * (1 - 1 / len(values)) for values in by_set if len(values) > 1]
    variance = means.var(ddof=1) * (1 + 1 / sets) + sum(of_seeds) / sets
    return NewSite(float(means.mean()), float(variance**0.5), sets - 1)


def within_bounds(metric: str, low: float, high: float) -> Bounds:
    """Cuts an interval off where the metric can not be."""
    return max(low, 0.0), high if metric == "nll" else min(high, 1.0)


def seeds_by_set(runs: Runs) -> dict[Held, list[int]]:
    """{held-out set: the seeds whose values count}: those that have every set; if there is none, all that it has."""
    seeds, values = runs.complete_seeds, runs.values
    return {held: [s for s in seeds or runs.planned_seeds if (held, s) in values] for held in runs.held_out}
