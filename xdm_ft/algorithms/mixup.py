"""Mixup: convex combinations of samples and of their labels."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.randomness import Stream, beta, uniform
from xdm_ft.tensors import Batch
from xdm_ft.xdomainmix.partners import pick


class Mixup(ERM):
    """ERM on x̃ = λ x + (1−λ) x_j and ỹ = λ y + (1−λ) y_j (one-hot y), λ ~ Beta(α, α) for every sample.

    x are images, or features where they are cached. x_j is another sample of the batch: any, by a random permutation
    of the batch (Zhang et al. 2018, whose code has one λ per batch), or one of another domain, as in DomainBed's Mixup;
    a sample without such a partner, or that the permutation leaves in its place, stays as it is, and their share is
    logged as `without_partner`. α = 0.2 is DomainBed's, and the paper's range on ImageNet is 0.1 to 0.4. In the mean
    over domains a mixed sample counts for the domain of x.
    """

    source = "Zhang et al. 2018, mixup: Beyond Empirical Risk Minimization (ICLR); between domains: DomainBed"

    def __init__(
        self,
        setup: Setup,
        *,
        alpha: Annotated[float, Field(gt=0, description="α of Beta(α, α); small: nearly unmixed")] = 0.2,
        partners: Annotated[
            Literal["any", "other_domain"], Field(description="which samples of the batch x_j is drawn from")
        ] = "any",
    ) -> None:
        super().__init__(setup)
        self.alpha, self.partners = alpha, partners

    def on_inputs(self, batch: Batch, step: int) -> Batch:
        noise = uniform(self.seed, step, Stream.INPUT_PARTNERS, batch.index)  # [B]
        lam = beta(uniform(self.seed, step, Stream.INPUT_LAMBDA, batch.index), self.alpha)  # [B]
        if self.partners == "any":
            partner = torch.argsort(noise, stable=True)
            has_partner = partner != torch.arange(len(partner), device=partner.device)
        else:
            partner, has_partner = pick(batch.domain[:, None] != batch.domain, noise)
            lam = torch.where(has_partner, lam, 1.0)
        return mix_up(batch, partner, lam, self.task.num_classes)._replace(partnered=has_partner)


def mix_up(batch: Batch, partner: Tensor, lam: Tensor, num_classes: int) -> Batch:
    """λ times a sample and its one-hot label, plus 1−λ times its partner's. `partner` int64 [B], `lam` float [B]."""
    of_x = lam.view(-1, *(1 for _ in batch.x.shape[1:])).to(batch.x.dtype)  # [B,1,…]
    return batch._replace(
        x=of_x * batch.x + (1 - of_x) * batch.x[partner],
        targets=mixed_labels(batch.y, partner, lam, num_classes),
    )


def mixed_labels(y: Tensor, partner: Tensor, lam: Tensor, num_classes: int) -> Tensor:
    """λ y + (1−λ) y_j of one-hot labels, [B,C]."""
    labels = F.one_hot(y, num_classes).to(lam.dtype)
    return lam[:, None] * labels + (1 - lam[:, None]) * labels[partner]
