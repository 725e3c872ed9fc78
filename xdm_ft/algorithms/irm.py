"""IRM: invariant risk minimisation.

VREx has the same base, `AnnealedPenalty`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup, domain_means
from xdm_ft.core import Batch, Losses
from xdm_ft.runtime.errors import UserError, plural


class AnnealedPenalty(Algorithm):
    """loss = R + w · penalty, R the average cross-entropy; w is 1 for `anneal_steps` steps, then `penalty_weight`.

    The optimizer resets its moments when w changes: Adam's second moments of small gradients would scale the first
    large ones too little (as in DomainBed). Earlier steps cannot be selected, as they trained with w = 1.
    """

    min_domains = 2

    def __init__(self, setup: Setup, penalty_weight: float, anneal_steps: int | None) -> None:
        """`anneal_steps` None: a tenth of the steps, as DomainBed's 500 of its usual 5,000."""
        super().__init__(setup)
        self.anneal_steps = setup.steps // 10 if anneal_steps is None else anneal_steps
        if self.anneal_steps >= setup.steps:
            raise UserError(
                f"{type(self).__name__.lower()}: anneal_steps {self.anneal_steps} leaves no step with penalty_weight: "
                f"training has {plural(setup.steps, 'step')}; lower anneal_steps or raise training.steps"
            )
        self.penalty_weight: Tensor
        self.register_buffer("penalty_weight", torch.tensor(penalty_weight, dtype=torch.float32))
        self.first_selectable_step = self.anneal_steps + 1

    @abstractmethod
    def penalty(self, logits: Tensor, per_sample: Tensor, batch: Batch) -> Tensor:
        """Returns the penalty, a scalar, from logits [B,C] and their cross-entropies [B]."""

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        logits = self.logits(z)
        per_sample = F.cross_entropy(logits, batch.y, reduction="none")
        penalty = self.penalty(logits, per_sample, batch)
        risk = self.average(per_sample, batch)
        is_annealed = step >= self.anneal_steps
        if not isinstance(is_annealed, Tensor):
            # end to end the step is a number
            is_annealed = torch.full((), is_annealed, device=penalty.device)
        total = risk + torch.where(is_annealed, self.penalty_weight, 1.0) * penalty
        return Losses(total, auxiliary=total.new_zeros(()), logs={"risk": risk, "penalty": penalty})

    def resets_optimizer(self, step: int) -> bool:
        return step == self.anneal_steps


class IRM(AnnealedPenalty):
    """loss = R + λ · mean over domains of ‖∇_s R_d(s · c)‖² at s = 1 (IRMv1), R_d the risk of domain d.

    The head is optimal for all domains at once only if no domain gains by rescaling its logits with a scalar s. The
    square is estimated without bias from two halves of the domain's batch (every second sample):
    (∂R_d' / ∂s)(∂R_d'' / ∂s), which may be negative. The derivative of one sample's cross-entropy at s = 1 is
    Σ_c p_c v_c − v_y, where v are the logits and p their softmax. The mean leaves out domains with fewer than two
    samples in the batch; without any other domain the penalty is 0.

    λ = 100, the two halves and the weight of 1 are DomainBed's.
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
