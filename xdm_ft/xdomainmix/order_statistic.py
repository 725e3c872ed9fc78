"""Finds the scores of a row that exceed its order statistic x_(rank), without sorting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xdm_ft.xdomainmix.stacking import runs_kernel, stacked


def exceeds(scores: Tensor, rank: int | Tensor) -> Tensor:
    """Returns `scores > x_(rank)`, where x_(0) ≤ x_(1) ≤ … is the sorted row; all False in a row with a NaN.

    Args:
        scores: float [...,K]; also under `torch.func.vmap`.
        rank: 0 … K−1; a tensor, int64 [] or [1], if it depends on the step or differs between heads.

    Returns:
        bool [...,K], without gradient.
    """
    # filled on the device: a copy of a number to a GPU would have to wait
    own = rank if isinstance(rank, Tensor) else torch.full((), rank, dtype=torch.int64, device=scores.device)
    mask: Tensor = _Exceeds.apply(scores.detach(), own)
    return mask


def reference(rows: Tensor, ranks: Tensor) -> Tensor:
    """`exceeds` in plain torch for rows [n,K], which both kernels must equal.

    `ranks`, int64 [m], are those of m equal blocks of rows. torch sorts NaN as the largest; no score exceeds a NaN.
    """
    ordered, own = rows.sort(-1).values, ranks.repeat_interleave(len(rows) // len(ranks))
    largest = ordered[:, -1:]
    return rows > torch.where(largest.isnan(), largest, ordered.gather(1, own[:, None]))


class _Exceeds(torch.autograd.Function):
    """Rows are independent, so under `vmap` the rows of all heads are computed together.

    `rank` has the first axes of `scores`: those of the heads that differ in it.
    """

    @staticmethod
    def forward(scores: Tensor, rank: Tensor) -> Tensor:
        rows, ranks = scores.reshape(-1, scores.shape[-1]), rank.reshape(-1)  # [n,K]; one rank per block of rows
        if runs_kernel(rows, "cpu"):
            from xdm_ft.xdomainmix import _numba  # takes three seconds to import

            mask = _numba.exceeds(rows, ranks)
        elif runs_kernel(rows, "cuda"):
            from xdm_ft.xdomainmix import _triton  # needs a GPU, or its interpreter

            mask = _triton.exceeds(rows, ranks)
        else:
            mask = reference(rows, ranks)
        return mask.view(scores.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], scores: Tensor, rank: Tensor) -> tuple[Tensor, int]:
        return _Exceeds.apply(*stacked(info, in_dims, (scores, rank))), 0
