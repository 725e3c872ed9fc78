"""SAM: sharpness-aware minimisation."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from xdm_ft.sharpness import Sharpness, Tensors


class SAM(Sharpness):
    """The step at θ is taken with the gradient at θ + ε, where the loss within a distance ρ of θ is about highest.

    ε = ρ g / (‖g‖₂ + 1e-12), g the gradient at θ, ‖·‖₂ over all parameters together (Foret et al. 2021, eq. 2).
    `adaptive`: ε = ρ w² g / (‖ |w| g ‖₂ + 1e-12), element by element, so that rescaling weights changes nothing (ASAM,
    Kwon et al. 2021, without its η; as https://github.com/davda54/sam has it). ρ = 0.05 is the paper's default; ASAM
    wants about ten times as much.
    """

    source = "Foret et al. 2021, SAM, eq. (2); adaptive: Kwon et al. 2021, ASAM"
    # the values that the code of XDomainMix draws from
    search_ranges = {"rho": {"choice": (0.05, 0.1)}}

    def __init__(
        self,
        *,
        rho: Annotated[
            float, Field(gt=0, description="how far from the weights sharpness is looked at, in weight norm")
        ] = 0.05,
        adaptive: Annotated[
            bool, Field(description="measure that distance relative to the size of each weight")
        ] = False,
    ) -> None:
        self.rho, self.adaptive = rho, adaptive

    def offset(self, parameters: Tensors, gradients: Tensors, rho: float | Tensor) -> Tensors:
        """ε, like the parameters."""
        size = {name: w.abs() if self.adaptive else torch.ones_like(w) for name, w in parameters.items()}
        norm = torch.stack([(size[name] * g).square().sum() for name, g in gradients.items()]).sum().sqrt()
        scale = rho / (norm + 1e-12)
        return {name: size[name].square() * g * scale for name, g in gradients.items()}

    def combine(self, first: Tensors, second: Tensors) -> Tensors:
        """The gradient at θ + ε alone."""
        return second
