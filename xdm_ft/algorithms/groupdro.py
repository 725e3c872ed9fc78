"""GroupDRO: the worst domain weighs most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup, linear
from xdm_ft.tensors import Batch, Losses


class GroupDRO(Algorithm):
    """loss = Σ_d q_d L_d, L_d the mean cross-entropy of domain d in the batch; q by exponentiated ascent.

    At every step, before the loss: q_d ← q_d exp(η L_d), then q ← q / Σ q. q starts uniform. No gradient flows through
    it, it moves once a step, and the second pass of a sharpness-aware step keeps that of the first. Domains are the
    groups, so `loss_average` has no say. A domain that a batch leaves out adds nothing to the loss, and of q_d but
    normalisation moves nothing, as in the paper's Algorithm 1, which draws one group a step.

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
            float, Field(ge=0, description="step size of the domains' weights; 0: all weigh the same")
        ] = 0.01,
    ) -> None:
        super().__init__(setup)
        domains = setup.task.num_domains
        self.eta: Tensor
        self.register_buffer("eta", torch.tensor(eta, dtype=torch.float32))
        self.q: Tensor
        self.register_buffer("q", torch.full((domains,), 1 / domains))  # [D]

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        means = self.domain_losses(z, batch)
        q = (self.q.log() + self.eta * means.detach()).softmax(0)  # in logarithms: exp would overflow
        return self.weighted(means, q)

    def second_pass(self, z: Tensor, batch: Batch, step: int, held: Mapping[str, Tensor]) -> Losses:
        return self.weighted(self.domain_losses(z, batch), held["q"])

    def domain_losses(self, z: Tensor, batch: Batch) -> Tensor:
        """L_d [D], 0 where the batch has nothing of domain d."""
        per_sample = F.cross_entropy(linear(z, self.head), batch.y, reduction="none")
        return self.by_domain(per_sample, batch)[0]

    def weighted(self, means: Tensor, q: Tensor) -> Losses:
        total = q @ means
        return Losses(
            total,
            auxiliary=total.new_zeros(()),
            buffers={"q": q},
            logs={"largest_weight": q.max()},
            held={"q": q},
        )
