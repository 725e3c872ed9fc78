"""The kernels of `exceeds` and of `XDomainMix.augment` on a CPU, for float32.

An import compiles them, in about 3 seconds. numba could keep them on the disk, but it executes what it finds there
without a check: a damaged file gives wrong numbers or kills the process.
"""

from typing import Any

import numpy as np
import torch
from numba import boolean, float32, int32, int64, njit, void
from torch import Tensor

INFINITE, NAN = 0x7F800000, 0x7FFFFFFF  # `_order` of +∞, and of a NaN: NaNs lie above +∞ or below −∞
GUESSES = 24  # then bisection takes over; half of the rows need at most five


def exceeds(rows: Tensor, ranks: Tensor) -> Tensor:
    """`masks.exceeds_by_sorting` of rows [n,K] and the ranks of m blocks of them, [m]."""
    mask = torch.empty(rows.shape, dtype=torch.bool)
    _exceeds(rows.contiguous().numpy().view(np.int32), ranks.contiguous().numpy(), mask.numpy())
    return mask


def augment(z: Tensor, choices: tuple[Tensor, ...], selection: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`mixing.select_and_mix`; `selection` may hold ranks of m blocks of samples, [m]."""
    masks = tuple(torch.empty(z.shape, dtype=torch.bool) for _ in range(2))
    mixed = torch.empty(z.shape)
    _augment(*_arrays(z, *selection, *choices, *masks, mixed))
    return mixed, *masks


def mix(z: Tensor, choices: tuple[Tensor, ...], masks: tuple[Tensor, ...]) -> Tensor:
    """`mixing.mix_masked`."""
    mixed = torch.empty(z.shape)
    _mix(*[*_arrays(z, *choices, *masks, mixed), 0, len(z)])
    return mixed


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


@njit(nogil=True)
def _order(bits: Any) -> Any:
    """Maps a float's bits to an integer, in the order of the floats; −0 and +0 both become 0. It is its own inverse."""
    return np.int32(bits if bits >= 0 else -0x80000000 - bits)


@njit(nogil=True)
def _divider(row: Any, rank: int, guess: Any) -> Any:
    """Returns a τ such that score > τ is equivalent to score > x_(rank); all are `_order`s. NAN: the row has a NaN.

    m = K−1−rank scores lie above τ, or fewer if there are ties. Invariant: more than m scores lie above `low` and at
    most m above `high`. The search starts at `guess` and continues by false position on the excesses over m (Illinois
    rule: the excess of an end that stays is halved), then by bisection. It ends when exactly m scores lie above `high`,
    or when `low` and `high` are neighbours: `high` is then x_(rank), which is tied.
    """
    above, least, most, positive, not_negative = row.size - 1 - rank, row[0], row[0], np.int32(0), np.int32(0)
    for k in range(row.size):  # over indices: numba does not vectorise iteration over the row itself
        least, most = min(least, row[k]), max(most, row[k])
        positive += np.int32(row[k] > 0)
        not_negative += np.int32(row[k] >= 0)
    if most > INFINITE or least < -INFINITE:
        return np.int32(NAN)
    if positive <= above < not_negative:
        return np.int32(0)  # x_(rank) is 0: common, as features after ReLU are full of zeros
    low, high, low_excess, high_excess = np.int64(least) - 1, np.int64(most), float(row.size - above), float(-above)
    if positive > above:
        low, low_excess = np.int64(0), float(positive - above)
    else:
        high, high_excess = min(high, np.int64(-1)), float(not_negative - above)
    tau, guesses = np.int64(guess), 0
    while high - low > 1 and high_excess != 0:
        if guesses >= GUESSES or not low < tau < high:
            tau = (low + high) >> 1
        count, divider = np.int32(0), np.int32(tau)
        for k in range(row.size):
            count += np.int32(row[k] > divider)
        if count > above:
            low, low_excess, high_excess = tau, float(count - above), high_excess / 2
        else:
            high, high_excess, low_excess = tau, float(count - above), low_excess / 2
        # interpolate linearly between the floats, not between their orders
        start, end = np.int32(_order(low)).view(np.float32), np.int32(_order(high)).view(np.float32)
        share = np.float32(low_excess / (low_excess - high_excess))
        tau, guesses = np.int64(_order(np.float32(start + (end - start) * share).view(np.int32))), guesses + 1
    return np.int32(high)


@njit(nogil=True)
def _mask(bits: Any, rank: int, guess: Any, row: Any, mask: Any) -> Any:
    """Writes the mask of a row of scores, given as bits; `row` is scratch. Returns a guess for the next row."""
    for k in range(row.size):
        row[k] = _order(bits[k])
    tau = _divider(row, rank, guess)
    for k in range(row.size):
        mask[k] = row[k] > tau
    # thresholds of one head are alike, so that the search of the next row ends sooner
    return guess if tau == NAN else tau


@njit(void(int32[:, ::1], int64[::1], boolean[:, ::1]), nogil=True)
def _exceeds(bits: Any, ranks: Any, mask: Any) -> None:
    row, guess = np.empty(bits.shape[1], np.int32), np.int32(0)
    block = max(1, len(bits) // len(ranks))
    for n in range(len(bits)):
        guess = _mask(bits[n], ranks[n // block], guess, row, mask[n])


MATRIX, MASK, PLACES = float32[:, ::1], boolean[:, ::1], int64[::1]


@njit(void(MATRIX, MATRIX, PLACES, int64, int64, int64, MASK), nogil=True)
def _select(z: Any, slopes: Any, target: Any, rank: int, first: int, last: int, mask: Any) -> None:
    """Equations (1) to (3) of the samples from `first` to `last`: the scores stay in the cache."""
    scores, row, guess = np.empty(z.shape[1], np.float32), np.empty(z.shape[1], np.int32), np.int32(0)
    for n in range(first, last):
        slope, sample = slopes[target[n]], z[n]
        for k in range(row.size):
            scores[k] = slope[k] * sample[k]
        guess = _mask(scores.view(np.int32), rank, guess, row, mask[n])


@njit(void(MATRIX, PLACES, PLACES, MATRIX, boolean[::1], MASK, MASK, MATRIX, int64, int64), nogil=True)
def _mix(
    z: Any, same: Any, other: Any, lam: Any, keep: Any, of_class: Any, of_domain: Any, mixed: Any, first: int, last: int
) -> None:
    """Equations (4) to (7) of the samples from `first` to `last`, in the order of `mix`'s sum: no part is written."""
    # −0 for a part outside its masks, +0 for a part that is dropped: bit for bit as `decompose` and `mix`
    zero, nothing = np.float32(0), np.float32(-0.0)
    for n in range(first, last):
        i, j, lam_1, lam_2, kept = same[n], other[n], lam[n, 0], lam[n, 1], keep[n]
        rest_1, rest_2 = np.float32(1) - lam_1, np.float32(1) - lam_2
        for k in range(z.shape[1]):
            value, c, d = z[n, k], of_class[n, k], of_domain[n, k]
            csds, csdg = value if c & d else nothing, value if c & (not d) else nothing
            cgds, cgdg = value if (not c) & d else nothing, value if (not c) & (not d) else nothing
            csds_i = z[i, k] if of_class[i, k] & of_domain[i, k] else nothing
            cgds_j = z[j, k] if (not of_class[j, k]) & of_domain[j, k] else nothing
            specific = lam_1 * csds + rest_1 * csds_i if kept else zero
            mixed[n, k] = specific + (lam_2 * cgds + rest_2 * cgds_j) + csdg + cgdg


@njit(void(MATRIX, *2 * [MATRIX, PLACES, PLACES], PLACES, PLACES, MATRIX, boolean[::1], MASK, MASK, MATRIX), nogil=True)
def _augment(
    z: Any, class_slopes: Any, y: Any, class_ranks: Any, domain_slopes: Any, domain: Any, domain_ranks: Any,
    same: Any, other: Any, lam: Any, keep: Any, of_class: Any, of_domain: Any, mixed: Any,
) -> None:  # fmt: skip
    """Block by block, which holds the samples of one head and their partners: they are in the cache when mixed."""
    block = max(1, len(z) // len(class_ranks))
    for head in range(len(class_ranks)):
        first, last = head * block, min(len(z), (head + 1) * block)
        _select(z, class_slopes, y, class_ranks[head], first, last, of_class)
        _select(z, domain_slopes, domain, domain_ranks[head], first, last, of_domain)
        _mix(z, same, other, lam, keep, of_class, of_domain, mixed, first, last)
