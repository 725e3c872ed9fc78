"""Draws a stratified part of some rows. Rows of one group stay together."""

from __future__ import annotations

import numpy as np
import torch

from xdm_ft.runtime.randomness import Stream, bits


def validation_part(
    rows: np.ndarray, stratum: np.ndarray, group: np.ndarray | None, fraction: float, seed: int
) -> np.ndarray:
    """Returns about `fraction` of `rows` (int64 [n], sorted), drawn with `seed`, sorted, without dividing a group.

    `stratum` and `group` are int64 [n], a non-negative number for every row. Each stratum of m rows has a quota of
    round(fraction · m) rows, at least 1 if m ≥ 2 and never all of them. Without groups every stratum gives its quota.
    With groups quotas are approached: in random order, a group is taken if that brings its strata nearer to their
    quotas and leaves each of them a row.
    """
    size = np.bincount(stratum)
    quota = np.floor(fraction * size + 0.5).astype(np.int64)
    quota = np.clip(quota, np.minimum(size - 1, 1), size - 1).clip(min=0)  # clip(min=0): numbers without rows
    if group is not None:
        return rows[np.isin(group, _groups_taken(group, stratum, size, quota, seed))]
    order = np.argsort(_draws(seed, rows))  # no two rows have the same draw, so that the order is unique
    # by stratum, random within; small integers are sorted several times as fast
    order = order[np.argsort(stratum[order].astype(np.min_scalar_type(len(size))), kind="stable")]
    first = np.cumsum(size) - size
    rank = np.arange(len(rows)) - first[stratum[order]]
    return np.sort(rows[order[rank < quota[stratum[order]]]])


def _groups_taken(group: np.ndarray, stratum: np.ndarray, size: np.ndarray, quota: np.ndarray, seed: int) -> np.ndarray:
    """Returns the groups of the part. A group is taken if that lowers Σ |rows taken − quota| over the strata."""
    ids, of_row = np.unique(group, return_inverse=True)
    cell, count = np.unique(of_row * len(size) + stratum, return_counts=True)  # (group, stratum) pairs that occur
    bounds = np.searchsorted(cell // len(size), np.arange(len(ids) + 1)).tolist()
    # lists of integers: half a million groups take half a second; with NumPy scalars, ten
    strata, counts = (cell % len(size)).tolist(), count.tolist()
    missing, spare = quota.tolist(), (size - 1).tolist()
    taken = []
    for g in np.argsort(_draws(seed, ids), kind="stable").tolist():
        cells = range(bounds[g], bounds[g + 1])
        gain = sum(abs(missing[strata[k]]) - abs(missing[strata[k]] - counts[k]) for k in cells)
        if gain > 0 and all(counts[k] <= spare[strata[k]] for k in cells):
            taken.append(g)
            for k in cells:
                missing[strata[k]] -= counts[k]
                spare[strata[k]] -= counts[k]
    return ids[taken]


def _draws(seed: int, keys: np.ndarray) -> np.ndarray:
    """Returns a random number per row or group, which depends on `seed` and its own number only: not on other rows."""
    return bits(seed, 0, Stream.SPLIT, torch.from_numpy(keys)).numpy()
