"""Random numbers as a function, not a state: uniform(seed, step, stream, index).

A counter-based hash in int64 tensor arithmetic (splitmix64's finaliser, Steele, Lea & Flood 2014, once per key).
The same arguments give the same number alone or in a batch of heads (`torch.func.vmap`), on CPU or GPU, in one process
or in many, and resuming needs no saved generator.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Stream(IntEnum):
    """One number per use, so that no two uses of randomness share their draws."""

    INIT = 0
    BATCH = 1
    PERMUTATION = 2
    PARTNERS = 3
    LAMBDA = 4
    DISCARD = 5
    SPLIT = 6
    DOMAIN_INIT = 7
    BOOTSTRAP = 8
    STYLE = 9
    ENCODER = 10


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # int64 shifts are arithmetic; the mask makes them logical
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _finalise(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def bits(seed: int | Tensor, step: int | Tensor, stream: int | Tensor, index: int | Tensor) -> Tensor:
    """64 random bits as int64, in the broadcast shape of the four keys (int64 tensors or ints)."""
    device = next((k.device for k in (seed, step, stream, index) if isinstance(k, Tensor)), None)
    x = torch.zeros((), dtype=torch.int64, device=device)
    for key in (seed, stream, step, index):
        x = _finalise((x ^ key) + _GOLDEN)
    return x


def uniform(seed: int | Tensor, step: int | Tensor, stream: int | Tensor, index: int | Tensor) -> Tensor:
    """Uniform float32 in [0, 1) with 24 random bits, in the broadcast shape of the four keys."""
    return _shift_right(bits(seed, step, stream, index), 40).to(torch.float32) * (1.0 / (1 << 24))


def integers(
    seed: int | Tensor, step: int | Tensor, stream: int | Tensor, index: int | Tensor, high: int | Tensor
) -> Tensor:
    """Uniform int64 in [0, high). 63 bits modulo `high`: the bias is below high / 2^63."""
    return _shift_right(bits(seed, step, stream, index), 1) % high


def permutation(seed: int, step: int, stream: int, n: int) -> Tensor:
    """A permutation of 0…n−1 (int64 [n]) that depends on the three keys only: the order of n 64-bit draws."""
    return torch.argsort(bits(seed, step, stream, torch.arange(n)), stable=True)
