"""LISA: mixes pairs of one class across domains, or of one domain across classes."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.mixup import PartnerSource, draw_partners, mix_labels, mix_up, partners_of
from xdm_ft.core import Batch, InputPartners, Samples
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, beta, beta_quantiles, uniform


class LISA(ERM):
    """ERM on mixed samples and labels, x̃ = λ x + (1−λ) x_j and ỹ = λ y + (1−λ) y_j, λ ~ Beta(α, α) for every sample.

    With probability p_sel a batch is mixed intra-label (x_j has the class of x and another domain), else intra-domain
    (x_j has another class and the domain of x). x_j is drawn uniformly from the valid samples of the batch, or with
    `partners: all` of all training images. A sample without a valid partner is not mixed; the share of such samples is
    logged as `without_partner`. x are images, or cached features. `cutmix` pastes a box of x_j into the image x; the
    box has 1−λ of the area, before it is clipped at the borders, and λ becomes the visible share of x.

    α = 2 is the paper's. p_sel = 1 is that of its commands for domain shifts (0.5 for subpopulation shifts). Its code
    draws x_j from all training images, and for CutMix one λ and one box for the whole batch.
    """

    source = "Yao et al. 2022, Improving Out-of-Distribution Robustness via Selective Augmentation (ICML), Algorithm 1"
    min_domains = 2

    def __init__(
        self,
        setup: Setup,
        *,
        p_sel: Annotated[
            float, Field(ge=0, le=1, description="probability that a batch is mixed intra-label, else intra-domain")
        ] = 1.0,
        mix: Annotated[
            Literal["mixup", "cutmix"], Field(description="how two samples are mixed; cutmix needs images")
        ] = "mixup",
        alpha: Annotated[float, Field(gt=0, description="α of Beta(α, α); the smaller, the less is mixed")] = 2.0,
        partners: PartnerSource = "batch",
    ) -> None:
        super().__init__(setup)
        self.partners = partners
        self.p_sel: Tensor
        self.register_buffer("p_sel", torch.tensor(p_sel, dtype=torch.float32))
        self.mix = mix
        self.lam_quantiles: Tensor  # of Beta(α, α), float32 [4097]; not saved, as α determines them
        self.register_buffer("lam_quantiles", beta_quantiles(alpha), persistent=False)
        if mix == "cutmix":
            self.frozen_reason = (
                "mix: cutmix needs images, and a frozen encoder trains on cached features; set mix: mixup, or "
                "encoder.trainable: true"
            )
            self.cut_reason = (
                "mix: cutmix needs images, and a partly trained encoder trains on activations; set mix: mixup, or "
                "trainable: true"
            )

    def input_partners(self, drawn: Samples, training: Samples, steps: Tensor) -> InputPartners:
        steps = steps[:, None]  # [S,1]
        places = torch.arange(drawn.y.shape[-1], device=drawn.y.device)
        u = uniform(self.seed, steps, Stream.INPUT_PARTNERS, places)  # [S,B]
        is_intra_label = uniform(self.seed, steps, Stream.INPUT_CHOICE, 0) < self.p_sel  # one draw per batch
        intra_label = draw_partners(drawn, training, u, self.partners, same="y", other="domain")
        intra_domain = draw_partners(drawn, training, u, self.partners, same="domain", other="y")
        return InputPartners(
            *(torch.where(is_intra_label, *both) for both in zip(intra_label, intra_domain, strict=True))
        )

    def on_inputs(self, batch: Batch, step: int | Tensor) -> Batch:
        partner, _, has_partner = partners_of(batch)
        lam = beta(uniform(self.seed, step, Stream.INPUT_LAMBDA, batch.position), self.lam_quantiles)  # [B]
        lam = torch.where(has_partner, lam, 1.0)
        if self.mix == "mixup":
            return mix_up(batch, lam, self.task.num_classes)
        if partner.ndim != 4:
            raise UserError(f"lisa: {self.frozen_reason}")
        two = 2 * batch.position[:, None] + torch.arange(2, device=batch.position.device)  # [B,2]
        centre = uniform(self.seed, step, Stream.INPUT_BOX, two)
        return cut_mix(batch, lam, centre, self.task.num_classes)


def cut_mix(batch: Batch, lam: Tensor, centre: Tensor, num_classes: int) -> Batch:
    """Returns images x [B,3,H,W] with a box of their partner's pixels, and labels mixed by area (Yun et al. 2019).

    `lam` float [B]; `centre` float [B,2] in [0, 1): the boxes' centres, relative to the image's size.
    """
    partner = partners_of(batch)[0]
    height, width = batch.x.shape[-2:]
    size = torch.tensor([height, width], device=lam.device)
    first, last = box(lam, (centre * size).long(), size)  # [B,2]
    row, column = torch.arange(height, device=lam.device), torch.arange(width, device=lam.device)
    in_rows = (row >= first[:, :1]) & (row < last[:, :1])  # [B,H]
    in_columns = (column >= first[:, 1:]) & (column < last[:, 1:])  # [B,W]
    inside = in_rows[:, None, :, None] & in_columns[:, None, None, :]  # [B,1,H,W]
    left = 1 - (last - first).prod(1) / (height * width)  # λ: the visible share of x
    return batch._replace(x=torch.where(inside, partner, batch.x), targets=mix_labels(batch, left, num_classes))


def box(lam: Tensor, centre: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first pixel of boxes and the one after the last, int64 [B,2] each, clipped to the image.

    The edges of a box are √(1−λ) times those of the image: `lam` [B], `centre` and `size` (height, width) int64.
    """
    half = (size * (1 - lam[:, None]).sqrt()).long() // 2  # [B,2]
    border = torch.zeros_like(size)
    return (centre - half).clamp(border, size), (centre + half).clamp(border, size)
