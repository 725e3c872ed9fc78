"""Domain shift: moves each feature from the mean of its domain to that of another, without a decomposition."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.core import Batch, Losses
from xdm_ft.runtime.randomness import Stream, uniform


class DomainShift(Algorithm):
    """loss = ½ [ℓ(c(z), y) + ℓ(c(z̃), y)], z̃ = z − μ_d + μ_d′, as XDomainMix's (8) from the first step on.

    μ_d [K] is the mean of domain d's features in the batch. d′ is uniform over the other domains in the batch, drawn
    for each sample; without any z̃ = z, and the share of such samples is logged as `without_other_domain`. Gradients
    flow through z and μ. With `per_class` μ is the mean of the domain's samples of the class y; where d′ has none, both
    means are those of the domains. The second pass of a sharpness-aware step has the same d′ and takes μ anew.

    It is the ablation that asks what XDomainMix's decomposition adds: a whole feature changes its domain.
    """

    source = "ablation of Liu et al. 2024 (IJCAI), eq. (8), with features moved between the domains' means"
    min_domains = 2
    reads_soft_labels = True

    def __init__(
        self,
        setup: Setup,
        *,
        per_class: Annotated[
            bool, Field(description="μ by domain and class; where d′ lacks the class, by domain")
        ] = False,
    ) -> None:
        super().__init__(setup)
        self.per_class = per_class

    def mixed_steps(self, steps: int) -> int:
        return steps

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        u = uniform(self.seed, step, Stream.TARGET_DOMAIN, batch.position)
        before, after = draw_domains(batch.domain, u, self.task.num_domains)
        classes = F.one_hot(batch.y, self.task.num_classes)
        moved = shift(z, before, after, classes if self.per_class else None)
        target = self.class_target(batch)
        logits = torch.cat([self.logits(z), self.logits(moved)])  # [2B,C]
        per_sample = F.cross_entropy(logits, torch.cat([target, target]), reduction="none").view(2, -1).mean(0)  # [B]
        total = self.average(per_sample, batch)
        alone = 1 - after.sum(1).float().mean()
        return Losses(total, auxiliary=total.new_zeros(()), logs={"without_other_domain": alone})


def draw_domains(domain: Tensor, u: Tensor, num_domains: int) -> tuple[Tensor, Tensor]:
    """Returns d and d′ of each sample as one-hot rows, int64 [B,D]: the ⌊u·n⌋-th of the n other domains in the batch.

    `domain` int64 [B], u in [0, 1) float [B]. Without another domain the row of d′ is 0.
    """
    before = F.one_hot(domain, num_domains)
    others = before.any(0) & (before == 0)  # [B,D]
    rank = others.cumsum(1)
    drawn = torch.minimum((u * rank[:, -1]).long(), rank[:, -1] - 1)  # the float32 product must not round up to n
    return before, (others & (rank == drawn[:, None] + 1)).long()


def shift(z: Tensor, before: Tensor, after: Tensor, classes: Tensor | None = None) -> Tensor:
    """Returns z − μ_d + μ_d′ [B,K], from z [B,K] and one-hot d, d′ [B,D]; where the row of d′ is 0, z.

    `classes`, one-hot [B,C]: μ is the mean of domain and class, and of the domain where d′ lacks the sample's class.
    """
    moved = _shift(z, before, after)
    if classes is None:
        return moved
    of_class = [(domains[:, :, None] * classes[:, None]).flatten(1) for domains in (before, after)]  # [B,D·C]
    has_class = (of_class[1] * of_class[0].sum(0)).any(1)  # [B]
    return torch.where(has_class[:, None], _shift(z, *of_class), moved)


def _shift(z: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Returns `shift` for groups of samples, one-hot [B,G]."""
    means = before.T.to(z.dtype) @ z / before.sum(0).clamp(min=1)[:, None]  # [G,K]
    return z + (after - before * after.sum(1, keepdim=True)).to(z.dtype) @ means
