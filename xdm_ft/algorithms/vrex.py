"""VREx: penalises the variance of the risk between domains."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.irm import AnnealedPenalty
from xdm_ft.core import Batch


class VREx(AnnealedPenalty):
    """loss = R + β · 1/N Σ_d (R_d − R̄)², R_d the mean cross-entropy of domain d, R̄ the mean over the N domains.

    N counts the domains in the batch; with one domain the penalty is 0. β = 10, the weight of 1 and the mean R (the
    paper sums the risks) are DomainBed's.
    """

    source = "Krueger et al. 2021, Out-of-Distribution Generalization via Risk Extrapolation (ICML), V-REx"
    # DomainBed's range (hparams_registry.py)
    search_ranges = {"penalty_weight": {"log_uniform": (1e-1, 1e5)}}

    def __init__(
        self,
        setup: Setup,
        *,
        penalty_weight: Annotated[float, Field(ge=0, description="β, weight of the penalty after annealing")] = 10.0,
        anneal_steps: Annotated[
            int | None, Field(ge=0, description="first steps, in which β is 1; null: a tenth of the steps")
        ] = None,
    ) -> None:
        super().__init__(setup, penalty_weight, anneal_steps)

    def penalty(self, logits: Tensor, per_sample: Tensor, batch: Batch) -> Tensor:
        risks, present = self.by_domain(per_sample, batch)  # [D]
        mean = risks.sum() / present.sum()
        return ((risks - mean).square() * present).sum() / present.sum()
