"""SAGM: sharpness-aware gradient matching."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from xdm_ft.core import Tensors
from xdm_ft.sharpness import Sharpness
from xdm_ft.sharpness.sam import SAM, Adaptive, Rho


class SAGM(Sharpness):
    """The step at θ uses the gradient ½ [∇L(θ) + ∇L(θ + ε − α g)], g = ∇L(θ), ε = ρ g / ‖g‖ as in `SAM`.

    Wang et al. 2023 minimise L(θ) + L_p(θ − α ∇L(θ)), where L_p is the loss at the ascent point: the second term aligns
    the directions of both gradients. If g is held constant in the offset, as in SAM, the gradient is the sum above
    without the ½. The authors' code halves it, so that a learning rate has the same effect as with ERM. `adaptive` is
    from their code too: ε of ASAM without its η, and α w² g in place of α g.

    ρ = 0.05 and α = 0.001 are the defaults of their code.
    """

    source = "Wang et al. 2023, Sharpness-Aware Gradient Matching for Domain Generalization (CVPR)"
    # The values that its code draws from (domainbed/hparams_registry.py of Wang-pengfei/SAGM). That code draws ρ but
    # does not use it (algorithms.py holds ρ at 0.05); its default α, 0.001, is not among the draws.
    numbers = ("rho", "alpha")
    search_ranges = {"rho": {"choice": (0.01, 0.02, 0.05, 0.1)}, "alpha": {"choice": (0.01, 0.02, 0.05, 0.1)}}

    def __init__(
        self,
        *,
        rho: Rho = 0.05,
        alpha: Annotated[
            float,
            Field(
                ge=0, description="α, size of the gradient step to the point of the second pass, like a learning rate"
            ),
        ] = 0.001,
        adaptive: Adaptive = False,
    ) -> None:
        self.rho, self.alpha, self.adaptive = rho, alpha, adaptive

    def offset(
        self, parameters: Tensors, gradients: Tensors, rho: float | Tensor, alpha: float | Tensor | None = None
    ) -> Tensors:
        """ε − α g, in the shapes of the parameters. `alpha` None: that of the settings."""
        # the end-to-end loop has one model, and passes ρ alone
        alpha = self.alpha if alpha is None else alpha
        ascent = SAM(adaptive=self.adaptive).offset(parameters, gradients, rho)
        size = {name: w.square() if self.adaptive else 1.0 for name, w in parameters.items()}
        return {name: ascent[name] - alpha * size[name] * g for name, g in gradients.items()}

    def combine(self, first: Tensors, second: Tensors) -> Tensors:
        """The mean of both gradients."""
        return {name: (g + second[name]) / 2 for name, g in first.items()}
