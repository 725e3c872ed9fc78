"""RSC (representation self-challenging): mutes the features that the true class depends on most."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.core import Batch, Losses
from xdm_ft.heads.linear import Linear
from xdm_ft.xdomainmix.masks import as_tensor, specific_mask, target_gradient


class RSC(Algorithm):
    """loss = ℓ(c(z ⊙ m), y), m = 0 where g = ∂v_y/∂z is at least its percentile 100 (1 − p), else m = 1.

    g is the gradient of the true class's logit; for a linear head it is the row W[y], without a backward pass. The
    percentile is over the features of the sample, and m mutes features: it sets them to 0. A sample is muted only if
    the true class's probability falls by enough: softmax(c(z))_y − softmax(c(z ⊙ m))_y must reach the percentile
    100 (1 − p_b) over the batch; else the sample's m is 1. Percentiles are interpolated linearly, in exact arithmetic.
    In a batch of one sample this sample is muted. Gradients flow through the muted z and not through m.

    The paper mutes channels or positions of a feature map. A pooled z has channels only; the gradient of a map's
    channel, averaged over space, ranks channels as W[y] does. p = p_b = 1/3 is the paper's and DomainBed's.
    """

    source = "Huang et al. 2020, Self-Challenging Improves Cross-Domain Generalization (ECCV), eq. (1)-(5)"
    # DomainBed's ranges (hparams_registry.py)
    search_ranges = {"feature_drop": {"uniform": (0.001, 0.5)}, "batch_drop": {"uniform": (0.001, 0.5)}}

    def __init__(
        self,
        setup: Setup,
        *,
        feature_drop: Annotated[
            float, Field(gt=0, lt=1, description="p, fraction of a sample's features to mute: the largest gradients")
        ] = 1 / 3,
        batch_drop: Annotated[
            float,
            Field(gt=0, le=1, description="p_b, fraction of the batch to mute: the largest falls in probability"),
        ] = 1 / 3,
    ) -> None:
        super().__init__(setup)
        self.drops: Tensor  # p and p_b as fractions, int64 [2,2], so that heads of a bank may differ in them
        self.register_buffer("drops", as_tensor([as_fraction(feature_drop), as_fraction(batch_drop)]), persistent=False)

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        kept = self.kept(z, batch.y)
        logits = self.both_logits(z, kept)
        with torch.no_grad():
            before, muted = (self.true_probability(v, batch.y) for v in logits)
        spared = specific_mask(muted - before, self.drops[1])  # bool [B], from minus the fall
        return self.losses(logits, batch, kept, spared)

    def loss_at_perturbed(
        self, z: Tensor, batch: Batch, step: int | Tensor, first_pass_draws: Mapping[str, Tensor]
    ) -> Losses:
        kept, spared = first_pass_draws["kept"], first_pass_draws["spared"]
        return self.losses(self.both_logits(z, kept), batch, kept, spared)

    def kept(self, z: Tensor, y: Tensor) -> Tensor:
        """Returns m, bool [B,K]: g < its (1−p)-quantile is equivalent to −g > its p-quantile."""
        part = self.drops[0]
        if isinstance(self.head, Linear):  # g = W[y]: one row serves all samples of its class
            return specific_mask(-self.head.weight, part)[y]
        return specific_mask(-target_gradient(z, self.head, y), part)

    def both_logits(self, z: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Returns c(z) and c(z ⊙ m), [B,C] each."""
        # m as bytes: on a CPU a product with bools takes fifteen times as long
        return self.logits(z), self.logits(z * kept.to(torch.uint8))

    def losses(self, logits: tuple[Tensor, Tensor], batch: Batch, kept: Tensor, spared: Tensor) -> Losses:
        chosen = torch.where(spared[:, None], *logits)
        total = self.average(F.cross_entropy(chosen, batch.y, reduction="none"), batch)
        return Losses(total, auxiliary=total.new_zeros(()), first_pass_draws={"kept": kept, "spared": spared})

    @staticmethod
    def true_probability(logits: Tensor, y: Tensor) -> Tensor:
        return logits.softmax(1).gather(1, y[:, None])[:, 0]  # [B]


def as_fraction(part: float) -> Fraction:
    """Returns the simple fraction that a float stands for: 1/3 is a third, not the float below it, as ranks need."""
    return Fraction(part).limit_denominator(1000)
