"""A linear head for one site: a few labelled images there move the shipped head, and only as far as they pay.

The head W_src stays near: the mean cross-entropy of the labelled images + λ/2 ‖W − W_src‖², weights and biases, on
standardised features. The softmax runs over the classes that have a label: else those without one lose images to them.
The head is kept only if cross-validation shows a gain, by which a sign-flip test decides: under no gain, each image
that is classified correctly by one of both heads alone may as well be so by the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

STEPS, LR, AVERAGED = 80, 3e-3, 40  # of Adam on all images; the last 40 weights are averaged
STRONG, WEAK = (50, 1.0), (100, 0.1)  # number of labels, λ: up to the first, and from the second on
FOLDS = 4
DOUBT = 0.3  # largest p-value of a gain
MAX_SUMS, DRAWS = 1 << 22, 9_999  # combinations of signs that are all counted; of more, draws
RESOLUTION = 1e9  # of the largest change in a sum


class NoHarm(NamedTuple):
    """What cross-validation shows of an adapted head."""

    labels: int  # images
    before: int  # of them that the shipped head classifies correctly
    after: int  # the same for the heads that the other folds have adapted
    metric: str  # that decides, see `deciding_metric`
    metric_before: float  # its values
    metric_after: float
    p: float  # one-sided, of the sign-flip test against no gain

    @property
    def kept(self) -> bool:
        return self.p <= DOUBT  # without a gain p is ½ or more, as signs are symmetric


def deciding_metric(metric: str) -> str:
    """Returns the share of correct images that decides at one site for a metric of the protocol.

    Balanced accuracy stands for macro F1 too, as both weigh classes the same. All others have accuracy: the worst
    domain's is that of the only one, and AUROC, NLL and ECE are no shares of correct images.
    """
    return "balanced_accuracy" if metric in ("balanced_accuracy", "macro_f1") else "accuracy"


def compare_heads(
    before: Tensor, after: Tensor, labels: Tensor, groups: np.ndarray | None, metric: str = "accuracy"
) -> NoHarm:
    """Returns what two heads show. before, after: whether each classifies an image correctly, bool [n].

    labels, groups: int64 [n]. For balanced accuracy an image counts 1/(images of its class).
    """
    size = labels.bincount()[labels].double().numpy()
    weight = 1 / size if metric == "balanced_accuracy" else np.ones(len(size))
    was, now = (float(np.average(right.numpy(), weights=weight)) for right in (before, after))
    change = weight * (after.double() - before.double()).numpy()
    sums = change if groups is None else np.bincount(np.unique(groups, return_inverse=True)[1], change)
    # 1/3 + 1/3 + 1/3 − 1 is 0
    return NoHarm(len(size), int(before.sum()), int(after.sum()), metric, was, now, sign_flip_p(sums.round(12)))


def sign_flip_p(changes: np.ndarray) -> float:
    """Returns the share of all signs of the changes [n] with which their sum is at least the one seen.

    It is exact while numbers of positive signs, one per size of change, can be combined in at most `MAX_SUMS` ways, as
    for images of two classes; else (b + 1)/(m + 1), b of m fixed draws of signs (Phipson & Smyth 2010). Changes of one
    size make it the sign test.
    """
    from scipy.stats import binom

    changes = changes[changes != 0]
    if not len(changes):
        return 1.0
    # whole numbers, so that equal sums are equal; each is off by ½ at most
    units = np.rint(changes * (RESOLUTION / np.abs(changes).max())).astype(np.int64)
    least = int(units.sum()) - len(units)
    sizes, counts = np.unique(np.abs(units), return_counts=True)
    if np.prod(counts + 1.0) <= MAX_SUMS:
        totals, shares = np.zeros(1, np.int64), np.ones(1)
        for size, count in zip(sizes, counts, strict=True):
            ups = np.arange(count + 1)  # changes of this size with a positive sign
            totals = (totals[:, None] + size * (2 * ups - count)).ravel()
            shares = (shares[:, None] * binom.pmf(ups, count, 0.5)).ravel()
        return min(1.0, float(shares[totals >= least].sum()))  # rounding gives 1 + 2e-16
    generator, reached = np.random.default_rng(0), 0
    for drawn in np.array_split(np.arange(DRAWS), 1 + DRAWS * len(units) // MAX_SUMS):
        signs = generator.integers(0, 2, (len(drawn), len(units)), np.int8) * 2 - 1
        reached += int((signs @ units >= least).sum())
    return (reached + 1) / (DRAWS + 1)


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
    metric: str = "accuracy",
) -> NoHarm:
    """Returns what 4-fold cross-validation shows; arguments as `adapt_head`, `groups` int64 [n]: in one fold each.

    `as_shipped`: the features [n,K] that the shipped head reads, if they are not z. `metric`: a deciding one. Raises
    `ValueError` for fewer than 4 groups.
    """
    fold = folds_of(np.arange(len(z)) if groups is None else groups)
    before = correct(weight, bias, z if as_shipped is None else as_shipped, labels)
    after = torch.zeros(len(z), dtype=torch.bool)
    for number in range(FOLDS):
        out = torch.from_numpy(fold == number)
        adapted = adapt_head(weight, bias, z[~out], labels[~out], mean, deviation)
        after[out] = correct(*adapted, z[out], labels[out])
    return compare_heads(before, after, labels, groups, metric)


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
