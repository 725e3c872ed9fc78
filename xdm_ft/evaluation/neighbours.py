"""How far images are from others in the space of features.

Nearest neighbours by the cosine, exact and in blocks, and the robustness index. And the Mahalanobis distance to the
nearest class of the training images: Lee et al. 2018, "A Simple Unified Framework for Detecting Out-of-Distribution
Samples and Adversarial Attacks", equations (1) and (2), with class means μ_c and one covariance Σ for all classes;
distance(z) = min_c √((z − μ_c)ᵀ Σ⁻¹ (z − μ_c)). Σ is shrunk as in Ledoit & Wolf 2004, since there may be fewer images
than features. That distance does not change if all features are scaled or shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from scipy.linalg import solve_triangular
from torch import Tensor

from xdm_ft.features.cache import ROWS_AT_ONCE
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.randomness import sample

NEAREST = 10  # neighbours of each image
COSINES_AT_ONCE = 1 << 25  # in memory, 128 MiB in float32
SAMPLED = 5000  # images at most, where a sample will do


class Rows(Protocol):
    """Features of images: `features[rows]` is float [n,K] for int64 rows [n], such as `features.cache.Features`."""

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Neighbours:
    """The nearest other images of n images, by cosine. They are numbered 0…n−1, in the order of `rows`."""

    rows: np.ndarray  # int64 [n], of the data set
    nearest: np.ndarray  # int64 [n,k], nearest first, k = min(10, n − 1); −1: there is none
    cosines: np.ndarray  # float32 [n,k]; NaN where there is none
    foreign: np.ndarray  # int64 [n], the nearest image of another domain; −1: there is none


def directions(features: Rows, rows: Tensor, name: Callable[[int], str]) -> Tensor:
    """Returns the features of some images divided by their length, float32 [n,K]; zero features stay zero.

    Raises `UserError` with the `name` of the first image whose features are not finite.
    """
    unit: Tensor | None = None
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        z = features[some].float()
        finite = z.isfinite().all(1)
        if not finite.all():
            row = int(some[int((~finite).nonzero()[0])])
            raise UserError(f"{name(row)}: its features hold NaN or infinite numbers; repair them or leave it out")
        # by the largest entry first: squares of very large and very small features leave float32
        z = z / z.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        unit = z.new_empty(len(rows), z.shape[1]) if unit is None else unit
        unit[start : start + len(some)] = z / z.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return torch.zeros(0, 1) if unit is None else unit


def neighbours(unit: Tensor, rows: Tensor, domains: np.ndarray, k: int = NEAREST) -> Neighbours:
    """Returns the nearest neighbours of n images in one pass over blocks of their cosines.

    An image whose features are zero has no direction: it has no neighbours and is none. Time: 2 n² K operations, and
    a selection among n² cosines; memory: `unit` and some 300 MB.

    Args:
        unit: float32 [n,K], as `directions` returns them.
        rows: int64 [n], their rows in the data set.
        domains: int64 [n].
    """
    n, device = len(unit), unit.device
    k = max(0, min(k, n - 1))
    nearest, cosines = torch.full((n, k), -1), torch.full((n, k), torch.nan)
    foreign = torch.full((n,), -1)
    domain = torch.from_numpy(np.ascontiguousarray(domains)).to(device)
    without = ~unit.any(1)  # [n]
    size = max(1, COSINES_AT_ONCE // max(1, n))
    for start in range(0, n, size):
        block = slice(start, min(n, start + size))
        of_block = unit[block] @ unit.T  # [b,n]
        of_block[:, without] = -torch.inf
        of_block[without[block]] = -torch.inf
        of_block.diagonal(start).fill_(-torch.inf)
        values, indices = (tensor.cpu() for tensor in of_block.topk(k, dim=1))
        exists = values > -torch.inf  # −inf is not an image
        nearest[block][exists], cosines[block][exists] = indices[exists], values[exists]
        of_block.masked_fill_(domain[block, None] == domain, -torch.inf)
        values, indices = (tensor.cpu() for tensor in of_block.max(1))
        foreign[block] = torch.where(values > -torch.inf, indices, -1)
        pulse.beat()
    arrays = (table.numpy() for table in (rows.cpu(), nearest, cosines, foreign))
    return Neighbours(*arrays)


@dataclass(frozen=True)
class Robustness:
    """Whether the neighbours of images share their class or their domain; None: no neighbour decides it."""

    index: float | None  # 1: always the class, 0: always the domain
    same_domain_share: float | None  # of all neighbours


def robustness(nearest: np.ndarray, labels: np.ndarray, domains: np.ndarray) -> Robustness:
    """Returns SO / (SO + OS) over the neighbours of all images, and the share of neighbours in the image's domain.

    SO counts neighbours of the same class and another domain, OS those of another class and the same domain; the other
    neighbours say nothing about which of the two the encoder follows (de Jong et al. 2025, Current Pathology Foundation
    Models are unrobust to Medical Center Differences).

    Args:
        nearest: int64 [n,k], as in `Neighbours`.
        labels, domains: int64 [n].
    """
    exists = nearest >= 0
    same_class = (labels[nearest] == labels[:, None])[exists]
    same_domain = (domains[nearest] == domains[:, None])[exists]
    so, os = int((same_class & ~same_domain).sum()), int((~same_class & same_domain).sum())
    index = so / (so + os) if so + os and len(np.unique(domains)) > 1 else None  # in one domain all are of the same
    return Robustness(index, float(same_domain.mean()) if len(same_domain) else None)


def sampled_robustness(features: Rows, rows: np.ndarray, labels: np.ndarray, domains: np.ndarray) -> Robustness:
    """Returns the robustness of an encoder's features of a `sample` of some rows of the data set."""
    rows = sample(rows, domains[rows] * (labels.max(initial=0) + 1) + labels[rows], SAMPLED)
    chosen = torch.from_numpy(rows)
    unit = directions(features, chosen, lambda row: f"row {row} of the data set")
    return robustness(neighbours(unit, chosen, domains[rows]).nearest, labels[rows], domains[rows])


