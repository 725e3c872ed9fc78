"""Sharpness-aware steps, one per file: `ALGORITHM+NAME` in a recipe.

A step is two passes over the same batch: gradients at θ, then gradients at θ + offset. The second pass repeats the
random draws and masks of the first, so that both minimise the same loss. The file's stem is the name in a recipe. The
class's constructor keywords are recipe keys with that name as prefix: `sam.rho`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from xdm_ft.core import Tensors
from xdm_ft.runtime.settings import SearchRanges

try:
    from torch._C._functorch import is_batchedtensor
except ImportError:  # it is undocumented

    def is_batchedtensor(tensor: Tensor) -> bool:
        return True  # then no list is multiplied at once


def products(first: list[Tensor], second: list[Tensor] | Tensor) -> list[Tensor]:
    """Returns the products of two lists, or of a list and a scalar: on a GPU by a few kernels, not one per tensor."""
    if is_batchedtensor(first[0]):  # torch.func.vmap has no rule for lists
        others = [second] * len(first) if isinstance(second, Tensor) else second
        return [a * b for a, b in zip(first, others, strict=True)]
    return list(torch._foreach_mul(first, second))


class Sharpness(ABC):
    """Pure functions of the parameters and gradients of ONE model. A bank maps them over heads by `torch.func.vmap`."""

    source: str = ""  # paper and equation
    search_ranges: SearchRanges = {}  # constructor keyword → range, for the presets of a search
    rho: float  # ρ, see `offset`
    numbers: tuple[str, ...] = ("rho",)  # settings in which heads of one bank may differ: arguments of `offset`

    @abstractmethod
    def offset(self, parameters: Tensors, gradients: Tensors, rho: float | Tensor) -> Tensors:
        """The second pass is at θ + this. A kind with more `numbers` has more arguments."""

    @abstractmethod
    def combine(self, first: Tensors, second: Tensors) -> Tensors:
        """The gradient that the optimizer receives, from those at θ (`first`) and at θ + offset (`second`)."""
