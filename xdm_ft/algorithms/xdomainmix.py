"""XDomainMix: cross-domain feature augmentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.core import Batch, Losses
from xdm_ft.heads import Head
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, uniform
from xdm_ft.xdomainmix.masks import (
    autograd_scores,
    exceeds,
    linear_scores,
    quantile_cycle,
    quantile_stage,
    rank_of,
    runs_kernel,
    target_gradient,
)
from xdm_ft.xdomainmix.mixing import (
    OtherPartner,
    Partners,
    decompose,
    draw_partners,
    mix,
    mix_masked,
    select_and_mix,
)

CLASS_QUANTILE = 0.5
"""τ_c is this quantile of a sample's class scores."""

MASKS = ("class_mask", "domain_mask")
# streams of the five random numbers of a sample: for x_i, x_j, λ1, λ2 and discarding
STREAMS = (Stream.PARTNERS, Stream.PARTNERS, Stream.LAMBDA, Stream.LAMBDA, Stream.DISCARD)


class Noise(NamedTuple):
    """Random numbers in [0, 1)."""

    partners: Tensor  # for x_i and x_j, [B,2]
    lam: Tensor  # λ1 and λ2, [B,2]
    discard: Tensor  # [B]


class Augmented(NamedTuple):
    """The augmented features of a batch, and the draws and masks that they were computed from."""

    z: Tensor  # z̃, like z
    partners: Partners
    lam: Tensor  # λ1 and λ2 in effect, [B,2]: 1 without a partner
    keep: Tensor  # bool [B]; False discards Z_c,d
    masks: dict[str, Tensor]  # `class_mask` and `domain_mask`, bool [B,K]

    @property
    def draws(self) -> dict[str, Tensor]:
        """All but z̃, for the loss at perturbed weights."""
        return {**self.masks, **self.partners._asdict(), "lam": self.lam, "keep": self.keep}


