"""A linear head for one site: a few labelled images there move the shipped head, and only as far as they pay.

The head W_src stays near: the mean cross-entropy of the labelled images + λ/2 ‖W − W_src‖², weights and biases, on
standardised features. The softmax runs over the classes that have a label: else those without one lose images to them.
The head is kept only if cross-validation shows that it classifies more of them correctly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import binom
from torch import Tensor

STEPS, LR, AVERAGED = 80, 3e-3, 40  # of Adam on all images; the last 40 weights are averaged
STRONG, WEAK = (50, 1.0), (100, 0.1)  # number of labels, λ: up to the first, and from the second on
FOLDS = 4
DOUBT = 0.3  # largest p-value of a gain


class NoHarm(NamedTuple):
    """What cross-validation shows of an adapted head."""

    labels: int  # images
    before: int  # of them that the shipped head classifies correctly
    after: int  # the same for the heads that the other folds have adapted
    better: int  # groups of images, or images, of which more are classified correctly then
    worse: int  # of which fewer are

    @property
    def p(self) -> float:
        """One-sided p-value of the sign test against no gain."""
        return float(binom.sf(self.better - 1, self.better + self.worse, 0.5))

    @property
    def kept(self) -> bool:
        return self.after > self.before and self.p <= DOUBT


def compare_heads(before: Tensor, after: Tensor, groups: np.ndarray | None) -> NoHarm:
    """Returns what two heads show. before, after: whether each classifies an image correctly, bool [n]; groups: [n]."""
    gain = after.numpy().astype(int) - before.numpy().astype(int)
    sums = gain if groups is None else np.bincount(np.unique(groups, return_inverse=True)[1], gain)
    return NoHarm(len(gain), int(before.sum()), int(after.sum()), int((sums > 0).sum()), int((sums < 0).sum()))


def ridge_strength(labels: int) -> float:
    """Returns λ for a number of labels: 1 up to 50, 0.1 from 100 on, log-linear between."""
    (few, strong), (many, weak) = STRONG, WEAK
    share = min(1.0, max(0.0, math.log(labels / few) / math.log(many / few))) if labels else 0.0
    return float(strong * (weak / strong) ** share)


def adapt_head(
    weight: Tensor, bias: Tensor, z: Tensor, labels: Tensor, mean: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the weights [C,K] and biases [C] of the head that labelled images adapt, float32.

    weight, bias: of the shipped head. z: features [n,K], as it reads them; labels int64 [n]. mean, deviation [K]: of
    the training features; a deviation of 0 counts as 1. All steps read all images, so that nothing is drawn.
    """
    scale = torch.where(deviation > 0, deviation, 1.0).float()
    x, mean = (z.float() - mean) / scale, mean.float()
    # on standardised features, with the same logits
    source = torch.cat([weight.float() * scale, (bias.float() + weight.float() @ mean)[:, None]], 1)
    labelled, number = labels.unique(return_inverse=True)
    head, strength, total = source.clone().requires_grad_(), ridge_strength(len(z)), torch.zeros_like(source)
    optimizer = torch.optim.Adam([head], lr=LR)
    for step in range(STEPS):
        of_labelled = head[labelled]
        loss = F.cross_entropy(x @ of_labelled[:, :-1].T + of_labelled[:, -1], number)
        loss = loss + strength / 2 * (head - source).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= STEPS - AVERAGED:
            total += head.detach()
    mean_head = total / AVERAGED
    adapted = mean_head[:, :-1] / scale
    return adapted, mean_head[:, -1] - adapted @ mean


def do_no_harm(
    weight: Tensor,
    bias: Tensor,
    z: Tensor,
    labels: Tensor,
    mean: Tensor,
    deviation: Tensor,
    groups: np.ndarray | None = None,
    as_shipped: Tensor | None = None,
) -> NoHarm:
    """Returns what 4-fold cross-validation shows; arguments as `adapt_head`, `groups` int64 [n]: in one fold each.

    `as_shipped`: the features [n,K] that the shipped head reads, if they are not z. Raises `ValueError` for fewer than
    4 groups.
    """
    fold = folds_of(np.arange(len(z)) if groups is None else groups)
    before = correct(weight, bias, z if as_shipped is None else as_shipped, labels)
    after = torch.zeros(len(z), dtype=torch.bool)
    for number in range(FOLDS):
        out = torch.from_numpy(fold == number)
        adapted = adapt_head(weight, bias, z[~out], labels[~out], mean, deviation)
        after[out] = correct(*adapted, z[out], labels[out])
    return compare_heads(before, after, groups)


def correct(weight: Tensor, bias: Tensor, z: Tensor, labels: Tensor) -> Tensor:
    """Returns whether a head classifies each image correctly, bool [n]."""
    return (z.float() @ weight.float().T + bias.float()).argmax(1) == labels


def folds_of(groups: np.ndarray) -> np.ndarray:
    """Returns the fold 0…3 of each image, int64 [n]: groups whole, the largest first, each to the smallest fold.

    Groups of one size are drawn. Raises `ValueError` for fewer than 4 groups.
    """
    names, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(names) < FOLDS:
        raise ValueError(f"{len(names)} groups are too few for {FOLDS} folds")
    order = np.random.default_rng(0).permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    fold_of, filled = np.zeros(len(names), np.int64), np.zeros(FOLDS, np.int64)
    for group in order:
        fold_of[group] = filled.argmin()
        filled[fold_of[group]] += sizes[group]
    return fold_of[number]
