"""When kernels run, and their arguments under `torch.func.vmap`."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor


def runs_kernel(tensor: Tensor, kind: Literal["cpu", "cuda"]) -> bool:
    """Returns whether the kernel of this kind of device computes the tensor: float32, and not inside `torch.compile`.

    A compiler fuses plain torch itself, and can not see into a kernel of numba. `XDM_FT_KERNELS=0` in the environment
    turns all kernels off: an edit of plain torch can be tried before its kernel is written.
    """
    fits = tensor.dtype == torch.float32 and tensor.device.type == kind
    return fits and not torch.compiler.is_compiling() and os.environ.get("XDM_FT_KERNELS") != "0"


def stacked(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the tensors that a Function's `vmap` receives, with the heads as the first axis of each."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
