"""A stratified part of some rows that divides no group."""

from __future__ import annotations

import numpy as np
import torch

from xdm_ft.randomness import Stream, bits


def validation_part(
    rows: np.ndarray, stratum: np.ndarray, group: np.ndarray | None, fraction: float, seed: int
) -> np.ndarray:
    """About `fraction` of `rows` (int64 [n], sorted), drawn from `seed`, no group divided; sorted.

    Each stratum gives round(fraction · n) of its n rows, at least 1 where n ≥ 2 and never all of them. With groups that
    is the aim: they are taken in random order where that brings their strata nearer to it, and never a stratum's last.
    `stratum` and `group` are int64 [n], a non-negative number for every row.
    """
    size = np.bincount(stratum)
    aim = np.floor(fraction * size + 0.5).astype(np.int64)
    aim = np.clip(aim, np.minimum(size - 1, 1), size - 1).clip(min=0)
    if group is not None:
        return rows[np.isin(group, _groups_taken(group, stratum, size, aim, seed))]
    order = np.lexsort((_draws(seed, rows), stratum))  # by stratum, random within
    first = np.cumsum(size) - size
    rank = np.arange(len(rows)) - first[stratum[order]]
    return np.sort(rows[order[rank < aim[stratum[order]]]])


def _groups_taken(group: np.ndarray, stratum: np.ndarray, size: np.ndarray, aim: np.ndarray, seed: int) -> np.ndarray:
    """The groups that make up the part. One is taken where that lowers Σ |rows taken − aim| over the strata."""
    ids, of_row = np.unique(group, return_inverse=True)
    cell, count = np.unique(of_row * len(size) + stratum, return_counts=True)  # (group, stratum) pairs that occur
    bounds = np.searchsorted(cell // len(size), np.arange(len(ids) + 1)).tolist()
    # plain integers: half a million groups take half a second, as NumPy scalars ten
    strata, counts = (cell % len(size)).tolist(), count.tolist()
    missing, spare = aim.tolist(), (size - 1).tolist()
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
    """A random number per row or group that depends on nothing else, so that no part changes with its company."""
    return bits(seed, 0, Stream.SPLIT, torch.from_numpy(keys)).numpy()
