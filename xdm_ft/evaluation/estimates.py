"""Variances, errors and p values of means, and of differences between means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from xdm_ft.core import ALPHA, Interval


class Estimate(NamedTuple):
    """A mean whose error follows a t distribution."""

    value: float
    error: float  # standard error
    freedom: float  # degrees of freedom; a fraction where groups are unequal

    def interval(self, level: float = 1 - ALPHA) -> Interval:
        half = float(stdtrit(self.freedom, (1 + level) / 2)) * self.error
        return Interval(self.value - half, self.value + half)

    def p(self) -> float | None:
        """Two-sided p value of the hypothesis that the mean is 0. Without an error: 1 for a mean of 0, else None."""
        if self.error == 0:  # rows that cannot vary; t would be 0/0
            return 1.0 if self.value == 0 else None
        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error))


class Term(NamedTuple):
    """The variance of a mean, and its degrees of freedom."""

    variance: float
    freedom: float


def welch(terms: Sequence[Term]) -> Term:
    """Returns the sum with Welch and Satterthwaite's degrees of freedom, V² / Σ V_i²/f_i."""
    return _sum(terms, 2)


def harmonic(terms: Sequence[Term]) -> Term:
    """Returns the sum with fewer degrees of freedom than `welch`, V / Σ V_i/f_i."""
    return _sum(terms, 1)


def _sum(terms: Sequence[Term], power: int) -> Term:
    varying = [term for term in terms if term.variance > 0]
    total = math.fsum(term.variance for term in varying)
    return Term(total, total**power / math.fsum(v**power / f for v, f in varying) if varying else math.inf)


def over_images(variances: Sequence[float], groups: Sequence[float]) -> Term:
    """Returns V_I = Σ_d V_d/D² from the variance V_d on each of D held-out sets and its effective number of groups.

    The sets share no image. Each number of groups is at least 2.
    """
    sets = len(variances)
    return welch([Term(v / sets**2, g - 1) for v, g in zip(variances, groups, strict=True)])


def _variance(values: np.ndarray) -> np.ndarray:
    """Returns the variance over the last axis, ddof 1; exactly 0 where all values are equal.

    The mean of equal values is rounded, and would leave a variance of 1e-34, which counts as one over seeds.
    """
    return (values - values[..., :1]).var(-1, ddof=1)


def over_seeds(first: np.ndarray, second: np.ndarray, folds: Sequence[Sequence[int]] | None = None) -> Term:
    """Returns V_S of the difference of two methods that are not paired by seed.

    V_S = max(Σ_d (a_md + a_rd), b_m + b_r), a_md = s²_md/(S_m D²), b_m = s²(means over sets)_m/S_m. Were seeds
    independent between sets, Σ a would be right, with more degrees of freedom; what they have in common on all sets
    makes b larger, and the part that exceeds Σ a has the degrees of freedom of b. The N_f sets of a fold share models:
    a_mf = s²_mf (N_f/D)²/S_m with the means over the fold takes the place of its a_md.

    Args:
        first: the metric by held-out set and seed, float64 [D,S_m] with S_m ≥ 2; [D,0] for a deterministic method.
        second: the same of the reference, [D,S_r].
        folds: positions of the sets that share models; None: each set has models of its own.
    """
    within, between = list[Term](), list[Term]()
    for values in (first, second):
        sets, seeds = values.shape
        if seeds:
            of_models = values if folds is None else np.array([values[fold].mean(0) for fold in folds])
            sizes = [1] * sets if folds is None else [len(fold) for fold in folds]
            variances = zip(_variance(of_models).tolist(), sizes, strict=True)
            within += [Term(v * size**2 / (seeds * sets**2), seeds - 1) for v, size in variances]
            between.append(Term(float(_variance(values.mean(0))) / seeds, seeds - 1))
    a, b = welch(within), welch(between)
    return harmonic([a, Term(b.variance - a.variance, b.freedom)])


def over_paired_seeds(differences: np.ndarray) -> Term:
    """Returns V_S of the mean of paired differences [D,S]: the variance of the seeds' means over the sets, over S."""
    seeds = differences.shape[1]
    variance = float(_variance(differences.mean(0))) / seeds
    return Term(variance, seeds - 1 if variance > 0 else math.inf)


def estimate_here(difference: float, seeds: Term, images: Term, *, sets: int, paired: bool) -> Estimate:
    """Returns the estimate with V = V_S + V_I from D held-out sets.

    It has at most the f_S degrees of freedom of V_S; with one set and seeds that are not paired f_S·√(V/V_S). Without
    this limit, seeds that agree by chance leave V ≈ V_I and its many degrees of freedom: among 13 methods that are
    compared with a deterministic one, 9% of tables with three seeds had a false verdict, and 12% where seeds correlate
    by 0.5 between four domains.
    """
    both = harmonic([seeds, images])
    limit = math.inf
    if seeds.variance > 0:
        slack = (both.variance / seeds.variance) ** 0.5 if sets == 1 and not paired else 1.0
        limit = seeds.freedom * slack
    return Estimate(difference, both.variance**0.5, min(both.freedom, limit))


def over_sets(differences: Sequence[float] | np.ndarray) -> Estimate | None:
    """Returns the mean of the differences on D held-out sets, with error s/√D (ddof 1); None for one set.

    The error is 0 where they are equal but for rounding: 0.61 − 0.60 and 0.71 − 0.70 differ in the last bits.
    """
    n = len(differences)
    if n < 2:
        return None
    spread = float(np.std(differences, ddof=1))
    equal = spread <= 1e-9 * float(np.abs(differences).max())
    return Estimate(float(np.mean(differences)), 0.0 if equal else spread / n**0.5, n - 1)


def over_sites(differences: np.ndarray, folds: Sequence[Sequence[int]] | None) -> Estimate | None:
    """Returns `over_sets` of the differences at D sites, or of their means over folds, whichever has the larger p.

    Sites of a fold share models, so what these have in common counts once per fold: with 30 sites in 3 folds and a
    correlation of 0.3 within folds, D − 1 degrees of freedom alone find a difference in 32% of tables without one.
    `folds`: positions of the sites of each; None: each site has models of its own.
    """
    of_sites = over_sets(differences)
    if of_sites is None or folds is None:
        return of_sites
    of_folds = over_sets([differences[fold].mean() for fold in folds])
    if of_folds is None:  # all sites share models, so nothing shows what these have in common
        return None
    return max(of_sites, of_folds, key=lambda estimate: estimate.p() or 0.0)


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


class Spread(NamedTuple):
    """Mean and spread of one value per seed."""

    mean: float | None  # None without a value
    std: float | None  # ddof 1; None for fewer than two
    stderr: float | None  # std / √n
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        stderr = None if std is None else float(std / np.sqrt(len(values)))
        return cls(float(np.mean(values)) if values else None, std, stderr, len(values))


def mean_of(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are defined; None if there is none."""
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


FEWEST_SETS = 3  # held-out sets of a verdict on new domains
