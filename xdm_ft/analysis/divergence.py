"""How far augmented features are from original ones: maximum mean discrepancies (section 4.3, table 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.storage import Json

GAMMAS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
"""γ of the published kernel, Σ_γ exp(−γ‖x − y‖²)."""
MULTIPLES = (0.5, 1.0, 2.0)
"""Bandwidths of the unbiased estimate, in median distances of original features."""
MAX_SAMPLES = 2000
"""Samples of each side that the unbiased estimate uses at most: time and memory grow with their square."""


class Mmd(NamedTuple):
    """An estimate of MMD², in [0, 2] but for its error."""

    value: float
    stderr: float  # standard error of `value`
    n: int  # samples of each side
    bandwidths: list[float]  # σ of the kernels whose mean k is


def divergence(original: Tensor, other: Tensor, augmented: Tensor, quantile: float | None, batch_size: int) -> Json:
    """Returns how far augmented features are from original ones, at one quantile of τ_d (None: the method has none).

    The unbiased MMD² compares the `original` features [n,K] of one half of the images with the `augmented` ones of the
    other half; the published measure compares that half with itself, as the authors' code does.
    """
    unbiased = unbiased_mmd2(original, augmented)
    return {
        "quantile": quantile,
        "published_mmd": published_mmd_of_batches(other, augmented, batch_size),
        "batch_size": batch_size,
        "unbiased_mmd2": unbiased.value,
        "stderr": unbiased.stderr,
        "n": unbiased.n,
        "bandwidths": unbiased.bandwidths,
    }


def published_mmd(a: Tensor, b: Tensor) -> float:
    """Returns the published measure of two batches, float [n,K] and [m,K].

    It is mean k(a,a) + mean k(b,b) − 2 mean k(a,b), k = Σ_γ exp(−γ‖·‖²), the V-statistic: both first means contain the
    diagonal, where k = 7. If features are further apart than the widest kernel sees (γ = 1e-3: √1000), all other k
    vanish, and the value is 7/n + 7/m, whatever the features are.

    Computed in float32 as published, with ‖x − y‖² = ‖x‖² − 2⟨x,y⟩ + ‖y‖². Its rounding makes distances of equal
    features positive, and γ = 1e3 sees that: the value of 32 features of width 1280 is 1% below the exact one.
    """
    return float(_published(a, a) + _published(b, b) - 2 * _published(a, b))


def published_mmd_of_batches(a: Tensor, b: Tensor, batch_size: int) -> float:
    """Returns the mean of `published_mmd` over consecutive batches of `a` and `b`.

    It depends on `batch_size`; two values compare only if theirs is the same. A last batch that is smaller is left out.
    Batches should be random samples: shuffle features that are sorted by class or domain. The authors' program compares
    each batch of 32 per training domain with its own augmented features.

    Raises:
        ValueError: `a` or `b` has fewer samples than a batch.
    """
    batches = min(len(a), len(b)) // batch_size
    if batches < 1:
        raise ValueError(f"{len(a)} and {len(b)} samples make no batch of {batch_size}")
    pairs = zip(a.split(batch_size)[:batches], b.split(batch_size)[:batches], strict=True)
    return sum(published_mmd(*pair) for pair in pairs) / batches


def _published(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.float(), b.float()
    square = torch.addmm(b.square().sum(1), a, b.T, alpha=-2).add(a.square().sum(1)[:, None]).clamp_min(1e-30)
    return torch.stack([(-gamma * square).exp() for gamma in GAMMAS]).sum(0).mean()


def unbiased_mmd2(a: Tensor, b: Tensor, bandwidths: Sequence[float] | None = None, most: int = MAX_SAMPLES) -> Mmd:
    """Returns the U-statistic of MMD² between the distributions of original features `a` and augmented ones `b`.

    With n samples of each side and h_ij = k(a_i,a_j) + k(b_i,b_j) − k(a_i,b_j) − k(a_j,b_i) it is the mean of h_ij over
    i ≠ j (Gretton et al. 2012, A Kernel Two-Sample Test, lemma 6, equation (4)). Its mean is MMD² at every n: 0 if both
    distributions are equal, so that an estimate may be negative. k is the mean of Gaussian kernels
    exp(−‖x − y‖² / 2σ²), one for each bandwidth σ.

    The standard error is that of a U-statistic of degree 2 (Hoeffding 1948),
    Var = 4(n−2)/(n(n−1)) ζ₁ + 2/(n(n−1)) ζ₂ with ζ₁ = Cov(h_12, h_13) and ζ₂ = Var(h_12), estimated from triples and
    pairs and cut off at 0. ζ₁ alone (Liu et al. 2020, equation (5)) is 0 if both distributions are equal, where ζ₂ is
    the error. It assumes independent samples, so `a` and `b` must come from different images.

    n is the smaller number of samples, at most `most`; those used are drawn without replacement, always the same.
    2000 of width 1280 take 1.3 s on one core.

    Args:
        a: original features, float [n,K].
        b: augmented features of other images, float [m,K].
        bandwidths: σ; None: `median_bandwidths` of the n original features. The same for all augmentations that are
            compared. At n = 8 a kernel that depends on `a` biases the estimate by 5% of its standard deviation.
        most: limit of n.

    Raises:
        ValueError: fewer than four samples on one side.
    """
    n = min(len(a), len(b), most)
    # the error divides by n(n−1)(n−2)(n−3)
    if n < 4:
        raise ValueError(f"{len(a)} and {len(b)} samples: MMD² and its error need at least 4 of each")
    a, b = (side[permutation(0, 0, Stream.MMD_SAMPLES, len(side))[:n]] for side in (a, b))
    bandwidths = median_bandwidths(a) if bandwidths is None else list(bandwidths)
    across = _kernel(square_distances(a, b), bandwidths)
    h = _kernel(square_distances(a, a), bandwidths) + _kernel(square_distances(b, b), bandwidths) - across - across.T
    h.fill_diagonal_(0.0)
    return Mmd(*mean_and_error(h), n, bandwidths)


def median_bandwidths(a: Tensor) -> list[float]:
    """Returns 0.5, 1 and 2 times the median distance of two different samples of `a`, float [n,K] with n ≥ 2."""
    first, second = torch.triu_indices(len(a), len(a), 1)
    median = float(square_distances(a, a)[first, second].median().sqrt())
    return [multiple * median for multiple in MULTIPLES]


def mean_and_error(h: Tensor) -> tuple[float, float]:
    """Returns the U-statistic of a symmetric kernel h, float64 [n,n] with diagonal 0, and its standard error."""
    n = len(h)
    pairs, triples, quadruples = n * (n - 1), n * (n - 1) * (n - 2), n * (n - 1) * (n - 2) * (n - 3)
    total, squares, of_rows = float(h.sum()), float(h.square().sum()), float(h.sum(1).square().sum())
    # Σ_i (Σ_j h_ij)² has the triples and the pairs; (Σ_ij h_ij)² the quadruples, each triple 4 times, each pair twice
    square_mean = (total**2 - 4 * of_rows + 2 * squares) / quadruples
    zeta_1 = max((of_rows - squares) / triples - square_mean, 0.0)
    zeta_2 = max(squares / pairs - square_mean, 0.0)
    return total / pairs, math.sqrt((4 * (n - 2) * zeta_1 + 2 * zeta_2) / pairs)


def _kernel(square: Tensor, bandwidths: list[float]) -> Tensor:
    """Returns the mean of Gaussian kernels of squared distances; a bandwidth of 0 compares for equality."""
    parts = [(square / (-2 * sigma**2)).exp() if sigma else (square == 0).to(square.dtype) for sigma in bandwidths]
    return torch.stack(parts).mean(0)


def square_distances(a: Tensor, b: Tensor) -> Tensor:
    """Returns ‖a_i − b_j‖², float64 [n,m], of float [n,K] and [m,K]."""
    centre = a.double().mean(0)  # far-off features would cancel
    a, b = a.double() - centre, b.double() - centre
    squares = torch.addmm(a.square().sum(1)[:, None] + b.square().sum(1), a, b.T, alpha=-2)
    return squares.clamp_min(0.0)
