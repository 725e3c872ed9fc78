"""XDomainMix: cross-domain feature augmentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm, Setup, linear, linear_head, product
from xdm_ft.errors import UserError
from xdm_ft.randomness import Stream, uniform
from xdm_ft.tensors import Batch, Losses, Parts
from xdm_ft.xdomainmix import (
    Partners,
    domain_quantile,
    draw_partners,
    linear_scores,
    mix,
    one_pass,
    specific_mask,
)
from xdm_ft.xdomainmix.partners import OtherPartner

CLASS_QUANTILE = 0.5
"""The quantile behind τ_c."""


class Draws(NamedTuple):
    """The random choices of one step."""

    partners: Partners
    lam: Tensor  # λ1 and λ2 as they act, [B,2]: 1 without a partner
    keep: Tensor  # bool [B]; False discards Z_c,d


class XDomainMix(Algorithm):
    """loss = ½ [ℓ(c(z), y) + ℓ(c(z̃), y)] after a warm-up of plain ERM; z̃ is `xdm_ft.xdomainmix.mix`. (8)

    A domain head d learns the domain from detached z throughout, as the auxiliary loss. Masks come from the scores of
    both heads, τ_c at the 50% quantile and τ_d on its cycle. Defaults are the paper's (p_discard 0.2), and its
    proportions on DomainBed for the step counts (3000 of 5000 steps of warm-up, n = 100).
    """

    source = "Liu et al. 2024, Cross-Domain Feature Augmentation for Domain Generalization (IJCAI), eq. (1)-(8)"
    # the values that the authors' own code draws from
    search_ranges = {"p_discard": {"choice": (0.2, 0.3, 0.4)}}
    min_domains = 2
    auxiliary = ("domain_head",)

    def __init__(
        self,
        setup: Setup,
        *,
        warmup_steps: Annotated[
            int | None, Field(ge=0, description="steps of plain ERM before mixing; null: 60% of the steps")
        ] = None,
        quantile_steps: Annotated[
            int | None, Field(ge=1, description="n, steps that each value of τ_d is held; null: steps // 50")
        ] = None,
        p_discard: Annotated[
            float, Field(ge=0, le=1, description="probability that Z_c,d is dropped from z̃; 0: discarding off")
        ] = 0.2,
        discard_per: Annotated[
            Literal["sample", "batch"], Field(description="drop Z_c,d of each sample on its own, or of all at once")
        ] = "sample",
        mix_class_specific: Annotated[bool, Field(description="mix Z_c,d with that of x_i")] = True,
        mix_class_generic: Annotated[bool, Field(description="mix Z_¬c,d with that of x_j")] = True,
        other_partner: Annotated[
            OtherPartner, Field(description="which samples x_j is drawn from, seen from x; same_as_x_i: x_i itself")
        ] = "other_class_other_domain",
        partners: Annotated[
            Literal["local", "global"],
            Field(description="global: x_i, x_j from the whole batch; local: from one process's or micro-batch's part"),
        ] = "global",
        domain_head_augmented: Annotated[
            bool, Field(description="train d on z̃ too, with λ-weighted soft domain labels and binary cross-entropy")
        ] = False,
    ) -> None:
        super().__init__(setup)
        self.warmup_steps = setup.steps * 3 // 5 if warmup_steps is None else warmup_steps
        if self.warmup_steps >= setup.steps:
            raise UserError(
                f"xdomainmix: warmup_steps {self.warmup_steps} leaves nothing to mix in {setup.steps} training steps "
                "(that is ERM); lower warmup_steps or raise training.steps"
            )
        self.quantile_steps = max(1, setup.steps // 50) if quantile_steps is None else quantile_steps
        self.p_discard: Tensor
        self.register_buffer("p_discard", torch.tensor(p_discard, dtype=torch.float32))
        self.discard_per = discard_per
        self.mix_class_specific, self.mix_class_generic = mix_class_specific, mix_class_generic
        self.other_partner, self.domain_head_augmented = other_partner, domain_head_augmented
        self.loss_over = "batch" if partners == "global" else "part"
        self.first_selectable_step = self.warmup_steps + 1
        self.domain_head = linear_head(setup.width, setup.task.num_domains, setup.seed, Stream.DOMAIN_INIT)

    def mixed_steps(self, steps: int) -> int:
        return max(0, steps - self.warmup_steps)

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        if step >= self.warmup_steps:
            return self.second_pass(z, batch, step, self.masks(z, batch, step))
        of_class = F.cross_entropy(linear(z, self.head), batch.y, reduction="none")  # [B]
        of_domain = self.domain_loss(linear(z.detach(), self.domain_head), batch)  # [B]
        return Losses(*self.averages(of_class, of_domain, batch))

    def second_pass(self, z: Tensor, batch: Batch, step: int, held: Mapping[str, Tensor]) -> Losses:
        """The loss (8) with given masks."""
        draws = self.draws(batch, step)
        logits = mixed_logits(z, self.head, held, draws)  # c(z) and c(z̃), [2B,C]
        of_class = F.cross_entropy(logits, batch.y.repeat(2), reduction="none").view(2, -1).mean(0)  # [B]
        if self.domain_head_augmented:
            clean, mixed = mixed_logits(z.detach(), self.domain_head, held, draws).chunk(2)  # [B,D] each
            on_mixed = soft_loss(mixed, mixed_domains(batch, draws, self.task.num_domains))
            of_domain = self.domain_loss(clean, batch)
            of_domain = torch.where(draws.keep, (of_domain + on_mixed) / 2, of_domain)
        else:
            of_domain = self.domain_loss(linear(z.detach(), self.domain_head), batch)
        found = torch.stack([draws.partners.has_same, draws.partners.has_other]).float().mean(1)  # [2]
        without_same, without_other = (1 - found).unbind()
        return Losses(
            *self.averages(of_class, of_domain, batch),
            logs={"without_same_partner": without_same, "without_other_partner": without_other},
            held=dict(held),
        )

    def domain_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """ℓ(d(z), domain), [B]: cross-entropy, or binary cross-entropy where d learns soft labels besides."""
        if self.domain_head_augmented:
            return soft_loss(logits, F.one_hot(batch.domain, self.task.num_domains).to(logits.dtype))
        return F.cross_entropy(logits, batch.domain, reduction="none")

    def averages(self, class_losses: Tensor, domain_losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The means of losses [B], each by `loss_average`; class weights are for those of classes alone."""
        plain, weight = self.mean_weights(batch, None, class_losses.dtype), self.sample_weight(batch)
        of_class = plain if weight is None else self.mean_weights(batch, weight, class_losses.dtype)
        return class_losses @ of_class, domain_losses @ plain

    def masks(self, z: Tensor, batch: Batch, step: int) -> dict[str, Tensor]:
        """M_c and M_d at a step after the warm-up, bool [B,K]. (1)(2)(3)"""
        quantile = domain_quantile(step - self.warmup_steps, self.quantile_steps)
        of_class, of_domain = self.head.weight, self.domain_head.weight
        if one_pass.available(z):
            masks = one_pass.linear_masks(z, of_class, of_domain, batch.y, batch.domain, CLASS_QUANTILE, quantile)
            return dict(zip(("class_mask", "domain_mask"), masks, strict=True))
        return {
            "class_mask": specific_mask(linear_scores(z, of_class, batch.y), CLASS_QUANTILE),
            "domain_mask": specific_mask(linear_scores(z, of_domain, batch.domain), quantile),
        }

    def draws(self, batch: Batch, step: int) -> Draws:
        """Partners, λ and discard: functions of the seed, the step and the places in the batch."""
        if one_pass.available(batch.x):
            return Draws(
                *one_pass.draw(
                    batch.y, batch.domain, batch.place, self.seed, step, self.p_discard, self.other_partner,
                    self.discard_per == "batch", self.mix_class_specific, self.mix_class_generic,
                )
            )  # fmt: skip
        two = 2 * batch.place[:, None] + torch.arange(2, device=batch.place.device)  # [B,2]
        noise = uniform(self.seed, step, Stream.PARTNERS, two)
        partners = draw_partners(batch.y, batch.domain, noise, self.other_partner)
        mixed = partners.has_same & self.mix_class_specific, partners.has_other & self.mix_class_generic
        lam = torch.where(torch.stack(mixed, 1), uniform(self.seed, step, Stream.LAMBDA, two), 1.0)
        discard_key = batch.place if self.discard_per == "sample" else torch.zeros_like(batch.place)
        # discarded where u < p: never at p = 0, always at p = 1 (the paper's ≤ differs with probability 0)
        keep = uniform(self.seed, step, Stream.DISCARD, discard_key) >= self.p_discard
        return Draws(partners, lam, keep)