Blocks = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]
"""Each call reads all images anew, in blocks: finite features float [b,K], and labels int64 [b]."""


LEVELS = np.linspace(0, 1, 101)  # of the stored quantiles


RESOLUTION = 1e-12  # variance, as a share of the mean square of the features, that is below what float32 resolves


@dataclass(frozen=True)
class Reference:
    """What training features are to a distance: enough to compute it, and how far unseen images of their domains are.

    All arrays hold float32 values, so that what is stored gives the same distances.
    """

    means: np.ndarray  # [P,K], of the P classes that have images
    whitening: np.ndarray  # [K,K], lower triangular W with WᵀW = Σ⁻¹
    quantiles: np.ndarray  # [101], increasing: of the distances of validation images, at 0 to 100%

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Reference:
        """The inverse of `arrays`. Raises `ValueError` if the arrays do not fit each other."""
        means, packed, quantiles = (arrays[name] for name in ("means", "whitening", "quantiles"))
        width = means.shape[-1]
        if means.ndim != 2 or packed.shape != (width * (width + 1) // 2,) or quantiles.shape != LEVELS.shape:
            raise ValueError(f"its shapes {means.shape}, {packed.shape} and {quantiles.shape} do not fit")
        whitening = np.zeros((width, width), np.float32)
        whitening[np.tril_indices(width)] = packed
        return cls(means, whitening, quantiles)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays to store; of `whitening` the lower triangle, row by row."""
        packed = self.whitening[np.tril_indices(len(self.whitening))]
        return {"means": self.means, "whitening": packed, "quantiles": self.quantiles}

    @cached_property
    def _centre_and_means(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean of the class means, [K], and what is left of these, whitened, [P,K]: float64."""
        centre = self.means.mean(0, dtype=np.float64)
        return centre, (self.means - centre) @ self.whitening.T.astype(np.float64)

    def distance(self, z: np.ndarray) -> np.ndarray:
        """Returns the distances float32 [n] of features [n,K] to the nearest class mean."""
        centre, m = self._centre_and_means
        y = (z - centre) @ self.whitening.T.astype(np.float64)  # centred first: products of far-off features cancel
        squares = np.einsum("nk,nk->n", y, y)[:, None] - 2 * (y @ m.T) + (m**2).sum(1)  # [n,P]
        # the difference of large terms may round to just below 0
        return np.sqrt(squares.min(1).clip(min=0)).astype(np.float32)

    def percentile(self, distance: np.ndarray) -> np.ndarray:
        """Returns, for distances [n], the percentage of validation images that are nearer: float32 [n], 0…100."""
        q = self.quantiles.astype(np.float64)
        nearer = np.searchsorted(q, distance, side="left")  # number of quantiles below
        low, high = q[(nearer - 1).clip(min=0)], q[nearer.clip(max=len(q) - 1)]
        inside = (nearer > 0) & (nearer < len(q))
        part = np.divide(distance - low, high - low, out=np.zeros(len(nearer)), where=inside)
        return np.where(inside, nearer - 1 + part, np.where(nearer == 0, 0, 100)).astype(np.float32)


def fit(training: Blocks, validation: Blocks, classes: int) -> Reference:
    """Returns the reference of training images, with the quantiles of validation images.

    `classes` is the number of classes; those without a training image have no mean. Reads the training images twice.
    Raises `ValueError` if there is no training or no validation image.
    """
    counts, means = class_means(training, classes)
    if not counts.any():
        raise ValueError("there is no training image")
    covariance = within_class_covariance(training, means)
    whitening = solve_triangular(np.linalg.cholesky(covariance), np.eye(len(covariance)), lower=True)
    unmeasured = np.zeros(len(LEVELS), np.float32)
    reference = Reference(means[counts > 0].astype(np.float32), whitening.astype(np.float32), unmeasured)
    distances = np.concatenate([np.zeros(0, np.float32), *(reference.distance(z) for z, _ in validation())])
    if not len(distances):
        raise ValueError("there is no validation image")
    return replace(reference, quantiles=np.quantile(distances, LEVELS).astype(np.float32))


def class_means(blocks: Blocks, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of images of every class, int64 [C], and their mean feature, float64 [C,K]; 0 without any."""
    # one column, which broadcasts: K is known with the first block only
    counts, sums = np.zeros(classes, np.int64), np.zeros((classes, 1))
    for z, labels in blocks():
        counts += np.bincount(labels, minlength=classes)
        of_block = np.zeros((classes, z.shape[1]))
        for c in np.unique(labels):
            of_block[c] = z[labels == c].sum(0, dtype=np.float64)
        sums = sums + of_block
    return counts, sums / counts.clip(min=1)[:, None]


def within_class_covariance(blocks: Blocks, means: np.ndarray) -> np.ndarray:
    """Returns the covariance Σ [K,K] of features around the means [C,K] of their classes, positive definite.

    Ledoit & Wolf 2004, "A well-conditioned estimator for large-dimensional covariance matrices", lemmas 3.2 to 3.5:
    Σ = ρ μ I + (1 − ρ) S with S = Σ_i x_i x_iᵀ / n, μ = tr S / K, ρ = b² / d², d² = ‖S − μI‖² and
    b² = Σ_i ‖x_i x_iᵀ − S‖² / n², at most d². It equals scikit-learn's `ledoit_wolf(x, assume_centered=True)`, which
    needs all features in memory.
    """
    n, fourth, width = 0, 0.0, means.shape[1]  # fourth: Σ_i ‖x_i‖⁴ = Σ_i ‖x_i x_iᵀ‖²
    s = np.zeros((width, width))
    for z, labels in blocks():
        x = z - means[labels]
        s += x.T @ x
        fourth += float((np.einsum("nk,nk->n", x, x) ** 2).sum())
        n += len(x)
    s /= n
    trace, norm = float(np.trace(s)), float((s**2).sum())
    mu, d2 = trace / width, norm - trace**2 / width
    b2 = min((fourth / n - norm) / n, d2)
    rho = b2 / d2 if b2 > 0 else 0.0
    s *= 1 - rho
    # features that never differ within a class have variance 0: their differences count in units of the resolution
    least = RESOLUTION * (float((means**2).mean()) + mu)
    s[np.diag_indices(width)] += rho * mu + (least or 1.0)  # 1: all features are 0
    return s
