"""SAM: sharpness-aware minimisation."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from xdm_ft.core import Tensors
from xdm_ft.sharpness import Sharpness, products

Rho = Annotated[
    float,
    Field(gt=0, description="ρ, radius around the weights within which the loss is to be low everywhere (L2 norm)"),
]
Adaptive = Annotated[bool, Field(description="scale the radius with the size of each weight (ASAM)")]


class SAM(Sharpness):
    """The step at θ uses the gradient ∇L(θ + ε), ε = ρ g / (‖g‖₂ + 1e-12), g = ∇L(θ).

    To first order θ + ε is the point of highest loss within the radius ρ of θ. ‖·‖₂ is over all parameters together.
    `adaptive`: ε = ρ w² g / (‖ |w| g ‖₂ + 1e-12), element by element, so that rescaling weights changes nothing (ASAM,
    Kwon et al. 2021, without its η; as in https://github.com/davda54/sam). ρ = 0.05 is the paper's default; for ASAM it
    should be about ten times as large.
    """

    source = "Foret et al. 2021, SAM, eq. (2); adaptive: Kwon et al. 2021, ASAM"
    # the values that the code of XDomainMix draws from
    search_ranges = {"rho": {"choice": (0.05, 0.1)}}

    def __init__(
        self,
        *,
        rho: Rho = 0.05,
        adaptive: Adaptive = False,
    ) -> None:
        self.rho, self.adaptive = rho, adaptive

    def offset(self, parameters: Tensors, gradients: Tensors, rho: float | Tensor) -> Tensors:
        """ε, in the shapes of the parameters."""
        g = [*gradients.values()]
        size = [parameters[name].abs() for name in gradients] if self.adaptive else None
        scaled = g if size is None else products(size, g)
        # one norm for all parameters, not one per tensor (eq. 2)
        norm = torch.stack([square.sum() for square in products(scaled, scaled)]).sum().sqrt()
        squared = g if size is None else products(products(size, size), g)
        return dict(zip(gradients, products(squared, rho / (norm + 1e-12)), strict=True))

    def combine(self, first: Tensors, second: Tensors) -> Tensors:
        """The gradient at θ + ε; that at θ is used for ε only."""
        return second