def mixed_logits(z: Tensor, head: nn.Linear, masks: Mapping[str, Tensor], draws: Draws) -> Tensor:
    """What the head makes of z and of z̃, below each other: [2B,C].

    Mixing is linear in the parts and the head is linear in z, so they commute. Without the compiled pass over z, which
    makes z̃ whole, the parts are mixed after the product with W, on [B,C] instead of [B,K], and the two generic parts,
    which stay as they are, never leave the logits of z.
    """
    of_class, of_domain, logits = masks["class_mask"], masks["domain_mask"], linear(z, head)
    if one_pass.available(z):
        partners = draws.partners
        mixed = one_pass.mixed(z, of_class, of_domain, partners.same, partners.other, draws.lam, draws.keep)
        return torch.cat([logits, linear(mixed, head)])
    # on a CPU a product with bytes is vectorised; with bools, or `torch.where`, it takes fifteen times as long
    csds = product(z * (of_class & of_domain).view(torch.uint8), head.weight)  # W Z_c,d
    cgds = product(z * (~of_class & of_domain).view(torch.uint8), head.weight)  # W Z_¬c,d
    parts = Parts(csds, logits - csds - cgds, cgds, torch.zeros_like(logits))
    return torch.cat([logits, mix(parts, draws.partners, draws.lam, draws.keep)])


def mixed_domains(batch: Batch, draws: Draws, num_domains: int) -> Tensor:
    """The soft domain label of z̃, [B,D]: (λ1+λ2)/2 at its own domain, (1−λ1)/2 at x_i's, (1−λ2)/2 at x_j's."""
    domain = F.one_hot(batch.domain, num_domains).to(draws.lam.dtype)  # [B,D]
    lam_1, lam_2 = draws.lam[:, :1], draws.lam[:, 1:]  # [B,1]
    of_same, of_other = domain[draws.partners.same], domain[draws.partners.other]
    return ((lam_1 + lam_2) * domain + (1 - lam_1) * of_same + (1 - lam_2) * of_other) / 2


def soft_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of soft labels, mean over the domains: [B]."""
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
