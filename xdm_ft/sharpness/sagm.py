"""SAGM: sharpness-aware gradient matching."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from xdm_ft.sharpness import Sharpness, Tensors
from xdm_ft.sharpness.sam import SAM


class SAGM(Sharpness):
    """The step at θ is taken with ½ [∇L(θ) + ∇L(θ + ε − α g)], g = ∇L(θ), ε = ρ g / ‖g‖ as in `SAM`.

    Wang et al. 2023 minimise L(θ) + L_p(θ − α ∇L(θ)), L_p the loss at the ascent point: the second term pulls the
    directions of both gradients together. With g constant in the offset, as in SAM, its gradient is the sum above; the
    authors' code halves it, so that a learning rate means what it means for ERM. `adaptive`, theirs too: ε of ASAM
    without the η, and α w² g in place of α g.

    ρ = 0.05 and α = 0.001 are the defaults of their code.
    """

    source = "Wang et al. 2023, Sharpness-Aware Gradient Matching for Domain Generalization (CVPR)"
    # The values that its code draws from (domainbed/hparams_registry.py of Wang-pengfei/SAGM). That code draws ρ but
    # does not use it (algorithms.py holds ρ at 0.05); its default α, 0.001, is not among the draws.
    search_ranges = {"rho": {"choice": (0.01, 0.02, 0.05, 0.1)}, "alpha": {"choice": (0.01, 0.02, 0.05, 0.1)}}

    def __init__(
        self,
        *,
        rho: Annotated[
            float, Field(gt=0, description="how far from the weights sharpness is looked at, in weight norm")
        ] = 0.05,
        alpha: Annotated[
            float, Field(ge=0, description="step down the gradient that the second pass is taken after; like lr")
        ] = 0.001,
        adaptive: Annotated[
            bool, Field(description="measure that distance relative to the size of each weight")
        ] = False,
    ) -> None:
        self.rho, self.alpha, self.adaptive = rho, alpha, adaptive

    def offset(self, parameters: Tensors, gradients: Tensors, rho: float | Tensor) -> Tensors:
        """ε − α g, like the parameters."""
        ascent = SAM(adaptive=self.adaptive).offset(parameters, gradients, rho)
        size = {name: w.square() if self.adaptive else 1.0 for name, w in parameters.items()}
        return {name: ascent[name] - self.alpha * size[name] * g for name, g in gradients.items()}

    def combine(self, first: Tensors, second: Tensors) -> Tensors:
        """The mean of both gradients."""
        return {name: (g + second[name]) / 2 for name, g in first.items()}
