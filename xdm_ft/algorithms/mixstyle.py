"""MixStyle: mixes the styles of feature maps inside the encoder."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.core import Batch
from xdm_ft.encoders import Encoder
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.randomness import Stream, beta, beta_quantiles, uniform
from xdm_ft.xdomainmix.mixing import pick

PartnerKind = Literal["random", "other_domain"]


class MixStyle(ERM):
    """ERM, with x ← σ_mix (x − μ(x)) / σ(x) + μ_mix in the encoder, μ_mix = λ μ(x) + (1−λ) μ(x_j), σ_mix likewise.

    This is after some stages, while training. μ and σ are mean and standard deviation over the positions of each
    channel of a map, without gradient. x_j comes from a random permutation of the batch (the authors' default), or is
    drawn uniformly from the batch's samples of other domains (theirs is so for two domains, whose halves of the batch
    are swapped); a sample without one is not mixed. λ ~ Beta(α, α) for every sample. Each stage mixes in a step with
    probability p. p = 0.5, α = 0.1 and ε = 1e-6 (σ² is the unbiased variance + ε) are the paper's. Its stages differ
    between data sets: [1, 2, 3] on PACS, [1, 2] on OfficeHome; the benchmarks of XDomainMix have the first two.
    """

    source = "Zhou et al. 2021, Domain Generalization with MixStyle (ICLR)"
    parts_reason = (
        "it mixes styles over a whole batch, but a process or micro-batch holds only a part; train it in one "
        "process with training.accumulation: 1"
    )
    frozen_reason = (
        "it changes feature maps inside the encoder, but cached features come after it; set encoder.trainable: true"
    )

    two_domains_if = {"partners": "other_domain"}

    def __init__(
        self,
        setup: Setup,
        *,
        p: Annotated[float, Field(ge=0, le=1, description="probability that a stage mixes in a step")] = 0.5,
        alpha: Annotated[float, Field(gt=0, description="α of Beta(α, α); the smaller, the less is mixed")] = 0.1,
        eps: Annotated[float, Field(gt=0, description="ε added to variances")] = 1e-6,
        stages: Annotated[
            tuple[Annotated[int, Field(ge=1)], ...],
            Field(min_length=1, description="stages of the encoder to mix after, counted from 1"),
        ] = (1, 2),
        partners: Annotated[
            PartnerKind, Field(description="x_j of any domain, by a random permutation; or of another domain than x")
        ] = "random",
    ) -> None:
        super().__init__(setup)
        if len({*stages}) < len(stages):
            raise UserError(f"mixstyle: stages {[*stages]} has one twice; name each stage once")
        if partners == "other_domain" and setup.task.num_domains < 2:  # a draw of a search
            raise UserError("mixstyle: partners: other_domain needs two training domains, and here is one; use random")
        self.p, self.alpha, self.eps, self.stages, self.partners = p, alpha, eps, stages, partners

    def stage_modules(self, encoder: Encoder) -> dict[str, nn.Module]:
        count = len(encoder.stage_names)
        if max(self.stages) > count:
            raise UserError(
                f"mixstyle: stages {[*self.stages]}: the encoder has {plural(count, 'named stage')}; "
                + ("name lower ones" if count else "use a convolutional encoder")
            )
        settings = int(self.seed), self.p, self.alpha, self.eps, self.partners
        return {encoder.stage_names[stage - 1]: _MixStyleAt(stage - 1, *settings) for stage in self.stages}


class _MixStyleAt(nn.Module):
    """`mix_style` after the `number`-th stage, counted from 0. Each stage has its own random draws."""

    def __init__(self, number: int, seed: int, p: float, alpha: float, eps: float, partners: PartnerKind) -> None:
        super().__init__()
        self.number, self.seed, self.p, self.alpha, self.eps = number, seed, p, alpha, eps
        self.partners = partners

    def forward(self, x: Tensor, batch: Batch, step: int) -> Tensor:
        if uniform(self.seed, step, Stream.STYLE, self.number) >= self.p:
            return x
        key = keys_at(self.number, batch.position)
        u = uniform(self.seed, step, Stream.STYLE_PARTNERS, key)
        if self.partners == "random":
            # stable: equal draws have one order on every kind of device
            partner = torch.argsort(u, stable=True)
        else:
            partner, _ = pick(batch.domain[:, None] != batch.domain, u)  # x itself if there is none
        quantiles = beta_quantiles(self.alpha, key.device)
        lam = beta(uniform(self.seed, step, Stream.STYLE_LAMBDA, key), quantiles)
        return mix_style(x, partner, lam, self.eps)


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