class XDomainMix(Algorithm):
    """loss = ½ [ℓ(c(z), y) + ℓ(c(z̃), y)] after a warm-up of plain ERM (8), where
    z̃ = λ1 Z_c,d + (1−λ1) Z_i c,d + λ2 Z_¬c,d + (1−λ2) Z_j ¬c,d + Z_c,¬d + Z_¬c,¬d. (5)(6)(7)

    M_c marks the features of z that are specific to the class, M_d those specific to the domain: Z_c,d = M_c ⊙ M_d ⊙ z,
    Z_¬c,d = (1 − M_c) ⊙ M_d ⊙ z, and so on. x_i has the class of x and another domain, x_j another class and domain.
    With probability p_discard the first two terms of z̃ are left out. See `xdm_ft.xdomainmix`.

    A domain head d learns the domain from detached z at every step; its loss is the auxiliary loss. It has the class
    head's kind and settings, one output per training domain, and random initial weights even with `head_init:
    zero_shot`, as class embeddings describe no domains. Masks come from the scores of both heads: τ_c is the 50%
    quantile, τ_d cycles (`quantile_cycle`). p_discard = 0.2 is the paper's; the defaults of the step counts have the
    proportions of its DomainBed runs (3000 of 5000 steps of warm-up, n = 100).
    """

    source = "Liu et al. 2024, Cross-Domain Feature Augmentation for Domain Generalization (IJCAI), eq. (1)-(8)"
    # the values that the authors' own code draws from
    search_ranges = {"p_discard": {"choice": (0.2, 0.3, 0.4)}}
    min_domains = 2
    reads_soft_labels = True
    has_kernels = True
    auxiliary = ("domain_head",)

    def __init__(
        self,
        setup: Setup,
        *,
        warmup_steps: Annotated[
            int | None, Field(ge=0, description="steps of plain ERM before mixing; null: 60% of the steps")
        ] = None,
        quantile_steps: Annotated[
            int | None, Field(ge=1, description="n, steps with each quantile of τ_d's cycle; null: steps // 50")
        ] = None,
        p_discard: Annotated[
            float, Field(ge=0, le=1, description="probability that Z_c,d is dropped from z̃; 0: discarding off")
        ] = 0.2,
        discard_per: Annotated[
            Literal["sample", "batch"], Field(description="draw the discard for each sample, or once for the batch")
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
        domain_head: Annotated[
            Literal["linear"] | None,
            Field(
                description="kind of the domain head d; null: the kind and settings of the class head (as in the paper)"
            ),
        ] = None,
        domain_head_augmented: Annotated[
            bool, Field(description="train d on z̃ too, with λ-weighted soft domain labels and binary cross-entropy")
        ] = False,
    ) -> None:
        super().__init__(setup)
        self.warmup_steps = setup.steps * 3 // 5 if warmup_steps is None else warmup_steps
        if self.warmup_steps >= setup.steps:
            raise UserError(
                f"xdomainmix: warmup_steps {self.warmup_steps} leaves no step to mix in, so this is ERM: "
                f"training has {setup.steps} steps; lower warmup_steps or raise training.steps"
            )
        self.quantile_steps = max(1, setup.steps // 50) if quantile_steps is None else quantile_steps
        self.p_discard: Tensor
        self.register_buffer("p_discard", torch.tensor(p_discard, dtype=torch.float32))
        self.discard_per = discard_per
        self.mix_class_specific, self.mix_class_generic = mix_class_specific, mix_class_generic
        self.other_partner, self.domain_head_augmented = other_partner, domain_head_augmented
        self.loss_over = "batch" if partners == "global" else "part"
        self.first_selectable_step = self.warmup_steps + 1
        make = setup.head if domain_head is None else Linear
        self.domain_head = make(setup.width, setup.task.num_domains, setup.seed, Stream.DOMAIN_INIT)
        # tensors on the device, which a step reads without a copy from Python
        self.class_rank: Tensor  # of τ_c among K scores, int64 [1]
        self.register_buffer("class_rank", torch.tensor([rank_of(CLASS_QUANTILE, setup.width)]), persistent=False)
        self.domain_ranks: Tensor  # of τ_d, int64 [stages]
        ranks = [rank_of(quantile, setup.width) for quantile in quantile_cycle()]
        self.register_buffer("domain_ranks", torch.tensor(ranks), persistent=False)
        self.streams: Tensor
        self.register_buffer("streams", torch.tensor(STREAMS)[:, None], persistent=False)  # int64 [5,1]

    def mixed_steps(self, steps: int) -> int:
        return max(0, steps - self.warmup_steps)

    def phase(self, step: int) -> str:
        return "warmup_loss" if step < self.warmup_steps else "loss"

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        return self.mixed_loss(z, batch, self.augment(z, batch, step))

    def warmup_loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        """Returns the losses of plain ERM, with that of the domain head."""
        of_class = F.cross_entropy(self.logits(z), self.class_target(batch), reduction="none")  # [B]
        of_domain = self.domain_loss(self.domain_head(z.detach()), batch)  # [B]
        return Losses(*self.averages(of_class, of_domain, batch))

    def loss_at_perturbed(
        self, z: Tensor, batch: Batch, step: int | Tensor, first_pass_draws: Mapping[str, Tensor]
    ) -> Losses:
        return self.mixed_loss(z, batch, self.augment(z, batch, step, first_pass_draws))

    def augment(
        self, z: Tensor, batch: Batch, step: int | Tensor, first_pass_draws: Mapping[str, Tensor] | None = None
    ) -> Augmented:
        """Returns z̃ at a step after the warm-up, by equations (1) to (7) in order.

        For float32 [B,K] on a CPU one kernel computes them, bit for bit as `masks`, `decompose` and `mix` do elsewhere.

        `first_pass_draws` holds masks, and perhaps `Augmented.draws` besides; None: both are computed.
        """
        given = first_pass_draws or {}
        if "lam" in given:
            partners, lam, keep = Partners(*(given[name] for name in Partners._fields)), given["lam"], given["keep"]
        else:
            partners, lam, keep = self.draw(batch, step)
        masks = {name: given[name] for name in MASKS} if given else None
        choices = partners.same, partners.other, lam, keep
        if z.ndim > 2 or not runs_kernel(z, "cpu"):
            masks = self.masks(z, batch, step) if masks is None else masks
            mixed = mix(decompose(z, *masks.values()), partners, lam, keep)  # (4)(5)(6)(7)
        elif masks is not None:
            mixed = mix_masked(z, choices, tuple(masks.values()))
        else:
            of_class = *slopes(self.head, z, batch.y), self.class_rank
            of_domain = *slopes(self.domain_head, z, batch.domain), self.domain_rank(step)
            mixed, *both_masks = select_and_mix(z, choices, (*of_class, *of_domain))
            masks = dict(zip(MASKS, both_masks, strict=True))
        return Augmented(mixed, partners, lam, keep, masks)

    def masks(self, z: Tensor, batch: Batch, step: int | Tensor) -> dict[str, Tensor]:
        """Returns M_c and M_d, bool [B,K]: `class_mask` and `domain_mask`."""
        by_class, by_domain = scores(self.head, z, batch.y), scores(self.domain_head, z, batch.domain)  # (1)(2)
        of_class, of_domain = exceeds(by_class, self.class_rank), exceeds(by_domain, self.domain_rank(step))  # (3)
        return dict(zip(MASKS, (of_class, of_domain), strict=True))

    def domain_rank(self, step: int | Tensor) -> Tensor:
        """Returns the rank of τ_d among K scores, int64 [1]."""
        stage = quantile_stage(step - self.warmup_steps, self.quantile_steps, len(self.domain_ranks))
        # indexing by a tensor [] would read its value from the device
        ranks = self.domain_ranks
        return ranks[stage : stage + 1] if isinstance(stage, int) else ranks.index_select(0, stage[None])

    def draw(self, batch: Batch, step: int | Tensor) -> tuple[Partners, Tensor, Tensor]:
        """Returns x_i and x_j, λ1 and λ2 in effect [B,2], and bool [B]: whether Z_c,d is kept."""
        noise = self.noise(batch.position, step)
        partners = draw_partners(batch.y, batch.domain, noise.partners, self.other_partner)  # x_i and x_j of (5)
        is_mixed = partners.has_same & self.mix_class_specific, partners.has_other & self.mix_class_generic
        lam = torch.where(torch.stack(is_mixed, 1), noise.lam, 1.0)
        # discarded if u < p: never at p = 0, always at p = 1 (the paper's ≤ differs with probability 0)
        return partners, lam, noise.discard >= self.p_discard

    def noise(self, position: Tensor, step: int | Tensor) -> Noise:
        """Returns the random numbers of a step, a function of the seed, the step and the positions in the batch."""
        two = 2 * position, 2 * position + 1  # indices of the draws for x_i and x_j
        discard = position if self.discard_per == "sample" else torch.zeros_like(position)
        u = uniform(self.seed, step, self.streams, torch.stack([*two, *two, discard]))  # [5,B]
        return Noise(partners=u[:2].mT, lam=u[2:4].mT, discard=u[4])

    def mixed_loss(self, z: Tensor, batch: Batch, augmented: Augmented) -> Losses:
        """Returns the losses of z and z̃. (8)"""
        logits = torch.cat([self.logits(z), self.logits(augmented.z)])  # [2B,C]
        target = self.class_target(batch)
        of_class = F.cross_entropy(logits, torch.cat([target, target]), reduction="none").view(2, -1).mean(0)  # [B]
        of_domain = self.domain_loss(self.domain_head(z.detach()), batch)
        if self.domain_head_augmented:
            logits_of_mixed = self.domain_head(augmented.z.detach())
            on_mixed = soft_loss(logits_of_mixed, mixed_domains(batch, augmented, self.task.num_domains))
            # half of a soft label is for Z_c,d, so the paper has none for a z̃ without it
            of_domain = torch.where(augmented.keep, (of_domain + on_mixed) / 2, of_domain)
        has_partner = torch.stack([augmented.partners.has_same, augmented.partners.has_other]).float().mean(1)  # [2]
        without_same, without_other = (1 - has_partner).unbind()
        return Losses(
            *self.averages(of_class, of_domain, batch),
            logs={"without_same_partner": without_same, "without_other_partner": without_other},
            first_pass_draws=augmented.draws,
        )

    def domain_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns ℓ(d(z), domain), [B]: cross-entropy, or binary cross-entropy if d learns soft labels of z̃ too."""
        if self.domain_head_augmented:
            return soft_loss(logits, F.one_hot(batch.domain, self.task.num_domains).to(logits.dtype))
        return F.cross_entropy(logits, batch.domain, reduction="none")

    def averages(self, class_losses: Tensor, domain_losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the means of both losses [B] by `loss_average`; class weights apply to the class losses only."""
        plain, weight = self.normalised_sample_weight(batch, None, class_losses.dtype), self.sample_weight(batch)
        of_class = plain if weight is None else self.normalised_sample_weight(batch, weight, class_losses.dtype)
        return class_losses @ of_class, domain_losses @ plain


def scores(head: Head, z: Tensor, target: Tensor) -> Tensor:
    """Returns the importance of every dimension of z for the logit of `target` int64 [B], float32 [B,K]. (1)(2)"""
    if isinstance(head, Linear):
        return linear_scores(z, head.weight, target)
    return autograd_scores(z, head, target)


def slopes(head: Head, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows [R,K] and which of them is each sample's, int64 [B]: it times z is the sample's `scores`."""
    if isinstance(head, Linear):
        return head.weight, target
    return target_gradient(z, head, target), torch.arange(len(z), device=z.device)


def mixed_domains(batch: Batch, augmented: Augmented, num_domains: int) -> Tensor:
    """Returns the soft domain label of z̃, [B,D]: (λ1+λ2)/2 its own domain, (1−λ1)/2 x_i's, (1−λ2)/2 x_j's."""
    domain = F.one_hot(batch.domain, num_domains).to(augmented.lam.dtype)  # [B,D]
    lam_1, lam_2 = augmented.lam[:, :1], augmented.lam[:, 1:]  # [B,1]
    of_same, of_other = domain[augmented.partners.same], domain[augmented.partners.other]
    return ((lam_1 + lam_2) * domain + (1 - lam_1) * of_same + (1 - lam_2) * of_other) / 2


def soft_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the binary cross-entropy of soft labels, mean over the domains: [B]."""
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
