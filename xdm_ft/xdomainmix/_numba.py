"""The kernels of `specific_mask`, `decompose` and `mix` on a CPU, for float32.

An import compiles them, in 1 to 2 seconds. numba could keep them on the disk, but it executes what it finds there
without a check: a damaged file gives wrong numbers or kills the process.
"""

from typing import Any

import numpy as np
import torch
from numba import boolean, float32, int32, int64, njit, void
from torch import Tensor

from xdm_ft.tensors import Parts

INFINITE, NAN = 0x7F800000, 0x7FFFFFFF  # `_order` of +∞, and of a NaN: NaNs lie above +∞ or below −∞
GUESSES = 24  # then bisection takes over; half of the rows need at most five


def exceeds(rows: Tensor, ranks: Tensor) -> Tensor:
    """`order_statistic.reference` of rows [n,K] and the ranks of m blocks of them, [m]."""
    mask = torch.empty(rows.shape, dtype=torch.bool)
    _exceeds(rows.contiguous().numpy().view(np.int32), ranks.contiguous().numpy(), mask.numpy())
    return mask


def parts(z: Tensor, of_class: Tensor, of_domain: Tensor) -> tuple[Tensor, ...]:
    """`decomposition.reference` of masks like z."""
    found = tuple(torch.empty(z.shape) for _ in Parts._fields)
    _parts(*(tensor.contiguous().view(-1).numpy() for tensor in (z, of_class, of_domain, *found)))
    return found


def mix(parts: Parts, *choices: Tensor) -> Tensor:
    """`mixing.reference`."""
    mixed = torch.empty(parts.csds.shape)
    features = (tensor.contiguous().flatten(1).numpy() for tensor in (*parts, mixed))
    _mix(*features, *(tensor.contiguous().numpy() for tensor in choices))
    return mixed


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


@njit(void(int32[:, ::1], int64[::1], boolean[:, ::1]), nogil=True)
def _exceeds(bits: Any, ranks: Any, mask: Any) -> None:
    row, guess = np.empty(bits.shape[1], np.int32), np.int32(0)
    block = max(1, len(bits) // len(ranks))
    for n in range(len(bits)):
        for k in range(row.size):
            row[k] = _order(bits[n, k])
        tau = _divider(row, ranks[n // block], guess)
        for k in range(row.size):
            mask[n, k] = row[k] > tau
        guess = guess if tau == NAN else tau  # for the next row


@njit(void(float32[::1], *2 * [boolean[::1]], *4 * [float32[::1]]), nogil=True)
def _parts(z: Any, of_class: Any, of_domain: Any, csds: Any, csdg: Any, cgds: Any, cgdg: Any) -> None:
    nothing = np.float32(-0.0)
    for k in range(z.size):
        c, d = of_class[k], of_domain[k]  # `&` of both, as `and` would branch on every element
        csds[k], csdg[k] = z[k] if c & d else nothing, z[k] if c & (not d) else nothing
        cgds[k], cgdg[k] = z[k] if (not c) & d else nothing, z[k] if (not c) & (not d) else nothing


@njit(void(*5 * [float32[:, ::1]], int64[::1], int64[::1], float32[:, ::1], boolean[::1]), nogil=True)
def _mix(csds: Any, csdg: Any, cgds: Any, cgdg: Any, mixed: Any, same: Any, other: Any, lam: Any, keep: Any) -> None:
    for n in range(len(mixed)):
        i, j, lam_1, lam_2 = same[n], other[n], lam[n, 0], lam[n, 1]
        rest_1, rest_2 = np.float32(1) - lam_1, np.float32(1) - lam_2
        for k in range(mixed.shape[1]):
            own = lam_1 * csds[n, k] + rest_1 * csds[i, k] if keep[n] else np.float32(0)
            mixed[n, k] = own + (lam_2 * cgds[n, k] + rest_2 * cgds[j, k]) + csdg[n, k] + cgdg[n, k]
