"""The arguments of the kernels under `torch.func.vmap`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def stacked(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the tensors that a Function's `vmap` receives, with the heads as the first axis of each."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
