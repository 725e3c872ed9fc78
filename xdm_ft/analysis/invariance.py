"""Invariance over training domains: of the features of one class, and of the risk (section 4.2, table 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xdm_ft.storage import Json


class Invariance(NamedTuple):
    """Distances between the covariances of same-class features of different domains; 0: they are equal."""

    paper: float | None  # None: no class has two domains with two images each
    published_code: float | None
    classes: int  # classes that count: with at least two images in each of at least two domains
    domains: int  # domains that count in at least one of these classes
    # about what `paper` is if the domains' distributions are equal, as images are finite; None: not known, as a class
    # that counts has a domain with two images
    paper_noise: float | None
    published_code_noise: float | None


def covariance_distance(z: Tensor, y: Tensor, domain: Tensor, num_classes: int, num_domains: int) -> Invariance:
    """Returns how far the covariances C of same-class features of different domains are apart.

    `paper`, the formula of section 4.2, with i and i' over all ordered pairs of domains:

        1/(|Y||D|) Σ_c Σ_{i,i'} ‖C_c^i − C_c^i'‖²_F,  C = Σ_j (z_j − μ)(z_j − μ)ᵀ / (n − 1).

    `published_code`, which the authors' program computes, with a < b over unordered pairs:

        mean_c mean_{a<b} [mean_k (μ_c^a − μ_c^b)²_k + mean_{k,l} (C_c^a − C_c^b)²_kl].

    A class and domain with fewer than two images has no covariance and is left out. The sum of a class is divided by
    its own number of domains that are left, and a class with fewer than two of them does not count in |Y|.

    Neither is 0 if the distributions are equal: covariances of few images differ by chance. The `noise` of both is that
    part, E‖C^i − Σ^i‖² + E‖C^i' − Σ^i'‖² in place of ‖C^i − C^i'‖²; subtract it. E‖C − Σ‖² is estimated by
    `covariance_noise`, and E‖μ̂ − μ‖² by tr C / n. Both noises are None if a cell that counts has two images only.

    The covariances of a class are visited one by one: with C̄ their mean over D domains,
    Σ_{i,i'} ‖C^i − C^i'‖² = 2D Σ_i ‖C^i − C̄‖², and mean and sum are updated as in Welford 1962, which does not cancel.
    Memory: a few float64 [K,K]. Time: 2 n K² multiplications (8,000 images of width 1280: 1.3 s on one core).

    z: features, float [n,K]; y: classes, int64 [n]; domain: int64 [n], 0…num_domains−1; others do not count.
    """
    rows: list[tuple[float, float, float, float]] = []
    seen: set[int] = set()
    for c in range(num_classes):
        of_class = y == c
        cells = {i: z[of_class & (domain == i)] for i in range(num_domains)}
        cells = {i: cell for i, cell in cells.items() if len(cell) >= 2}
        if len(cells) >= 2:
            rows.append(_of_class(list(cells.values())))
            seen.update(cells)
    if not rows:
        return Invariance(None, None, 0, 0, None, None)
    paper, published, *noises = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    paper_noise, published_noise = (None if math.isnan(noise) else noise for noise in noises)
    return Invariance(paper, published, len(rows), len(seen), paper_noise, published_noise)


def covariance_noise(x: Tensor, covariance: Tensor) -> float:
    """Returns an estimate of E‖C − Σ‖²_F, the chance part of a covariance C [K,K] of n images, from their deviations x
    [n,K]; NaN for n = 2: not known.

    Ledoit & Wolf 2004 (lemma 3.4) estimate it by V̂ = (Σ_j ‖x_j‖⁴ / n − ‖C‖²) / (n − 1), with x_j = √(n/(n−1)) (z_j − z̄)
    and C = Σ_j x_j x_jᵀ / n. Returned is V̂ (n−1)/(n−2), as x_j are deviations from an estimated mean, which make V̂ too
    low. It has no bias for normal features.
    """
    # With t = tr Σ, q = ‖Σ‖² and the fourth cumulant κ = E‖z − μ‖⁴ − t² − 2q (0 for normal features):
    #   V = E‖C − Σ‖² = κ/n + (t² + q)/(n−1),  E‖C‖² = q + V,
    #   E‖x_j‖⁴ = t² + 2q + ακ with α = (n² − 3n + 3)/(n(n−1)), as x_j weighs z_j − μ by √((n−1)/n), the others by
    #   −1/√(n(n−1));
    # so (n−1) E V̂ = (t² + q)(n−2)/(n−1) + κ(α − 1/n), and α − 1/n = (n−2)²/(n(n−1)):
    #   E V̂ (n−1)/(n−2) = (t² + q)/(n−1) + κ/n · (n−2)/(n−1) = V − κ/(n(n−1)).
    n = len(x)
    return float(x.square().sum(1).square().mean() - covariance.square().sum()) / (n - 2) if n > 2 else math.nan


def _of_class(cells: list[Tensor]) -> tuple[float, float, float, float]:
    """Returns the terms of one class in `paper` and `published_code`, and in the noise of both."""
    count, width, means, covariances = len(cells), cells[0].shape[1], _Spread(), _Spread()
    of_means = of_covariances = 0.0  # noise, summed over domains
    for cell in cells:
        n, x = len(cell), cell.double()  # [n,K]
        mean = x.mean(0)
        x = (x - mean) * (n / (n - 1)) ** 0.5
        covariance = x.T @ x / n  # [K,K]
        means.add(mean)
        covariances.add(covariance)
        of_means += float(covariance.trace()) / n
        of_covariances += covariance_noise(x, covariance)
    # Σ over ordered pairs is 2D times the spread, and the mean over the D(D−1)/2 unordered pairs 2/(D−1) times
    paper, published = 2 * covariances.sum, 2 / (count - 1) * (means.sum / width + covariances.sum / width**2)
    # each domain is in 2(D−1) ordered pairs, and in a share of 2/D of the unordered ones
    paper_noise = 2 * (count - 1) / count * of_covariances
    return paper, published, paper_noise, 2 / count * (of_means / width + of_covariances / width**2)


class _Spread:
    """Σ_i ‖x_i − x̄‖² of the tensors that were added."""

    def __init__(self) -> None:
        self.count, self.mean, self.sum = 0, torch.zeros(()), 0.0

    def add(self, x: Tensor) -> None:
        self.count += 1
        before = x - self.mean
        self.mean = self.mean + before / self.count
        # the factors x − (old mean) and x − (new mean) are parallel: (1 − 1/count) ‖before‖²
        self.sum += (1 - 1 / self.count) * float(before.square().sum())


def risk_variance(losses: Tensor, domain: Tensor, train_domains: Sequence[str]) -> Json:
    """Returns the risks R^i, the mean loss of the images of domain i, and Var{R^1, …, R^D} (section 4.2).

    The variance is the unbiased one, over the domains that have images; None for fewer than two of them. The published
    program's R^i is a mean over the means of batches, in which images of a smaller last batch weigh more.

    `losses`: the model's cross-entropy on every image, float [n]. `domain`: int64 [n], 0…D−1; others do not count.
    """
    means = {name: losses[domain == i].double().mean() for i, name in enumerate(train_domains) if (domain == i).any()}
    variance = float(torch.stack([*means.values()]).var(correction=1)) if len(means) >= 2 else None
    return {
        "risk_variance": variance,
        "risk": {name: float(means[name]) if name in means else None for name in train_domains},
    }
