"""ERM: empirical risk minimisation, the baseline."""

from __future__ import annotations

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
    reads_soft_labels = True

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        per_sample = F.cross_entropy(self.logits(z), self.class_target(batch), reduction="none")  # [B]
        total = self.average(per_sample, batch)
        logs = {} if batch.has_partner is None else {"without_partner": 1 - batch.has_partner.float().mean()}
        return Losses(total, auxiliary=total.new_zeros(()), logs=logs)
