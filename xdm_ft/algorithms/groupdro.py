"""GroupDRO: gives the domains with the largest losses the largest weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.core import Batch, Losses


class GroupDRO(Algorithm):
    """loss = Σ_d q_d L_d, before it q_d ← q_d exp(η L_d) / Σ_e q_e exp(η L_e); L_d: mean cross-entropy of domain d.

    L_d is that of the batch. q starts uniform. No gradient flows through q. It is updated once per step: the second
    pass of a sharpness-aware step uses that of the first. Domains are the groups, so `loss_average` has no effect. A
    domain without samples in the batch adds nothing to the loss, and only the normalisation changes its q_d, as in the
    paper's Algorithm 1, which draws one group per step.

    η = 0.01: the paper's, and DomainBed's.
    """

    source = "Sagawa et al. 2020, Distributionally Robust Neural Networks for Group Shifts (ICLR), algorithm 1"
    # DomainBed's range (hparams_registry.py)
    search_ranges = {"eta": {"log_uniform": (1e-3, 1e-1)}}
    min_domains = 2

    def __init__(
        self,
        setup: Setup,
        *,
        eta: Annotated[
            float, Field(ge=0, description="η, step size of the domain weights q; 0: all stay equal")
        ] = 0.01,
    ) -> None:
        super().__init__(setup)
        domains = setup.task.num_domains
        self.eta: Tensor
        self.register_buffer("eta", torch.tensor(eta, dtype=torch.float32))
        self.q: Tensor
        self.register_buffer("q", torch.full((domains,), 1 / domains))  # [D]

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        means = self.domain_losses(z, batch)
        q = (self.q.log() + self.eta * means.detach()).softmax(0)  # in logarithms: exp would overflow
        return self.weighted(means, q)

    def loss_at_perturbed(
        self, z: Tensor, batch: Batch, step: int | Tensor, first_pass_draws: Mapping[str, Tensor]
    ) -> Losses:
        return self.weighted(self.domain_losses(z, batch), first_pass_draws["q"])

    def domain_losses(self, z: Tensor, batch: Batch) -> Tensor:
        """Returns L_d [D]; 0 for a domain without samples in the batch."""
        per_sample = F.cross_entropy(self.logits(z), batch.y, reduction="none")
        return self.by_domain(per_sample, batch)[0]

    def weighted(self, means: Tensor, q: Tensor) -> Losses:
        total = q @ means
        logs = {"largest_weight": q.max()}
        return Losses(total, auxiliary=total.new_zeros(()), buffers={"q": q}, logs=logs, first_pass_draws={"q": q})
