"""Which sample each sample of a batch is mixed with: what LISA and Mixup share."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from xdm_ft.tensors import InputPartners, Samples

PartnerSource = Annotated[
    Literal["batch", "all"],
    Field(description="x_j is drawn from the batch, or from all training images (which doubles the images to decode)"),
]
Annotation = Literal["y", "domain"]


def draw_partners(
    drawn: Samples,
    training: Samples,
    u: Tensor,
    source: Literal["batch", "all"],
    same: Annotation | None,
    other: Annotation | None,
) -> InputPartners:
    """One partner for every sample of S batches, uniform over those whose `same` is the sample's and `other` is not.

    Args:
        drawn: the batches, fields int64 [S,B].
        training: all training samples, fields int64 [n].
        u: in [0, 1), float [S,B].
        source: where partners come from.
        same, other: None: no condition. Without `other` a sample may be its own partner.
    """
    size = drawn.y.shape[-1]
    pool = drawn if source == "batch" else training
    keys = [getattr(samples, same) if same else torch.zeros_like(samples.y) for samples in (drawn, pool)]
    others = [getattr(samples, other) if other else torch.zeros_like(samples.y) for samples in (drawn, pool)]
    chosen, found = pick_other(keys[0], others[0] if other else others[0] - 1, keys[1], others[1], u)
    own = torch.arange(size, device=u.device).expand_as(chosen)
    if source == "batch":
        place = torch.where(found, chosen, own)
        return InputPartners(drawn.row.gather(-1, place), place, found)
    row = torch.where(found, training.row[chosen], drawn.row)
    return InputPartners(row, torch.where(found, size + own, own), found)


def permuted(drawn: Samples, u: Tensor) -> InputPartners:
    """Partners by a random permutation of each batch, the order of u in [0, 1), float [S,B].

    A sample that it leaves in its place has none.
    """
    place = torch.argsort(u, dim=-1, stable=True)
    return InputPartners(drawn.row.gather(-1, place), place, place != torch.arange(u.shape[-1], device=u.device))


def pick_other(same: Tensor, other: Tensor, pool_same: Tensor, pool_other: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The ⌊u·n⌋-th of the n samples of a pool that have the same `same` and another `other`.

    Sorted by (same, other), the valid samples are those of one block without a block inside it, so that no [B,n]
    comparison is made. Fields are int64 [S,B], at least −1; those of the pool [S,m], or [m] for all S. Returns places
    in the pool, int64 [S,B] (0 where n = 0), and where n > 0.
    """
    base = int(torch.maximum(pool_other.max(), other.max())) + 2
    key, order = (pool_same * base + pool_other + 1).sort(dim=-1, stable=True)
    first, last = (torch.searchsorted(key, (same + more) * base) for more in (0, 1))  # the block of `same`
    excluded = same * base + other + 1
    begin, end = torch.searchsorted(key, excluded), torch.searchsorted(key, excluded, right=True)
    count = (last - first) - (end - begin)  # n [S,B]
    rank = torch.minimum((u.double() * count).long(), count - 1)
    place = first + rank
    place = (place + torch.where(place >= begin, end - begin, 0)).clamp(0, key.shape[-1] - 1)
    picked = order[place] if order.ndim == 1 else order.gather(-1, place)
    return torch.where(count > 0, picked, 0), count > 0
