"""BMA: Beta moving average of the weights."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from xdm_ft.averaging import Average, Averaging, MeanOfSegments


def beta_density(x: float, beta: float) -> float:
    """Returns the density of the distribution Beta(β, β) at 0 < x < 1."""
    log_normaliser = 2 * math.lgamma(beta) - math.lgamma(2 * beta)  # log B(β, β)
    return math.exp((beta - 1) * (math.log(x) + math.log1p(-x)) - log_normaliser)


class BMA(Averaging):
    """θ_BMA = Σ_{t=0…T} α_t θ_t / Σ_t α_t, with α_t the density of Beta(β, β) at (t + 0.5) / (T + 1).

    θ_0 are the weights before training and θ_T those after its T steps. With β < 1 both ends weigh most: the
    pre-trained model and the trained one. β = 1 is the uniform mean. θ_0 is included, as in the paper and its code, and
    so are the steps before a method's first selectable one (a warm-up, `unfreeze_at`): the average is over the whole
    training. A class head that starts at random is in it too, with its initial weights; the paper's head is fixed.

    The mean is computed as the training runs, θ̄ ← θ̄ + α_t / Σ_{s≤t} α_s (θ_t − θ̄). No validation loss is read and no
    step is selected: every selection rule gets θ_BMA. Running batch-norm statistics are computed again for it, as for
    SWAD. Of low-rank updates (LoRA) the two factors are averaged, not their product.
    """

    source = "Shu et al. 2023, CLIPood: Generalizing CLIP to Out-of-Distributions, Beta moving average"
    reads_loss = False
    from_start = True

    def __init__(
        self,
        *,
        beta: Annotated[
            float, Field(gt=0, le=10, description="β, of the distribution Beta(β, β) of the weights over the steps")
        ] = 0.5,
    ) -> None:
        self.beta = beta

    def begin(self) -> Average:
        return MeanOfSegments()

    def weight(self, step: int, steps: int) -> float:
        return beta_density((step + 0.5) / (steps + 1), self.beta)  # inside: infinite at 0 and 1 for β < 1
