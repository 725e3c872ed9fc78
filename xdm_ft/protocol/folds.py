"""Folds of whole sites: which sites are held out together, so that N sites cost k trainings."""

from __future__ import annotations

import numpy as np
from scipy.special import nctdtr, stdtrit

from xdm_ft.core import ALPHA
from xdm_ft.runtime.randomness import Stream, permutation

STARTS = 8  # divisions that are improved; the best one stays
SHARE = 1 << 14
"""Images of a site count as whole parts in 2¹⁴ of all images of their class. Integers give the same folds on every
machine; sums of their squares stay below 2⁶³ up to a thousand folds and classes."""


def balanced_folds(counts: np.ndarray, folds: int) -> np.ndarray:
    """Returns the fold of each site, int64 [N] in 0…k−1, numbered in the order of their first sites.

    Each fold has ⌊N/k⌋ or ⌈N/k⌉ sites. Among such divisions images of every class, and all images, are spread evenly:
    Σ (k · share of the fold − 1)² over folds and classes, and over folds for all images, is small. It is reduced by
    exchanges of two sites until none helps, from several starts whose order is drawn with a fixed seed.

    counts: images of each class at each site, int64 [N,C].
    """
    sites = len(counts)
    columns = np.concatenate([counts, counts.sum(1, keepdims=True)], axis=1).astype(np.int64)
    columns = columns[:, columns.sum(0) > 0]
    shares = folds * ((columns * SHARE + columns.sum(0) // 2) // columns.sum(0))  # [N,C+1]
    # a fold of ⌊N/k⌋ sites has an empty place, so that all folds have equally many places
    shares = np.concatenate([shares, np.zeros((-sites % folds, shares.shape[1]), np.int64)])
    best, least = np.zeros(0, np.int64), None
    for start in range(STARTS):
        fold = _greedy(shares, sites, folds, start)
        sums = _exchange(shares, sites, fold, folds)
        excess = int(np.square(sums - shares.sum(0) // folds).sum())
        if least is None or excess < least:
            best, least = fold[:sites], excess
    _, first, number = np.unique(best, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _greedy(shares: np.ndarray, sites: int, folds: int, start: int) -> np.ndarray:
    """Gives each site, the largest first, to the fold with places that it makes the least uneven: int64 [N + empty].

    The empty places are in different folds.
    """
    free = np.full(folds, len(shares) // folds)
    empty = permutation(0, start, Stream.FOLDS, folds).numpy()[: len(shares) - sites]
    free[empty] -= 1
    fold, sums = np.concatenate([np.full(sites, -1), empty]), np.zeros((folds, shares.shape[1]), np.int64)
    order = permutation(1, start, Stream.FOLDS, sites).numpy()
    for site in order[np.argsort(-shares[order, -1], kind="stable")]:
        # Σ squares grows by 2 · sum · share + share², whose last term is the same for every fold
        growth = np.where(free > 0, sums @ shares[site], np.iinfo(np.int64).max)
        fold[site] = growth.argmin()
        free[fold[site]] -= 1
        sums[fold[site]] += shares[site]
    return fold


def _exchange(shares: np.ndarray, sites: int, fold: np.ndarray, folds: int) -> np.ndarray:
    """Exchanges two sites, or a site and an empty place, in `fold` as long as that makes the folds less uneven.

    Returns the sums of the folds' shares, int64 [k,C+1].
    """
    sums, improved, is_empty = np.zeros((folds, shares.shape[1]), np.int64), True, np.arange(len(shares)) >= sites
    np.add.at(sums, fold, shares)
    while improved:
        improved = False
        for site in range(sites):
            moved = shares - shares[site]  # [N,C+1], what the site's fold gains if each other takes its place
            change = 2 * (moved * (sums[fold[site]] - sums[fold] + moved)).sum(1)
            change[fold == fold[site]] = 0
            if np.any(is_empty & (fold == fold[site])):  # with two empty places it would be too small
                change[is_empty] = 0
            if change[other := int(change.argmin())] < 0:
                sums[fold[site]] += moved[other]
                sums[fold[other]] -= moved[other]
                fold[site], fold[other] = fold[other], fold[site]
                improved = True
    return sums


MANY, RECOMMENDED = 20, 10  # from so many sites on folds are worth it; so many of them
DIFFERENCE = 0.6  # in standard deviations of a difference between sites


def power(sites: int, folds: int) -> float:
    """Returns how often t over the means of equal folds finds `DIFFERENCE` on new domains, at level α (noncentral t).

    It holds where sites of a fold do not correlate. `over_sites`, which takes the larger p of folds and sites, finds
    it in 1 to 5% of runs less (`benchmarks/verdicts.py folds`).
    """
    end = stdtrit(folds - 1, 1 - ALPHA / 2)
    return 1 - float(nctdtr(folds - 1, DIFFERENCE * sites**0.5, end))


def recommend_folds(sites: int, folds: int | None) -> list[str]:
    """Returns a line if another number of folds is a better bargain of trainings and findings; else none."""
    if sites < MANY or (folds is not None and folds >= RECOMMENDED):
        return []
    at, of = (round(100 * power(sites, k)) for k in (RECOMMENDED, folds or sites))
    now = f"{folds} folds" if folds else "each domain alone"
    gain = f"finds a difference of {DIFFERENCE:g} SD (between domains) in about {at}% of runs, {now} in {of}%"
    return [f"protocol.folds: {RECOMMENDED} trains {RECOMMENDED} models per method and seed, and {gain}"]
