"""How far an image is from the training images, for the encoder: the Mahalanobis distance of its feature to the nearest
class.

Lee et al. 2018, "A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks",
equations (1) and (2): class means μ_c and one covariance Σ for all classes, of the training features;
distance(z) = min_c √((z − μ_c)ᵀ Σ⁻¹ (z − μ_c)). Σ is shrunk as in Ledoit & Wolf 2004, since there may be fewer images
than features. The distance does not change if all features are scaled or shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.linalg import solve_triangular

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
