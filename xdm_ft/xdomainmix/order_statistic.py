"""Finds the scores of a row that exceed its order statistic x_(rank), without sorting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xdm_ft.xdomainmix.stacking import stacked


def exceeds(scores: Tensor, rank: int) -> Tensor:
    """Returns `scores > x_(rank)`, where x_(0) ≤ x_(1) ≤ … is the sorted row; all False in a row with a NaN.

    Args:
        scores: float [...,K]; also under `torch.func.vmap`.
        rank: 0 … K−1.

    Returns:
        bool [...,K], without gradient.
    """
    mask: Tensor = _Exceeds.apply(scores.detach(), rank)
    return mask


def reference(rows: Tensor, rank: int) -> Tensor:
    """`exceeds` in plain torch for rows [n,K], which both kernels must equal.

    x_(rank) is the smallest of the K−rank largest scores. torch sorts NaN as the largest and `amin` returns NaN if
    there is one, which no score exceeds.
    """
    return rows > rows.topk(rows.shape[-1] - rank, dim=-1, sorted=False).values.amin(-1, keepdim=True)


class _Exceeds(torch.autograd.Function):
    """Rows are independent, so under `vmap` the rows of all heads are computed together."""

    @staticmethod
    def forward(scores: Tensor, rank: int) -> Tensor:
        rows = scores.reshape(-1, scores.shape[-1])  # [n,K]
        if rows.dtype == torch.float32 and rows.device.type == "cpu":
            from xdm_ft.xdomainmix import _numba  # takes two seconds to import

            mask = _numba.exceeds(rows, rank)
        elif rows.dtype == torch.float32 and rows.device.type == "cuda":
            from xdm_ft.xdomainmix import _triton  # needs a GPU, or its interpreter

            mask = _triton.exceeds(rows, rank)
        else:
            mask = reference(rows, rank)
        return mask.view(scores.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], scores: Tensor, rank: int) -> tuple[Tensor, int]:
        return _Exceeds.apply(*stacked(info, in_dims[:1], (scores,)), rank), 0
