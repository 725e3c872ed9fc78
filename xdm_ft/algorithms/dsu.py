"""DSU: perturbs the statistics of feature maps by as much as they vary over the batch."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.mixstyle import keys_at, moments
from xdm_ft.core import Batch
from xdm_ft.encoders import Encoder
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, normal, uniform


class DSU(ERM):
    """ERM, with x ← γ (x − μ(x)) / σ(x) + β in the encoder, β = μ(x) + ε_μ Σ_μ, γ = σ(x) + ε_σ Σ_σ, while training.

    ε_μ, ε_σ ~ N(0, 1) for every sample and channel. μ and σ are mean and standard deviation over a map's positions, Σ_μ
    and Σ_σ the standard deviations of μ and σ over the batch. Gradients flow through all of them. The places are after
    the first convolution, the max-pool and every stage (in a DenseNet: transition); each place draws in a step with
    probability p. p = 0.5, ε = 1e-6 (added to all variances, which are unbiased) and the places are the paper's.
    """

    source = "Li et al. 2022, Uncertainty Modeling for Out-of-Distribution Generalization (ICLR)"
    parts_reason = (
        "it measures statistics over a whole batch, but a process or micro-batch holds only a part; train it in "
        "one process with training.accumulation: 1"
    )
    frozen_reason = (
        "it changes feature maps inside the encoder, but cached features come after it; set encoder.trainable: true"
    )

    def __init__(
        self,
        setup: Setup,
        *,
        p: Annotated[float, Field(ge=0, le=1, description="probability that a place draws statistics in a step")] = 0.5,
        eps: Annotated[float, Field(gt=0, description="ε added to variances")] = 1e-6,
    ) -> None:
        super().__init__(setup)
        self.p, self.eps = p, eps

    def stage_modules(self, encoder: Encoder) -> dict[str, nn.Module]:
        names = (*encoder.stem_names, *(encoder.transition_names or encoder.stage_names))
        if not names:
            raise UserError(
                "dsu: the encoder has no named stages to draw statistics after; use a convolutional encoder"
            )
        return {name: _DSUAt(number, int(self.seed), self.p, self.eps) for number, name in enumerate(names)}


class _DSUAt(nn.Module):
    """`redraw` at the `number`-th place. Each place has its own random draws."""

    def __init__(self, number: int, seed: int, p: float, eps: float) -> None:
        super().__init__()
        self.number, self.seed, self.p, self.eps = number, seed, p, eps

    def forward(self, x: Tensor, batch: Batch, step: int) -> Tensor:
        if uniform(self.seed, step, Stream.STYLE, self.number) >= self.p:
            return x
        channels = x.shape[1]
        of_channel = torch.arange(2 * channels, device=x.device)
        key = keys_at(self.number, 2 * channels * batch.position[:, None] + of_channel)  # [B,2C]
        noise = normal(self.seed, step, Stream.STYLE_NOISE, key)
        return redraw(x, noise[:, :channels], noise[:, channels:], self.eps)


def redraw(x: Tensor, noise_mean: Tensor, noise_std: Tensor, eps: float) -> Tensor:
    """Returns maps x [B,C,h,w] with redrawn statistics; `noise_mean` and `noise_std` are ε_μ and ε_σ [B,C]."""
    mean, std = moments(x, eps)  # [B,C,1,1]
    beta = mean + noise_mean[:, :, None, None] * spread(mean, eps)
    gamma = std + noise_std[:, :, None, None] * spread(std, eps)
    return ((x - mean) / std * gamma + beta).to(x.dtype)


def spread(statistic: Tensor, eps: float) -> Tensor:
    """Returns the standard deviation over the batch, [B,C,1,1] → [1,C,1,1]; a batch of one sample has variance 0."""
    variance = statistic.var(0, correction=min(1, len(statistic) - 1), keepdim=True)
    return (variance + eps).sqrt()
