"""The kernel of `exceeds` on a GPU: one program per row, which reads the row once."""

import atexit
import os
import shutil
import tempfile
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton executes the files of its cache unchecked, so each process has a new cache of its own
_CACHE = tempfile.mkdtemp(prefix="xdm_ft-triton-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
if hasattr(triton, "knobs"):
    triton.knobs.cache.dir = _CACHE
else:  # an older version reads the environment when it compiles
    os.environ["TRITON_CACHE_DIR"] = _CACHE


def exceeds(rows: Tensor, ranks: Tensor) -> Tensor:
    """`masks.exceeds_by_sorting` of float32 rows [n,K] and the ranks of m blocks of them, int64 [m]."""
    mask, size = torch.empty(rows.shape, dtype=torch.bool, device=rows.device), rows.shape[1]
    if not len(rows):  # CUDA refuses an empty grid
        return mask
    bits = rows.contiguous().view(torch.int32)
    block = len(rows) // len(ranks)
    _exceeds[(len(rows),)](bits, ranks.contiguous(), block, mask, size, BLOCK=triton.next_power_of_2(size))
    return mask


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _exceeds(bits: Any, ranks: Any, block: Any, mask: Any, size: Any, BLOCK: tl.constexpr) -> None:
    k, rank = tl.arange(0, BLOCK), tl.load(ranks + tl.program_id(0) // block)
    # int64: n·K may exceed 2^31
    at = tl.program_id(0).to(tl.int64) * size + k
    score_bits = tl.load(bits + at, mask=k < size, other=0)
    order = tl.where(score_bits >= 0, score_bits, -0x80000000 - score_bits).to(tl.int64)  # as `_numba._order`
    is_nan = tl.sum(((order > 0x7F800000) | (order < -0x7F800000)).to(tl.int32), 0) > 0
    # x_(rank) is the smallest τ that at most m = K−1−rank scores exceed: bisection between −∞ and +∞
    low, high = tl.full((), -0x7F800001, tl.int64), tl.full((), 0x7F800000, tl.int64)
    for _ in range(32):  # fewer than 2^32 orders lie between
        middle = (low + high) >> 1
        fits = tl.sum(((order > middle) & (k < size)).to(tl.int32), 0) <= size - 1 - rank
        low, high = tl.where(fits, low, middle), tl.where(fits, middle, high)
    tl.store(mask + at, (order > high) & (is_nan == 0), mask=k < size)
