"""Mixup: convex combinations of samples and of their labels."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms._input_mixing import PartnerSource, draw_partners, permuted
from xdm_ft.algorithms.erm import ERM
from xdm_ft.runtime.randomness import Stream, beta, beta_quantiles, uniform
from xdm_ft.runtime.tensors import Batch, InputPartners, Samples


class Mixup(ERM):
    """ERM on x̃ = λ x + (1−λ) x_j and ỹ = λ y + (1−λ) y_j (one-hot y), λ ~ Beta(α, α) for every sample.

    x are images, or cached features. x_j is another sample of the batch: any, by a random permutation of the batch
    (Zhang et al. 2018, whose code draws one λ per batch), or one of another domain, as in DomainBed's Mixup. A sample
    without such a partner, or that the permutation leaves in its place, is not mixed; the share of such samples is
    logged as `without_partner`. With `partners: all` x_j is any training image, or any of another domain. α = 0.2 is
    DomainBed's; the paper's range on ImageNet is 0.1 to 0.4. In the mean over domains a mixed sample belongs to the
    domain of x.
    """

    source = "Zhang et al. 2018, mixup: Beyond Empirical Risk Minimization (ICLR); between domains: DomainBed"
    # DomainBed's range (hparams_registry.py)
    search_ranges = {"alpha": {"log_uniform": (1e-1, 1e1)}}

    two_domains_if = {"partner_domain": "other"}

    def __init__(
        self,
        setup: Setup,
        *,
        alpha: Annotated[float, Field(gt=0, description="α of Beta(α, α); the smaller, the less is mixed")] = 0.2,
        partners: PartnerSource = "batch",
        partner_domain: Annotated[
            Literal["any", "other"], Field(description="other: the domain of x_j must differ from that of x")
        ] = "any",
    ) -> None:
        super().__init__(setup)
        self.partners, self.partner_domain = partners, partner_domain
        self.lam_quantiles: Tensor  # of Beta(α, α), float32 [4097]; not saved, as α determines them
        self.register_buffer("lam_quantiles", beta_quantiles(alpha), persistent=False)

    def input_partners(self, drawn: Samples, training: Samples, steps: Tensor) -> InputPartners:
        places = torch.arange(drawn.y.shape[-1], device=drawn.y.device)
        u = uniform(self.seed, steps[:, None], Stream.INPUT_PARTNERS, places)  # [S,B]
        if self.partners == "batch" and self.partner_domain == "any":
            return permuted(drawn, u)
        other: Literal["domain"] | None = "domain" if self.partner_domain == "other" else None
        return draw_partners(drawn, training, u, self.partners, same=None, other=other)

    def on_inputs(self, batch: Batch, step: int | Tensor) -> Batch:
        has_partner = partners_of(batch)[2]
        lam = beta(uniform(self.seed, step, Stream.INPUT_LAMBDA, batch.place), self.lam_quantiles)  # [B]
        return mix_up(batch, torch.where(has_partner, lam, 1.0), self.task.num_classes)


def partners_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x_j, its class int64 [B], and whether there is one, bool [B], from a batch that an engine has drawn."""
    assert batch.partner is not None and batch.partner_y is not None and batch.has_partner is not None
    return batch.partner, batch.partner_y, batch.has_partner


def mix_up(batch: Batch, lam: Tensor, num_classes: int) -> Batch:
    """Returns λ times each sample and its one-hot label, plus 1−λ times those of its partner. `lam` float [B]."""
    partner, partner_y, _ = partners_of(batch)
    of_x = lam.view(-1, *(1 for _ in batch.x.shape[1:])).to(batch.x.dtype)  # [B,1,…]
    return batch._replace(
        x=of_x * batch.x + (1 - of_x) * partner, targets=mixed_labels(batch.y, partner_y, lam, num_classes)
    )


def mixed_labels(y: Tensor, partner_y: Tensor, lam: Tensor, num_classes: int) -> Tensor:
    """Returns λ y + (1−λ) y_j of one-hot labels, [B,C]."""
    own, theirs = (F.one_hot(labels, num_classes).to(lam.dtype) for labels in (y, partner_y))
    return lam[:, None] * own + (1 - lam[:, None]) * theirs
