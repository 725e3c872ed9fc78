"""RSC: representation self-challenging."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup, linear
from xdm_ft.tensors import Batch, Losses
from xdm_ft.xdomainmix import specific_mask


class RSC(Algorithm):
    """loss = ℓ(c(z ⊙ m), y): the features that the true class leans on are muted, where that hurts most.

    g = ∂v_y/∂z, the gradient of the true class's logit; for the linear head it is the row W[y], with no backward pass.
    m = 0 where g ≥ its percentile 100 (1 − p) over the features of the sample, else 1. A sample is muted only if its
    fall in the true class's probability, softmax(c(z))_y − softmax(c(z ⊙ m))_y, reaches the percentile 100 (1 − p_b)
    over the batch; else its m is 1. Percentiles are interpolated linearly, in exact arithmetic. In a batch of one
    sample that sample is muted. No gradient flows through m; it does through the muted z.

    The paper mutes channels, or positions of a feature map; only channels are left in a pooled z, and for them the
    gradient of a map's channel, averaged over space, ranks as W[y] does. p = p_b = 1/3: the paper's, and DomainBed's.
    """

    source = "Huang et al. 2020, Self-Challenging Improves Cross-Domain Generalization (ECCV), eq. (1)-(5)"
    # DomainBed's ranges (hparams_registry.py)
    search_ranges = {"feature_drop": {"uniform": (0.001, 0.5)}, "batch_drop": {"uniform": (0.001, 0.5)}}

    def __init__(
        self,
        setup: Setup,
        *,
        feature_drop: Annotated[
            float, Field(gt=0, lt=1, description="p, part of a sample's features that is muted, by largest gradient")
        ] = 1 / 3,
        batch_drop: Annotated[
            float,
            Field(gt=0, le=1, description="p_b, part of the batch's samples that is muted, by what it costs them"),
        ] = 1 / 3,
    ) -> None:
        super().__init__(setup)
        self.feature_drop, self.batch_drop = feature_drop, batch_drop

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        # g < its (1−p)-quantile is −g > its p-quantile; a row of W serves all samples of its class
        kept = specific_mask(-self.head.weight, exact(self.feature_drop))[batch.y]  # bool [B,K]
        logits = self.both_logits(z, kept)
        with torch.no_grad():
            whole, muted = (self.true_probability(v, batch.y) for v in logits)
        spared = specific_mask(muted - whole, exact(self.batch_drop))  # bool [B], of −fall
        return self.losses(logits, batch, kept, spared)

    def second_pass(self, z: Tensor, batch: Batch, step: int, held: Mapping[str, Tensor]) -> Losses:
        """The loss with given masks."""
        return self.losses(self.both_logits(z, held["kept"]), batch, held["kept"], held["spared"])

    def both_logits(self, z: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """c(z) and c(z ⊙ m), [B,C] each. As bytes, since a product with bools takes fifteen times as long on a CPU."""
        return linear(z, self.head), linear(z * kept.view(torch.uint8), self.head)

    def losses(self, logits: tuple[Tensor, Tensor], batch: Batch, kept: Tensor, spared: Tensor) -> Losses:
        chosen = torch.where(spared[:, None], *logits)
        total = self.average(F.cross_entropy(chosen, batch.y, reduction="none"), batch)
        return Losses(total, auxiliary=total.new_zeros(()), held={"kept": kept, "spared": spared})

    @staticmethod
    def true_probability(logits: Tensor, y: Tensor) -> Tensor:
        return logits.softmax(1).gather(1, y[:, None])[:, 0]  # [B]


def exact(part: float) -> Fraction:
    """1/3 as a third and not as the float below it: percentiles count ranks."""
    return Fraction(part).limit_denominator(1000)
