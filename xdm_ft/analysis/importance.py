"""Accuracy after the most important features are removed (section 4.4, figure 3); the domain head for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.core import Batch, Task
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.randomness import Stream, uniform
from xdm_ft.storage import Json
from xdm_ft.xdomainmix.masks import target_gradient

Logits = Callable[[Tensor], Tensor]  # features [B,K] → logits [B,C], sample by sample
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ORDERS = ("score", "gradient_norm", "random")
BATCH = 512
STRENGTHS = (1.0, 0.1, 0.01, 1e-3)  # penalties of the domain head, of which validation images pick one


def removal_curves(
    z: Tensor,
    y: Tensor,
    domain: Tensor,
    head: Logits,
    domain_head: Logits | None,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
) -> Json:
    """Returns class and domain accuracy after the first ⌊share · K⌋ features of each image are set to 0.

    Orders, each from high to low, each for the true class or domain of the image, whose logit is v: `score`, the
    importance ∂v/∂z^k · z^k (1)(2); `gradient_norm`, |∂v/∂z^k|; `random`, drawn for each image. Domain accuracy follows
    the orders of the domain head, class accuracy those of the class head. Features that tie keep their order.

    Args:
        z: features, float [n,K], of images of training domains. `y`, `domain`: int64 [n].
        head: the class head. `domain_head`: None: class accuracy only.
        shares: increasing, in [0, 1]. `seed`: of the random order.

    Returns:
        Under "class" and "domain", accuracies by order, one for each share, and under "area" those under the curves.
    """
    curves = {
        "class": _accuracies(z, y, head, shares, seed),
        "domain": None if domain_head is None else _accuracies(z, domain, domain_head, shares, seed),
    }
    areas = {
        name: None if by_order is None else {order: area(shares, curve) for order, curve in by_order.items()}
        for name, by_order in curves.items()
    }
    return {"shares": list(shares), "images": len(z), **curves, "area": areas}


def area(shares: Sequence[float], curve: Sequence[float]) -> float:
    """Returns the area under a curve by the trapezoid rule."""
    return float(torch.trapezoid(torch.tensor(curve, dtype=torch.float64), torch.tensor(shares, dtype=torch.float64)))


@torch.no_grad()
def _accuracies(z: Tensor, target: Tensor, head: Logits, shares: Sequence[float], seed: int) -> dict[str, list[float]]:
    width = z.shape[1]
    # by their text: 0.57 · 100 is 56.99999999999999 in floats
    counts = [math.floor(Fraction(str(share)) * width) for share in shares]
    correct = {order: [0] * len(shares) for order in ORDERS}
    for first in range(0, len(z), BATCH):
        batch, labels = z[first : first + BATCH].float(), target[first : first + BATCH]
        gradient = target_gradient(batch, head, labels)  # [B,K]
        positions = first + torch.arange(len(batch))
        random = uniform(seed, 0, Stream.REMOVAL, positions[:, None] * width + torch.arange(width))
        for name, key in zip(ORDERS, (gradient * batch, gradient.abs(), random), strict=True):
            order, left, removed = key.argsort(dim=1, descending=True, stable=True), batch.clone(), 0
            for i, count in enumerate(counts):
                left.scatter_(1, order[:, removed:count], 0.0)
                removed = count
                correct[name][i] += int((head(left).argmax(1) == labels).sum())
    return {name: [hits / len(z) for hits in counts] for name, counts in correct.items()}


def fit_domain_head(
    train_domains: Sequence[str], training: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]
) -> Linear | None:
    """Returns a linear head that predicts the domain of features; None for a single domain.

    It is the linear probe of the training features that predicts most validation images right, the more penalised one
    of several. All domains weigh the same. `training` and `validation` are features float32 [n,K] and domains int64
    [n], 0…D−1.
    """
    (z, domain), (z_held, domain_held) = training, validation
    if len(domain.unique()) < 2:
        return None
    names, rows = tuple(train_domains), torch.arange(len(z))
    solver = LinearProbe(Setup(Task(names, names), z.shape[1], steps=0, seed=0), strengths=STRENGTHS)
    best, most = None, -1
    for candidate in solver.solve(z, Batch(z, domain, domain, rows, rows)):
        logits = z_held @ candidate.head["weight"].T + candidate.head["bias"]
        right = int((logits.argmax(1) == domain_held).sum())
        if right > most:
            best, most = candidate, right
        pulse.beat()
    assert best is not None
    head = Linear(z.shape[1], len(names), 0, 0)
    head.load_state_dict(best.head)
    return head.eval()
