"""One file per sharpness-aware way to take a step: `ALGORITHM+NAME` in a recipe.

A step is two passes over the same batch with the same random draws: gradients at θ, then gradients at θ + offset. The
second pass is given `Losses.held` of the first (`Algorithm.forward(…, held)`), so that both see one and the same loss.
The file's stem is its name in a recipe; its class's constructor keywords are recipe keys, with that name before them:
`sam.rho`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from xdm_ft.settings import SearchRanges

Tensors = dict[str, Tensor]  # parameter name → value


class Sharpness(ABC):
    """Pure functions of parameters and gradients of ONE model; a bank of heads maps them with `torch.func.vmap`."""

    source: str = ""
    search_ranges: SearchRanges = {}  # constructor keyword → range, for the presets of a search
    rho: float

    @abstractmethod
    def offset(self, parameters: Tensors, gradients: Tensors, rho: float | Tensor) -> Tensors:
        """Where the second pass is taken, relative to θ. `rho` may differ between heads of a bank."""

    @abstractmethod
    def combine(self, first: Tensors, second: Tensors) -> Tensors:
        """The gradient of the step from the gradients at θ (`first`) and at θ + offset (`second`)."""
