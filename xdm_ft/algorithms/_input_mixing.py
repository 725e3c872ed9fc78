"""Partners of samples in input mixing, for LISA and Mixup."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from xdm_ft.runtime.tensors import InputPartners, Samples

PartnerSource = Annotated[
    Literal["batch", "all"],
    Field(description="draw x_j from the batch, or from all training images (which doubles the images to decode)"),
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
    """Draws one partner for every sample of S batches, uniformly over the valid samples.

    Args:
        drawn: the batches, fields int64 [S,B].
        training: all training samples, fields int64 [n].
        u: in [0, 1), float [S,B].
        source: draw from the sample's batch, or from all training samples.
        same: annotation that a valid partner shares with the sample; None: no condition.
        other: annotation in which it differs; None: no condition, so that a sample may be its own partner.
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
    """Draws partners by a random permutation of each batch: the order of u in [0, 1), float [S,B].

    A sample that the permutation leaves in its place has no partner.
    """
    place = torch.argsort(u, dim=-1, stable=True)
    return InputPartners(drawn.row.gather(-1, place), place, place != torch.arange(u.shape[-1], device=u.device))


def pick_other(same: Tensor, other: Tensor, pool_same: Tensor, pool_other: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Picks the ⌊u·n⌋-th of the n samples of a pool that have the same `same` and another `other`.

    `same` and `other` are int64 [S,B], at least −1; `pool_same` and `pool_other` are [S,m], or [m] for all S. Returns
    places in the pool, int64 [S,B] (0 if n = 0), and whether n > 0, bool [S,B].

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
    place = first + rank
    place = (place + torch.where(place >= begin, end - begin, 0)).clamp(0, key.shape[-1] - 1)
    picked = order[place] if order.ndim == 1 else order.gather(-1, place)
    return torch.where(count > 0, picked, 0), count > 0
