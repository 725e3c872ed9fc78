"""Accuracy after the most important features are removed (section 4.4, figure 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from xdm_ft.runtime.randomness import Stream, uniform
from xdm_ft.xdomainmix.scores import target_gradient

Logits = Callable[[Tensor], Tensor]  # features [B,K] → logits [B,C], sample by sample
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ORDERS = ("score", "gradient_norm", "random")
BATCH = 512


class Curves(NamedTuple):
    """Accuracies (fractions) after removal: one list per order of removal, one value per share."""

    shares: list[float]  # of the K features of each image that are removed
    images: int
    of_class: dict[str, list[float]]  # accuracy of the class, by "score", "gradient_norm" and "random"
    of_domain: dict[str, list[float]] | None  # of the domain; None: there is no domain head
    area_of_class: dict[str, float]  # under each curve, by the trapezoid rule over the shares
    area_of_domain: dict[str, float] | None


def removal_curves(
    z: Tensor,
    y: Tensor,
    domain: Tensor,
    head: Logits,
    domain_head: Logits | None,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
) -> Curves:
    """Returns class and domain accuracy after the first ⌊share · K⌋ features of each image are set to 0.

    Orders, each from high to low, each for the true class or domain of the image, whose logit is v: `score`, the
    importance ∂v/∂z^k · z^k (1)(2); `gradient_norm`, |∂v/∂z^k|; `random`, drawn for each image. Domain accuracy follows
    the orders of the domain head, class accuracy those of the class head. Features that tie keep their order.

    Args:
        z: features, float [n,K], of images of training domains.
        y: classes, int64 [n].
        domain: domains, int64 [n].
        head: the class head.
        domain_head: the domain head; None: class accuracy only.
        shares: increasing, in [0, 1].
        seed: of the random order.
    """
    of_class = _accuracies(z, y, head, shares, seed)
    of_domain = None if domain_head is None else _accuracies(z, domain, domain_head, shares, seed)
    return Curves(
        list(shares),
        len(z),
        of_class,
        of_domain,
        {order: area(shares, curve) for order, curve in of_class.items()},
        None if of_domain is None else {order: area(shares, curve) for order, curve in of_domain.items()},
    )


def area(shares: Sequence[float], curve: Sequence[float]) -> float:
    """Returns the area under a curve by the trapezoid rule."""
    return float(torch.trapezoid(torch.tensor(curve, dtype=torch.float64), torch.tensor(shares, dtype=torch.float64)))


@torch.no_grad()
def _accuracies(z: Tensor, target: Tensor, head: Logits, shares: Sequence[float], seed: int) -> dict[str, list[float]]:
    width = z.shape[1]
    counts = [math.floor(Fraction(str(share)) * width) for share in shares]
    correct = {order: [0] * len(shares) for order in ORDERS}
    for first in range(0, len(z), BATCH):
        batch, of_batch = z[first : first + BATCH].float(), target[first : first + BATCH]
        gradient = target_gradient(batch, head, of_batch)  # [B,K]
        places = first + torch.arange(len(batch))
        random = uniform(seed, 0, Stream.REMOVAL, places[:, None] * width + torch.arange(width))
        for name, key in zip(ORDERS, (gradient * batch, gradient.abs(), random), strict=True):
            order, left, removed = key.argsort(dim=1, descending=True, stable=True), batch.clone(), 0
            for i, count in enumerate(counts):
                left.scatter_(1, order[:, removed:count], 0.0)
                removed = count
                correct[name][i] += int((head(left).argmax(1) == of_batch).sum())
    return {name: [hits / len(z) for hits in of_order] for name, of_order in correct.items()}
