"""What the kernels have in common under `torch.func.vmap`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def stacked(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """What a Function's `vmap` receives, with the heads as the first dimension of every tensor."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
