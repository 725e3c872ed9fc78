"""How functions run on stacked heads, under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 20


def in_blocks(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)`; under vmap a few heads at a time, so that what it makes in between stays in a CPU's cache.

    Args:
        function: pure, and the same with any number of leading dimensions.
        tensors: the first one, which the result is like, decides how many heads there are in a block.
    """
    if any(tensor.requires_grad for tensor in tensors):
        return function(*tensors)
    result: Tensor = _InBlocks.apply(function, *tensors)
    return result


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: Callable[..., Tensor], *tensors: Tensor
    ) -> tuple[Tensor, int]:
        given = stacked(info, in_dims[1:], tensors)
        heads, size = len(given[0]), max(1, BLOCK_BYTES // given[0][0].nbytes)
        result = torch.empty_like(given[0])
        for first in range(0, heads, size):
            result[first : first + size] = function(*(tensor[first : first + size] for tensor in given))
        return result, 0


def stacked(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """What a Function's `vmap` receives, with the heads as the first dimension of every tensor."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
