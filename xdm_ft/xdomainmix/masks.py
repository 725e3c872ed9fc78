"""Equations (1) to (3): the contribution of every feature dimension to the logit of the true class or domain, and which
dimensions are specific, by a quantile of these scores; the cycle of τ_d; when kernels run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear_scores(z: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """score(z^k) = ∂v/∂z^k · z^k of a linear head v = W z + b: the target's row of W, times z. (1)(2)

    For maps the head acts on the spatial mean, so the derivative is W/(hw) at every position; the score of a channel is
    the mean over its positions.

    Args:
        z: features, [B,K] or [B,K,h,w].
        weight: W of the class head or the domain head, [C,K].
        target: the true class or the true domain, int64 [B].

    Returns:
        float32 [B,K], without gradient.

    >>> z = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> weight = torch.tensor([[1.0, 0.0, -1.0], [2.0, 1.0, 0.0]])
    >>> linear_scores(z, weight, torch.tensor([0, 1]))  # class 0, then class 1
    tensor([[ 1.,  0., -3.],
            [ 8.,  5.,  0.]])
    """
    z, row = z.detach().float(), F.embedding(target, weight.detach().float())  # row [B,K]
    if z.ndim == row.ndim:
        return row * z
    space = z.shape[row.ndim :].numel()  # hw
    return row * z.flatten(row.ndim).mean(-1) / space


def autograd_scores(z: Tensor, head: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """score(z^k) = ∂v/∂z^k · z^k for any differentiable head, by one backward pass. (1)(2)

    `head` maps z to logits [B,C] sample by sample (no batch statistics). A module is called with z in the dtype of its
    parameters. Other arguments and the result are those of `linear_scores`.

    >>> z = torch.tensor([[1.0, 2.0], [4.0, 5.0]])
    >>> autograd_scores(z, lambda z: z**2, torch.tensor([0, 1]))  # v_0 = z_0², so that its score is 2 z_0²
    tensor([[ 2.,  0.],
            [ 0., 50.]])
    """
    score = target_gradient(z, head, target) * z.detach().float()  # like z
    return score.flatten(2).mean(-1) if score.ndim > 2 else score


def target_gradient(z: Tensor, head: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """Returns ∂v/∂z of the target's logit v, float32 like z, without gradient. Arguments as for `autograd_scores`."""

    def target_logits(features: Tensor) -> Tensor:
        # samples are independent, so the gradient of the sum holds the gradient of each sample
        return head(features).gather(1, target[:, None]).sum()

    parameter = next(head.parameters(), None) if isinstance(head, nn.Module) else None
    z = z.detach() if parameter is None else z.detach().to(parameter.dtype)
    # without autocast, whose rounding would make ties of scores, and ties are generic
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):  # func.grad differentiates by z all the same
        gradient: Tensor = torch.func.grad(target_logits)(z)
    return gradient.float()


