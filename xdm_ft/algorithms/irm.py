"""IRM: invariant risk minimisation."""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Setup, domain_means
from xdm_ft.algorithms._annealing import AnnealedPenalty
from xdm_ft.runtime.tensors import Batch


class IRM(AnnealedPenalty):
    """loss = R + λ · mean over domains of ‖∇_s R_d(s · c)‖² at s = 1 (IRMv1), R_d the risk of domain d.

    The head is optimal for all domains at once only if no domain gains by rescaling its logits with a scalar s. The
    square is estimated without bias from two halves of the domain's batch (every second sample):
    (∂R_d' / ∂s)(∂R_d'' / ∂s), which may be negative. The derivative of one sample's cross-entropy at s = 1 is
    Σ_c p_c v_c − v_y, where v are the logits and p their softmax. The mean leaves out domains with fewer than two
    samples in the batch; without any other domain the penalty is 0.

    The weight is 1 for the first `anneal_steps` steps, then λ; the optimizer resets its moments at the change. λ = 100,
    the two halves and the weight of 1 are DomainBed's, which anneals for 500 steps, a tenth of its usual 5,000.
    """

    source = "Arjovsky et al. 2019, Invariant Risk Minimization (IRMv1), as DomainBed estimates and anneals it"
    # DomainBed's range (hparams_registry.py)
    search_ranges = {"penalty_weight": {"log_uniform": (1e-1, 1e5)}}

    def __init__(
        self,
        setup: Setup,
        *,
        penalty_weight: Annotated[float, Field(ge=0, description="λ, weight of the penalty after annealing")] = 100.0,
        anneal_steps: Annotated[
            int | None, Field(ge=0, description="first steps, in which λ is 1; null: a tenth of the steps")
        ] = None,
    ) -> None:
        super().__init__(setup, penalty_weight, anneal_steps)

    def penalty(self, logits: Tensor, per_sample: Tensor, batch: Batch) -> Tensor:
        domains = self.task.num_domains
        true = logits.gather(1, batch.y[:, None])[:, 0]
        slope = (logits.softmax(1) * logits).sum(1) - true  # ∂ℓ/∂s at s = 1, [B]
        half = 2 * batch.domain + rank_in_domain(batch.domain, domains) % 2  # [B], 0…2D−1
        means, present = domain_means(slope, half, 2 * domains, self.sample_weight(batch))
        both = present.view(domains, 2).all(1)  # [D]
        first, second = means.view(domains, 2).unbind(1)  # the backward pass of prod rounds by its neighbours in a bank
        return (first * second).sum() / both.sum().clamp(min=1)


def rank_in_domain(domain: Tensor, num_domains: int) -> Tensor:
    """Returns for every sample how many samples of its domain come before it in the batch: int64 [B]."""
    members = F.one_hot(domain, num_domains)  # [B,D]
    return ((members.cumsum(0) - 1) * members).sum(1)
