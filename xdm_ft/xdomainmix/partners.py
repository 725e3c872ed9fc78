"""Partners of samples: x_i and x_j of equation (5)."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

OtherPartner = Literal[
    "other_class_other_domain", "other_class_same_domain", "same_class_other_domain", "same_as_x_i"
]  # fmt: skip
"""The paper's four choices of x_j. `same_class_other_domain` excludes x_i, unless it is the only such sample."""


class Partners(NamedTuple):
    """Places in the batch. A sample without a valid partner is its own partner, with `has_… = False`."""

    same: Tensor  # int64 [B], x_i: same class, other domain
    other: Tensor  # int64 [B], x_j: other class, other domain by default
    has_same: Tensor  # bool [B]
    has_other: Tensor  # bool [B]


def draw_partners(
    y: Tensor, domain: Tensor, noise: Tensor, other: OtherPartner = "other_class_other_domain"
) -> Partners:
    """Draws one x_i and one x_j for every sample, uniformly over the valid samples of the batch. (5)

    Takes the ⌊u·n⌋-th of the n valid samples, in the order of the batch.

    Args:
        y: classes, int64 [B].
        domain: domains, int64 [B].
        noise: u in [0, 1), [B,2]: for x_i and for x_j.
        other: which samples are valid as x_j.

    Raises:
        ValueError: `other` is none of the four choices.
    """
    same_class, same_domain = y[:, None] == y, domain[:, None] == domain  # [B,B]
    first = same_class & ~same_domain
    same, has_same = pick(first, noise[:, 0])
    if other == "same_as_x_i":
        return Partners(same, same, has_same, has_same)
    if other == "other_class_other_domain":
        valid = ~(same_class | same_domain)
    elif other == "other_class_same_domain":
        valid = ~same_class & same_domain
    elif other == "same_class_other_domain":
        is_x_i = same[:, None] == torch.arange(len(y), device=y.device)  # [B,B]
        valid = first & (~is_x_i | (first.sum(1, keepdim=True) == 1))
    else:
        raise ValueError(f"other: {other!r} is unknown; choose one of {', '.join(get_args(OtherPartner))}")
    chosen, has_other = pick(valid, noise[:, 1])
    return Partners(same, chosen, has_same, has_other)


def pick(valid: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Picks the ⌊u·n⌋-th of the n valid samples in each row of `valid` [B,B].

    Returns its place, int64 [B] (the row's own place if n = 0), and whether n > 0, bool [B].
    """
    rank = valid.cumsum(1, dtype=torch.int32)  # [B,B]: number of valid samples up to this one
    count = rank[:, -1]  # n [B]
    wanted = torch.minimum((u * count).int(), count - 1)  # the float32 product must not round up to n
    place = torch.searchsorted(rank, wanted[:, None], right=True)[:, 0]  # first place with rank > wanted
    own = torch.arange(len(u), device=u.device)
    return torch.where(count > 0, place, own), count > 0
