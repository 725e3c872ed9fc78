"""ERM: empirical risk minimisation, the baseline."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.core import Batch, Losses


class ERM(Algorithm):
    """loss = 1/N Σ_i 1/n_i Σ_j ℓ(c(z_j), y_j), ℓ the cross-entropy, N domains of n_i samples.

    Labels are `batch.targets` (soft) if set, else `batch.y`. With class weights w a mean over samples is
    Σ_j Σ_c w_c t_jc (−log p_jc) / Σ_j Σ_c w_c t_jc. For one-hot t this is torch's cross-entropy; for soft labels torch
    has the same numerator and divides by the batch size instead. It has no settings.
    """

    source = "Vapnik 1999; XDomainMix paper, L_erm"
    loss_over = "sample"

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        target = batch.y if batch.targets is None else self.weighted_labels(batch.targets)
        per_sample = F.cross_entropy(self.logits(z), target, reduction="none")  # [B]
        total = self.average(per_sample, batch)
        logs = {} if batch.has_partner is None else {"without_partner": 1 - batch.has_partner.float().mean()}
        return Losses(total, auxiliary=total.new_zeros(()), logs=logs)

    def weighted_labels(self, targets: Tensor) -> Tensor:
        """Returns w_c t_c / Σ_c w_c t_c for soft labels t [B,C], 0 where the sum is 0.

        `average` multiplies each sample's loss by the sum, so the product is the loss with class weights.
        """
        if self.class_weight is None:
            return targets
        weighted = targets.to(self.class_weight.dtype) * self.class_weight
        total = weighted.sum(1, keepdim=True)
        return weighted / torch.where(total > 0, total, 1)
