"""The kernels of `specific_mask` and `mix` on a CPU, one row in the processor's cache after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from xdm_ft.tensors import Parts

INFINITE = 0x7F800000  # the order of +∞; beyond it, on either side, lie the NaNs
NAN = 0x7FFFFFFF  # an order that no score exceeds
GUESSES = 24  # then bisection takes over; half of the rows are solved after five


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """numba's compilation, kept beside the source or, where that is read-only, in the user's cache."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither can be written to
        return njit(nogil=True)(function)


def exceeds(rows: Tensor, rank: int) -> Tensor:
    """`selection.exceeds` of float32 rows [n,K]."""
    mask = torch.empty(rows.shape, dtype=torch.bool)
    _exceeds(rows.contiguous().numpy().view(np.int32), rank, mask.numpy())
    return mask


def part(z: Tensor, mask: Tensor) -> Tensor:
    """`decomposition.part` of float32 z and a mask like it."""
    taken = torch.empty(z.shape)
    _part(*(tensor.contiguous().view(-1).numpy() for tensor in (z, mask, taken)))
    return taken


def mix(parts: Parts, same: Tensor, other: Tensor, lam: Tensor, keep: Tensor) -> Tensor:
    """`mixing.plainly` of float32 parts."""
    mixed = torch.empty(parts.csds.shape)
    features = (tensor.contiguous().flatten(1).numpy() for tensor in (*parts, mixed))
    _mix(*features, *(tensor.contiguous().numpy() for tensor in (same, other, lam, keep)))
    return mixed


@compiled
def _order(bits: Any) -> Any:
    """An integer for every float's bits, in the floats' order (−0 and +0 are 0 both); it is its own inverse."""
    return np.int32(bits if bits >= 0 else -0x80000000 - bits)


@compiled
def _count_above(row: Any, tau: Any) -> Any:
    count = np.int32(0)
    for k in range(row.size):
        count += np.int32(row[k] > tau)
    return count


@compiled
def _between(low: Any, high: Any, low_excess: float, high_excess: float) -> Any:
    """Where the line through both excesses, over the floats and not over their orders, crosses 0."""
    left, right = np.int32(_order(low)).view(np.float32), np.int32(_order(high)).view(np.float32)
    share = np.float32(low_excess / (low_excess - high_excess))
    return _order(np.float32(left + (right - left) * share).view(np.int32))


@compiled
def _divider(row: Any, rank: int, guess: Any) -> Any:
    """Some τ such that score > τ is score > x_(rank), all in the floats' order; NAN for a row with a NaN.

    m = K−1−rank scores may lie above τ, fewer where ties forbid m. Always more than m lie above `low` and at most m
    above `high`. After `guess`, τ is looked for by false position on these excesses (Illinois rule: an end that stays
    loses half its weight), then by bisection, which ends at neighbours: `high` is then x_(rank), and tied.
    """
    above = row.size - 1 - rank  # m
    low, high = np.int64(row.min()) - 1, np.int64(row.max())
    if high > INFINITE or low < -INFINITE - 1:
        return np.int32(NAN)
    low_excess, high_excess = float(row.size - above), float(-above)
    positive, not_negative = _count_above(row, np.int32(0)), _count_above(row, np.int32(-1))
    if positive > above:
        low, low_excess = np.int64(0), float(positive - above)
    elif not_negative > above:
        return np.int32(0)  # features after ReLU are full of zeros
    else:
        high, high_excess = min(high, np.int64(-1)), float(not_negative - above)
    tau, guesses = np.int64(guess), 0
    while high - low > 1 and high_excess != 0:
        if guesses >= GUESSES or not low < tau < high:
            tau = (low + high) >> 1
        excess = float(_count_above(row, np.int32(tau)) - above)
        if excess > 0:
            low, low_excess, high_excess = tau, excess, high_excess / 2
        else:
            high, high_excess, low_excess = tau, excess, low_excess / 2
        tau, guesses = np.int64(_between(low, high, low_excess, high_excess)), guesses + 1
    return np.int32(high)


@compiled
def _exceeds(bits: Any, rank: int, mask: Any) -> None:
    row, tau, guess = np.empty(bits.shape[1], np.int32), np.int32(0), np.int32(0)
    for n in range(len(bits)):
        for k in range(row.size):
            row[k] = _order(bits[n, k])
        tau = _divider(row, rank, guess)
        for k in range(row.size):
            mask[n, k] = row[k] > tau
        guess = guess if tau == NAN else tau  # of the next row


@compiled
def _part(z: Any, mask: Any, taken: Any) -> None:
    for k in range(z.size):
        taken[k] = z[k] if mask[k] else np.float32(-0.0)


@compiled
def _mix(csds: Any, csdg: Any, cgds: Any, cgdg: Any, mixed: Any, same: Any, other: Any, lam: Any, keep: Any) -> None:
    for n in range(len(mixed)):
        i, j = same[n], other[n]
        lam_1, lam_2 = lam[n, 0], lam[n, 1]
        rest_1, rest_2 = np.float32(1) - lam_1, np.float32(1) - lam_2
        for k in range(mixed.shape[1]):
            own = lam_1 * csds[n, k] + rest_1 * csds[i, k] if keep[n] else np.float32(0)
            mixed[n, k] = own + (lam_2 * cgds[n, k] + rest_2 * cgds[j, k]) + csdg[n, k] + cgdg[n, k]
