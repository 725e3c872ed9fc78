"""ERM: empirical risk minimisation, the baseline."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.tensors import Batch, Losses


class ERM(Algorithm):
    """loss = 1/N Σ_i 1/n_i Σ_j ℓ(c(z_j), y_j), ℓ the cross-entropy, N domains of n_i samples.

    Labels are `batch.targets` (soft) where there are any, else `batch.y`. With class weights w, means are Σ_j Σ_c w_c
    t_jc (−log p_jc) / Σ_j Σ_c w_c t_jc, the sums as in torch's cross-entropy, and for one-hot t what it is for labels;
    of soft ones torch divides by the batch size instead. It has no settings.
    """

    source = "Vapnik 1999; XDomainMix paper, L_erm"
    loss_over = "sample"

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        target = batch.y if batch.targets is None else self.weighted_labels(batch.targets)
        per_sample = F.cross_entropy(self.logits(z), target, reduction="none")  # [B]
        total = self.average(per_sample, batch)
        found = batch.has_partner
        logs = {} if found is None else {"without_partner": 1 - found.float().mean()}
        return Losses(total, auxiliary=total.new_zeros(()), logs=logs)

    def weighted_labels(self, targets: Tensor) -> Tensor:
        """w_c t_c / Σ_c w_c t_c of soft labels t [B,C]: `average` weighs samples by Σ_c w_c t_c; 0 where that is 0."""
        if self.class_weight is None:
            return targets
        weighted = targets.to(self.class_weight.dtype) * self.class_weight
        total = weighted.sum(1, keepdim=True)
        return weighted / torch.where(total > 0, total, 1)
