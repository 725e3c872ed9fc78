"""Mixup: convex combinations of samples and of their labels.

LISA takes its mixing and its draw of partners from here.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.core import Batch, InputPartners, Samples
from xdm_ft.runtime.randomness import Stream, beta, beta_quantiles, uniform

PartnerSource = Annotated[
    Literal["batch", "all"],
    Field(description="draw x_j from the batch, or from all training images (twice as many images to decode)"),
]
Annotation = Literal["y", "domain"]


class Mixup(ERM):
    """ERM on x̃ = λ x + (1−λ) x_j and ỹ = λ y + (1−λ) y_j (one-hot or soft y), λ ~ Beta(α, α) for every sample.

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
            return permute(drawn, u)
        other: Literal["domain"] | None = "domain" if self.partner_domain == "other" else None
        return draw_partners(drawn, training, u, self.partners, same=None, other=other)

    def on_inputs(self, batch: Batch, step: int | Tensor) -> Batch:
        has_partner = partners_of(batch)[2]
        lam = beta(uniform(self.seed, step, Stream.INPUT_LAMBDA, batch.position), self.lam_quantiles)  # [B]
        return mix_up(batch, torch.where(has_partner, lam, 1.0), self.task.num_classes)


def partners_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x_j, its class int64 [B], and whether there is one, bool [B], from a batch that an engine has drawn."""
    assert batch.partner is not None and batch.partner_y is not None and batch.has_partner is not None
    return batch.partner, batch.partner_y, batch.has_partner


def mix_up(batch: Batch, lam: Tensor, num_classes: int) -> Batch:
    """Returns λ times each sample and its label, plus 1−λ times those of its partner. `lam` float [B]."""
    partner = partners_of(batch)[0]
    of_x = lam.view(-1, *(1 for _ in batch.x.shape[1:])).to(batch.x.dtype)  # [B,1,…]
    return batch._replace(x=of_x * batch.x + (1 - of_x) * partner, targets=mix_labels(batch, lam, num_classes))


def mix_labels(batch: Batch, lam: Tensor, num_classes: int) -> Tensor:
    """Returns λ y + (1−λ) y_j of soft labels, or of one-hot ones if the batch has none, [B,C]."""
    of_y, of_partner = batch.targets, batch.partner_targets
    if of_y is None or of_partner is None:
        labels = batch.y, partners_of(batch)[1]
        of_y, of_partner = (F.one_hot(classes, num_classes).to(lam.dtype) for classes in labels)
    return lam[:, None] * of_y + (1 - lam[:, None]) * of_partner


def draw_partners(
    drawn: Samples,
    training: Samples,
    u: Tensor,
    source: Literal["batch", "all"],
    same: Annotation | None,
    other: Annotation | None,
) -> InputPartners:
    """Draws one partner for every sample of S batches, uniformly over the valid samples, by u in [0, 1), float [S,B].

    `drawn` (fields [S,B]) and `training` (fields [n]) are as in `Algorithm.input_partners`. A valid partner shares the
    annotation `same` with the sample and differs in `other`. None: no condition; a sample may then be its own partner.
    """
    size = drawn.y.shape[-1]
    pool = drawn if source == "batch" else training
    keys = [getattr(samples, same) if same else torch.zeros_like(samples.y) for samples in (drawn, pool)]
    others = [getattr(samples, other) if other else torch.zeros_like(samples.y) for samples in (drawn, pool)]
    # −1 without `other`: no sample of the pool has it, so that none is excluded
    chosen, exists = pick_other(keys[0], others[0] if other else others[0] - 1, keys[1], others[1], u)
    itself = torch.arange(size, device=u.device).expand_as(chosen)
    if source == "batch":
        position = torch.where(exists, chosen, itself)
        return InputPartners(drawn.row.gather(-1, position), position, exists)
    row = torch.where(exists, training.row[chosen], drawn.row)
    return InputPartners(row, torch.where(exists, size + itself, itself), exists)


def permute(drawn: Samples, u: Tensor) -> InputPartners:
    """Draws partners by a random permutation of each batch: the order of u in [0, 1), float [S,B].

    A sample that the permutation does not move has no partner.
    """
    position = torch.argsort(u, dim=-1, stable=True)
    moved = position != torch.arange(u.shape[-1], device=u.device)
    return InputPartners(drawn.row.gather(-1, position), position, moved)


def pick_other(same: Tensor, other: Tensor, pool_same: Tensor, pool_other: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Picks the ⌊u·n⌋-th of the n samples of a pool that have the same `same` and another `other`.

    `same` and `other` are int64 [S,B], at least −1; `pool_same` and `pool_other` are [S,m], or [m] for all S. Returns
    positions in the pool, int64 [S,B] (0 if n = 0), and whether n > 0, bool [S,B].

    The pool is sorted by (same, other). The valid samples are then one block of equal `same` without the block of equal
    `other` inside it: four binary searches replace a comparison of all [B,m] pairs.
    """
    base = int(torch.maximum(pool_other.max(), other.max())) + 2  # same · base + other + 1 orders by (same, other)
    key, order = (pool_same * base + pool_other + 1).sort(dim=-1, stable=True)
    first, last = (torch.searchsorted(key, (same + more) * base) for more in (0, 1))  # the block of `same`
    excluded = same * base + other + 1
    begin, end = torch.searchsorted(key, excluded), torch.searchsorted(key, excluded, right=True)
    count = (last - first) - (end - begin)  # n [S,B]
    rank = torch.minimum((u.double() * count).long(), count - 1)
    position = first + rank
    position = (position + torch.where(position >= begin, end - begin, 0)).clamp(0, key.shape[-1] - 1)
    picked = order[position] if order.ndim == 1 else order.gather(-1, position)
    return torch.where(count > 0, picked, 0), count > 0