def specific_mask(scores: Tensor, quantile: float | Fraction | Tensor) -> Tensor:
    """M[k] = 1 where score(z^k) > τ, τ the `quantile` of the K scores of that sample. Strictly greater. (3)

    One order statistic decides. With r = q(K−1) the interpolated τ lies in [x_(⌊r⌋), x_(⌈r⌉)), or equals both if they
    tie. No score lies strictly between them, so score > τ is equivalent to score > x_(⌊r⌋). r is computed in rational
    arithmetic (0.9 is nine tenths). A score that ties with τ is generic, and so are all of a sample with a NaN score.

    Args:
        scores: importance scores, [...,K].
        quantile: q in [0, 1]; a third is `Fraction(1, 3)`. As a tensor, which may depend on the step or differ between
            heads: numerator and denominator, int64 [2] (`as_tensor`).

    Returns:
        bool [...,K].

    >>> specific_mask(torch.tensor([[3.0, 1.0, 2.0, 5.0, 4.0]]), 0.5)  # the median is 3
    tensor([[False, False, False,  True,  True]])
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
    # by its text: the float 0.7 is below seven tenths, and of 11 scores it would take rank 6, not 7
    return math.floor(Fraction(str(quantile)) * (size - 1))


def quantile_stage(step: int | Tensor, every: int, stages: int) -> int | Tensor:
    """Returns the position in the cycle of τ_d at a step since the warm-up: 0 … stages−1, each for `every` steps."""
    return step // every % stages


def domain_quantile(step: int, every: int, start: float = 0.9, stop: float = 0.5, drop: float = 0.1) -> float:
    """Returns the quantile of τ_d: it falls from `start` to `stop` by `drop` every `every` steps, then starts again.

    `step` counts from 0 since the end of the warm-up. Raises `ValueError` if `step` is negative, `every` is below 1, or
    the cycle cannot fall from `start` to `stop`.

    >>> [domain_quantile(step, every=100) for step in (0, 99, 100, 200, 300, 400, 500)]
    [0.9, 0.9, 0.8, 0.7, 0.6, 0.5, 0.9]
    """
    if step < 0 or every < 1:
        raise ValueError(f"step {step} and every {every}: step must be at least 0, every at least 1")
    values = quantile_cycle(start, stop, drop)
    return values[int(quantile_stage(step, every, len(values)))]


@cache
def quantile_cycle(start: float = 0.9, stop: float = 0.5, drop: float = 0.1) -> tuple[float, ...]:
    """Returns the quantiles of a cycle, in order: 0.9, 0.8, 0.7, 0.6, 0.5. Raises as `domain_quantile` does."""
    # rationals: subtracting 0.1 from a float drifts, so that 0.5 would take two stages (0.5000000000000001, then 0.5)
    top, bottom, by = Fraction(str(start)), Fraction(str(stop)), Fraction(str(drop))
    if bottom > top or by <= 0:
        raise ValueError(f"start {start}, stop {stop}, drop {drop}: start must be at least stop, and drop positive")
    stages = math.ceil((top - bottom) / by) + 1
    return tuple(float(max(bottom, top - stage * by)) for stage in range(stages))


def exceeds(scores: Tensor, rank: int | Tensor) -> Tensor:
    """Returns `scores > x_(rank)`, where x_(0) ≤ x_(1) ≤ … is the sorted row; all False in a row with a NaN.

    Args:
        scores: float [...,K]; also under `torch.func.vmap`.
        rank: 0 … K−1; a tensor, int64 [] or [1], if it depends on the step or differs between heads.

    Returns:
        bool [...,K], without gradient.
    """
    if not isinstance(rank, Tensor):  # filled on the device: a copy of a number to a GPU would have to wait
        rank = torch.full((), rank, dtype=torch.int64, device=scores.device)
    mask: Tensor = _Exceeds.apply(scores.detach(), rank)
    return mask


def exceeds_by_sorting(rows: Tensor, ranks: Tensor) -> Tensor:
    """`exceeds` in plain torch for rows [n,K], which both kernels must equal.

    `ranks`, int64 [m], are those of m equal blocks of rows. torch sorts NaN as the largest; no score exceeds a NaN.
    """
    ordered, rank = rows.sort(-1).values, ranks.repeat_interleave(len(rows) // len(ranks))
    largest = ordered[:, -1:]
    return rows > torch.where(largest.isnan(), largest, ordered.gather(1, rank[:, None]))


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
            mask = exceeds_by_sorting(rows, ranks)
        return mask.view(scores.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], scores: Tensor, rank: Tensor) -> tuple[Tensor, int]:
        return _Exceeds.apply(*stack_heads(info, in_dims, (scores, rank))), 0


def runs_kernel(tensor: Tensor, kind: Literal["cpu", "cuda"]) -> bool:
    """Returns whether the kernel of this kind of device computes the tensor: float32, and not inside `torch.compile`.

    A compiler fuses plain torch itself, and cannot see into a kernel of numba. `XDM_FT_KERNELS=0` in the environment
    turns all kernels off: an edit of plain torch can be tried before its kernel is written.
    """
    fits = tensor.dtype == torch.float32 and tensor.device.type == kind
    return fits and not torch.compiler.is_compiling() and os.environ.get("XDM_FT_KERNELS") != "0"


def stack_heads(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the tensors that a Function's `vmap` receives, with the heads as the first axis of each."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
