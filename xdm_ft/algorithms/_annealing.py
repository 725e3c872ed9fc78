"""The base of IRM and VREx: risk plus a penalty whose weight changes after a number of steps."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.tensors import Batch, Losses


class AnnealedPenalty(Algorithm):
    """loss = R + w · penalty, R the average cross-entropy; w is 1 for `anneal_steps` steps, then `penalty_weight`.

    The optimizer resets its moments when w changes: Adam's second moments of small gradients would scale the first
    large ones too little (as in DomainBed). Earlier steps can not be selected, as they trained with w = 1.
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
            is_annealed = torch.full((), is_annealed, device=penalty.device)
        total = risk + torch.where(is_annealed, self.penalty_weight, 1.0) * penalty
        return Losses(total, auxiliary=total.new_zeros(()), logs={"risk": risk, "penalty": penalty})

    def resets_optimizer(self, step: int) -> bool:
        return step == self.anneal_steps
