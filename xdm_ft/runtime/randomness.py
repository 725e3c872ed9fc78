"""Random numbers as a function, not a state: uniform(seed, step, stream, index).

A counter-based hash in int64 tensor arithmetic: splitmix64's finaliser (Steele, Lea & Flood 2014), once per key.
The same arguments give the same number for one head or a batch of heads (`torch.func.vmap`), on CPU or GPU, in one
process or in many. To resume, no state of a generator needs to be saved.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import cache

import numpy as np
import torch
from torch import Tensor


class Stream(IntEnum):
    """One number per use of randomness, so that no two uses draw the same numbers. Results depend on these numbers."""

    INIT = 0
    BATCH = 1
    PERMUTATION = 2
    PARTNERS = 3
    LAMBDA = 4
    DISCARD = 5
    SPLIT = 6
    DOMAIN_INIT = 7
    BLOCKS = 8
    STYLE = 9
    ENCODER = 10
    TARGET_DOMAIN = 11
    STYLE_PARTNERS = 20
    STYLE_LAMBDA = 21
    STYLE_NOISE = 22
    INPUT_CHOICE = 23
    INPUT_PARTNERS = 24
    INPUT_LAMBDA = 25
    INPUT_BOX = 26
    DOMAIN_ORDER = 27
    BATCH_CLASS = 28
    AUGMENTATION = 29
    SEARCH = 30
    VIEW_IMAGE = 40
    VIEW = 41
    TEMPERATURE = 42
    TRAINING_FEATURES = 43
    IMAGE_CHANGE = 44
    FOLDS = 45
    ANALYSIS = 50
    HALVES = 51
    MMD_SAMPLES = 52
    REMOVAL = 53
    SHOWN = 54
    MAP_INIT = 55
    MAP_BATCH = 56
    ANALYSIS_ORDER = 57
    OWN = 1000  # of a method of your own; OWN + 1, OWN + 2, … for further uses


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64's increment, 2⁶⁴ divided by the golden ratio, and the two multipliers of its finaliser
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically, with copies of the sign bit; the mask removes the copies
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def bits(seed: int | Tensor, step: int | Tensor, stream: int | Tensor, index: int | Tensor) -> Tensor:
    """Returns 64 random bits as int64, in the broadcast shape of the four keys (int64 tensors or ints)."""
    device = next((k.device for k in (seed, step, stream, index) if isinstance(k, Tensor)), None)
    x = torch.zeros((), dtype=torch.int64, device=device)
    for key in (seed, stream, step, index):
        x = (x ^ key) + _GOLDEN
        # int64 products wrap around modulo 2⁶⁴, as splitmix64 needs
        x = (x ^ _shift_right(x, 30)) * _MIX_1
        x = (x ^ _shift_right(x, 27)) * _MIX_2
        x = x ^ _shift_right(x, 31)
    return x


def uniform(seed: int | Tensor, step: int | Tensor, stream: int | Tensor, index: int | Tensor) -> Tensor:
    """Returns uniform float32 in [0, 1) with 24 random bits, in the broadcast shape of the four keys."""
    # the significand of a float32 has 24 bits: every draw is exact, and none is rounded up to 1
    return _shift_right(bits(seed, step, stream, index), 40).to(torch.float32) * (1.0 / (1 << 24))


def integers(
    seed: int | Tensor, step: int | Tensor, stream: int | Tensor, index: int | Tensor, high: int | Tensor
) -> Tensor:
    """Returns uniform int64 in [0, high): 63 bits modulo `high`, whose bias is below high / 2⁶³."""
    return _shift_right(bits(seed, step, stream, index), 1) % high


def normal(seed: int | Tensor, step: int | Tensor, stream: int | Tensor, index: Tensor) -> Tensor:
    """Returns standard normal float32, in the broadcast shape of the keys, from the draws 2·index and 2·index+1.

    The transform of Box and Muller: √(−2 ln(1 − u)) · cos(2πv) for independent uniform u, v.
    """
    # log1p(−u) is finite, as u < 1; log(u) would not be at u = 0
    radius = (-2 * torch.log1p(-uniform(seed, step, stream, 2 * index))).sqrt()
    return radius * torch.cos(2 * math.pi * uniform(seed, step, stream, 2 * index + 1))


BETA_KNOTS = 4096


def beta(u: Tensor, quantiles: Tensor) -> Tensor:
    """Returns Beta(α, α) draws, one for each uniform draw in `u`: its quantile function, linear between 4097 knots.

    `quantiles` are `beta_quantiles(α)`, on the device of `u`. They are exact, so the distribution function is off by
    less than 1/4096 (before float32 rounding).
    """
    # Rejection sampling, the usual way, needs a number of draws that depends on their values. Neither `vmap` over heads
    # nor draws with an index allow that.
    position = u * BETA_KNOTS
    below = position.long()  # 0…4095, as u < 1
    quantiles = quantiles.to(u.dtype)  # a method in another precision has cast them
    return torch.lerp(quantiles[below], quantiles[below + 1], position - below)


@cache
def beta_quantiles(alpha: float, device: torch.device | None = None) -> Tensor:
    """Returns the quantiles of Beta(α, α) at 0, 1/4096, …, 1: float32 [4097]."""
    from scipy.special import betaincinv

    levels = torch.arange(BETA_KNOTS + 1, dtype=torch.float64) / BETA_KNOTS
    return torch.from_numpy(betaincinv(alpha, alpha, levels.numpy())).float().to(device)


def permutation(seed: int, step: int, stream: int, n: int, device: torch.device | None = None) -> Tensor:
    """Returns a permutation of 0…n−1 (int64 [n]) that depends on the three keys only: the order of n 64-bit draws."""
    return torch.argsort(bits(seed, step, stream, torch.arange(n, device=device)), stable=True)


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


def folds(stratum: np.ndarray, group: np.ndarray | None, number: int, seed: int = 0) -> np.ndarray | None:
    """Returns the fold of each row, int64 [n], 0…`number`−1; None if there are fewer rows, or groups, than folds.

    Each fold has the same share of every stratum, int64 [n]. A group is in one fold, and counts as its first row.
    """
    firsts, members = np.arange(len(stratum)), np.arange(len(stratum))
    if group is not None:
        _, firsts, members = np.unique(group, return_index=True, return_inverse=True)
    if len(firsts) < number:
        return None
    drawn = np.random.default_rng(seed).permutation(len(firsts))
    fold_of = np.empty(len(firsts), np.int64)
    fold_of[drawn[np.argsort(stratum[firsts][drawn], kind="stable")]] = np.arange(len(firsts)) % number
    return fold_of[members]


def sample(rows: np.ndarray, stratum: np.ndarray, most: int) -> np.ndarray:
    """Returns at most `most` of the rows, the same share of each stratum, drawn with a fixed seed; sorted.

    `stratum`: int64 [n], of the rows.
    """
    if len(rows) <= most:
        return np.sort(rows)
    drawn = np.random.default_rng(0).permutation(len(rows))
    drawn = drawn[np.argsort(stratum[drawn], kind="stable")]  # random within each stratum
    return np.sort(rows[drawn[np.arange(most) * len(drawn) // most]])


def _draws(seed: int, keys: np.ndarray) -> np.ndarray:
    """Returns a random number per row or group, which depends on `seed` and its own number only: not on other rows."""
    return bits(seed, 0, Stream.SPLIT, torch.from_numpy(keys)).numpy()
