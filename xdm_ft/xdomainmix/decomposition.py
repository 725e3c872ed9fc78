"""Equations (3) and (4): which dimensions are specific, and the four parts of z that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from xdm_ft.runtime.tensors import Parts
from xdm_ft.xdomainmix.order_statistic import exceeds


def specific_mask(scores: Tensor, quantile: float | Fraction | Tensor) -> Tensor:
    """M[k] = 1 where score(z^k) > τ, τ the `quantile` of the K scores of that sample. Strictly greater. (3)

    One order statistic decides. With r = q(K−1) the interpolated τ lies in [x_(⌊r⌋), x_(⌈r⌉)), or equals both if they
    tie. No score lies strictly between them, so score > τ is equivalent to score > x_(⌊r⌋). r is computed in rational
    arithmetic (0.9 is nine tenths).

    A score that ties with τ is generic. If a sample has a NaN score, all its dimensions are generic, so that mixing
    does not spread the NaN to other samples.

    Args:
        scores: importance scores, [...,K].
        quantile: q in [0, 1]; a third is `Fraction(1, 3)`. As a tensor, which may depend on the step or differ between
            heads: numerator and denominator, int64 [2] (`as_tensor`).

    Returns:
        bool [...,K].
    """
    size = scores.shape[-1]
    if isinstance(quantile, Tensor):
        return exceeds(scores, quantile[0] * (size - 1) // quantile[1])
    return exceeds(scores, rank_of(quantile, size))


def as_tensor(quantiles: Sequence[float | Fraction]) -> Tensor:
    """Returns quantiles as numerators and denominators, int64 [n,2], for `specific_mask`."""
    return torch.tensor([Fraction(str(quantile)).as_integer_ratio() for quantile in quantiles])


@cache
def rank_of(quantile: float | Fraction, size: int) -> int:
    """Returns ⌊q(K−1)⌋, the rank (0: smallest) of the score among K that decides. `quantile` as for `specific_mask`."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile {quantile} is not in [0, 1]")
    return math.floor(Fraction(str(quantile)) * (size - 1))


def decompose(z: Tensor, class_mask: Tensor, domain_mask: Tensor) -> Parts:
    """The four parts of z: M ⊙ z for the four combinations of M_c and M_d with their complements. (4)

    The parts sum to z bit for bit: a part is −0.0 where its mask is False. −0.0 is the neutral element of float
    addition; +0.0 is not, as −0.0 + 0.0 is +0.0.

    Args:
        z: features, [B,K] or [B,K,h,w].
        class_mask: M_c, bool [B,K]; for maps one value per channel.
        domain_mask: M_d, bool [B,K].

    Returns:
        Four tensors like z. The gradient of each element of z is that of the one part that contains it.
    """
    space = (None,) * (z.ndim - class_mask.ndim)
    of_class, of_domain = class_mask[(..., *space)], domain_mask[(..., *space)]
    nothing = torch.full((), -0.0, dtype=z.dtype, device=z.device)
    masks = of_class & of_domain, of_class & ~of_domain, ~of_class & of_domain, ~(of_class | of_domain)
    return Parts(*(torch.where(mask, z, nothing) for mask in masks))
