"""MixStyle: mixes the styles of feature maps inside the encoder."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.encoders import Encoder
from xdm_ft.errors import UserError, plural
from xdm_ft.randomness import Stream, beta, beta_quantiles, uniform
from xdm_ft.tensors import Batch

STAGES = 2  # as in the paper, and in XDomainMix's experiments


class MixStyle(ERM):
    """ERM, with x ← σ_mix (x − μ(x)) / σ(x) + μ_mix after the encoder's first two stages, while training.

    μ_mix = λ μ(x) + (1−λ) μ(x_j), σ_mix likewise. μ and σ are mean and standard deviation over the positions of each
    channel of a map, without gradient. x_j comes from a random permutation of the batch, λ ~ Beta(α, α) for every
    sample. Each of the two stages mixes in a step with probability p. p = 0.5, α = 0.1 and ε = 1e-6 (σ² is the unbiased
    variance + ε) are the paper's.
    """

    source = "Zhou et al. 2021, Domain Generalization with MixStyle (ICLR)"
    parts_reason = (
        "it mixes the styles of a batch's samples inside the encoder, where a process or micro-batch has only its "
        "part; train it in one process with training.accumulation: 1"
    )
    frozen_reason = (
        "it changes feature maps inside the encoder, and features are cached after it; set encoder.trainable: true"
    )

    def __init__(
        self,
        setup: Setup,
        *,
        p: Annotated[float, Field(ge=0, le=1, description="probability that a stage mixes in a step")] = 0.5,
        alpha: Annotated[float, Field(gt=0, description="α of Beta(α, α); the smaller, the less is mixed")] = 0.1,
        eps: Annotated[float, Field(gt=0, description="ε added to variances")] = 1e-6,
    ) -> None:
        super().__init__(setup)
        self.p, self.alpha, self.eps = p, alpha, eps

    def stage_modules(self, encoder: Encoder) -> dict[str, nn.Module]:
        if len(encoder.stage_names) < STAGES:
            raise UserError(
                f"mixstyle: the encoder has {plural(len(encoder.stage_names), 'named stage')}, and {STAGES} are needed "
                "to mix after; use a convolutional encoder"
            )
        return {
            name: _MixStyleAt(number, int(self.seed), self.p, self.alpha, self.eps)
            for number, name in enumerate(encoder.stage_names[:STAGES])
        }


class _MixStyleAt(nn.Module):
    """`mix_style` after the `number`-th stage. Each stage has its own random draws."""

    def __init__(self, number: int, seed: int, p: float, alpha: float, eps: float) -> None:
        super().__init__()
        self.number, self.seed, self.p, self.alpha, self.eps = number, seed, p, alpha, eps

    def forward(self, x: Tensor, batch: Batch, step: int) -> Tensor:
        if uniform(self.seed, step, Stream.STYLE, self.number) >= self.p:
            return x
        key = keys_at(self.number, batch.place)
        permutation = torch.argsort(uniform(self.seed, step, Stream.STYLE_PARTNERS, key), stable=True)
        quantiles = beta_quantiles(self.alpha, key.device)
        lam = beta(uniform(self.seed, step, Stream.STYLE_LAMBDA, key), quantiles)
        return mix_style(x, permutation, lam, self.eps)


def keys_at(number: int, key: Tensor) -> Tensor:
    """Returns keys of random draws that differ between the modules in an encoder; `key` is below 2^48."""
    return key + (number << 48)


def mix_style(x: Tensor, partner: Tensor, lam: Tensor, eps: float) -> Tensor:
    """Returns maps x [B,C,h,w] with their styles mixed with those of `partner` (int64 [B]) by `lam` (float [B])."""
    mean, std = (moment.detach() for moment in moments(x, eps))  # [B,C,1,1]
    lam = lam[:, None, None, None]
    mixed_mean, mixed_std = (lam * moment + (1 - lam) * moment[partner] for moment in (mean, std))
    return ((x - mean) / std * mixed_std + mixed_mean).to(x.dtype)


def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation over the positions of each channel, float32 [B,C,1,1] each.

    std² is the unbiased variance + ε; the variance of a map of one position is 0.
    """
    x = x.float()  # autocast may have made it bf16 or fp16
    positions = x.shape[2] * x.shape[3]
    variance = x.var((2, 3), correction=min(1, positions - 1), keepdim=True)
    return x.mean((2, 3), keepdim=True), (variance + eps).sqrt()
