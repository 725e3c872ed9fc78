"""Equations (3) and (4): which dimensions are specific, and the four parts they cut z into."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

from xdm_ft.tensors import Parts
from xdm_ft.xdomainmix.selection import exceeds
from xdm_ft.xdomainmix.stacking import stacked


def specific_mask(scores: Tensor, quantile: float | Fraction) -> Tensor:
    """M[k] = 1 where score(z^k) > τ, τ the `quantile` of the K scores of that sample. Strictly greater. (3)

    One order statistic decides. With r = q(K−1) the interpolated τ lies in [x_(⌊r⌋), x_(⌈r⌉)), or equals both where
    they tie, and no score lies strictly between: score > τ is score > x_(⌊r⌋). r is taken in rational arithmetic (0.9
    is nine tenths).

    Ties fall to generic. A sample with a NaN among its scores is generic throughout, so that it can not spread into
    other samples by mixing.

    Args:
        scores: importance scores, [...,K].
        quantile: q in [0, 1]; a third is `Fraction(1, 3)`.

    Returns:
        bool [...,K].
    """
    return exceeds(scores, rank_of(quantile, scores.shape[-1]))


@cache
def rank_of(quantile: float | Fraction, size: int) -> int:
    """⌊r⌋, r = q(K−1): which of K scores decides, counted from 0 at the smallest. `quantile` as for `specific_mask`."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile {quantile} is not in [0, 1]")
    return math.floor(Fraction(str(quantile)) * (size - 1))


def decompose(z: Tensor, class_mask: Tensor, domain_mask: Tensor) -> Parts:
    """The four parts of z, M ⊙ z for the four combinations of M_c and M_d with their complements. (4)

    They sum to z bit for bit: what a part leaves out is −0.0, the neutral element of float addition (+0.0 is not: it
    turns −0.0 into +0.0).

    Args:
        z: features, [B,K] or [B,K,h,w].
        class_mask: M_c, bool [B,K]; it holds for a whole channel of a map.
        domain_mask: M_d, bool [B,K].

    Returns:
        Four tensors like z. Gradients flow to z through the part that holds it.
    """
    space = (None,) * (z.ndim - class_mask.ndim)
    of_class, of_domain = class_mask[(..., *space)], domain_mask[(..., *space)]  # [B,K,1,1] for maps
    return Parts(*cut(z, of_class & of_domain, of_class & ~of_domain, ~of_class & of_domain, ~(of_class | of_domain)))


def cut(z: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
    """M ⊙ z for each of four masks M, which are like z, or [...,B,K,1,1] for maps: −0.0 where M is False."""
    parts: tuple[Tensor, ...] = _Cut.apply(z, *masks)
    return parts


def plainly(z: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
    """The same in plain torch: the oracle of the kernel."""
    nothing = torch.full((), -0.0, dtype=z.dtype, device=z.device)
    return tuple(torch.where(mask, z, nothing) for mask in masks)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
        if z.device.type != "cpu" or z.dtype != torch.float32 or z.shape != masks[0].shape:
            return plainly(z, *masks)
        # `torch.where` takes twenty times as long on a CPU: it branches on every element of an irregular mask
        from xdm_ft.xdomainmix import _numba  # takes half a second to import

        return _numba.cut(z, *masks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        terms = (torch.where(mask, gradient, 0.0) for mask, gradient in zip(ctx.saved_tensors, gradients, strict=True))
        return torch.stack(tuple(terms)).sum(0), None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _Cut.apply(*stacked(info, in_dims, tensors)), (0,) * 4
