"""Sharpness-aware steps, one per file: `ALGORITHM+NAME` in a recipe.

A step is two passes over the same batch: gradients at θ, then gradients at θ + offset. The second pass repeats the
random draws and masks of the first, so that both minimise the same loss. The file's stem is the name in a recipe. The
class's constructor keywords are recipe keys with that name as prefix: `sam.rho`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from xdm_ft.settings import SearchRanges

Tensors = dict[str, Tensor]  # parameter name → value


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
