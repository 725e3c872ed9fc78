"""ERM: empirical risk minimisation, the baseline."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Algorithm, linear
from xdm_ft.tensors import Batch, Losses


class ERM(Algorithm):
    """loss = 1/N Σ_i 1/n_i Σ_j ℓ(c(z_j), y_j), ℓ the cross-entropy, N domains of n_i samples.

    Labels are `batch.targets` (soft) where there are any, else `batch.y`. Where inputs are mixed the share of samples
    without a partner is logged. It has no settings.
    """

    source = "Vapnik 1999; XDomainMix paper, L_erm"
    loss_over = "sample"

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        target = batch.y if batch.targets is None else batch.targets
        per_sample = F.cross_entropy(linear(z, self.head), target, reduction="none")  # [B]
        total = self.average(per_sample, batch)
        found = batch.has_partner
        logs = {} if found is None else {"without_partner": 1 - found.float().mean()}
        return Losses(total, auxiliary=total.new_zeros(()), logs=logs)
