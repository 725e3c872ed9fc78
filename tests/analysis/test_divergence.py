"""Maximum mean discrepancies: recorded numbers, closed forms, and what both say about equal distributions."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from recorded import golden
from torch import Tensor

from xdm_ft.analysis.divergence import (
    GAMMAS,
    mean_and_error,
    median_bandwidths,
    published_mmd,
    published_mmd_of_batches,
    square_distances,
    unbiased_mmd2,
)


def normal(n: int, width: int, seed: int, shift: float = 0.0) -> Tensor:
    z = torch.randn(n, width, generator=torch.Generator().manual_seed(seed))
    z[:, 0] += shift
    return z


def test_the_published_measure_is_the_recorded_one() -> None:
    g = golden("mmd_cov.npz")
    assert published_mmd(g["a"], g["b"]) == pytest.approx(float(g["gaussian"]), abs=1e-6)
    pairs = [(g[f"dom{i}"], g[f"dom{j}"]) for i, j in ((0, 1), (0, 2), (1, 2))]
    # γ = 1000 multiplies what float32 loses in a squared distance, and that depends on the processor
    assert np.mean([published_mmd(*pair) for pair in pairs]) == pytest.approx(
        float(g["gaussian_all_domains"]), abs=1e-4
    )
    torch.testing.assert_close(square_distances(g["a"], g["b"]).float(), g["cdist_ab"], atol=1e-5, rtol=0)
    exact = sum((-gamma * square_distances(g["a"], g["b"])).exp() for gamma in GAMMAS)
    torch.testing.assert_close(exact.float(), g["kernel_ab"], atol=1e-5, rtol=0)


def test_batches_are_averaged_and_a_smaller_one_is_left_out() -> None:
    a, b = normal(70, 3, 0), normal(75, 3, 1)
    by_hand = (published_mmd(a[:32], b[:32]) + published_mmd(a[32:64], b[32:64])) / 2
    assert published_mmd_of_batches(a, b, 32) == pytest.approx(by_hand)
    with pytest.raises(ValueError, match="no batch of 128"):
        published_mmd_of_batches(a, b, 128)


def test_the_estimate_is_the_mean_over_pairs() -> None:
    a, b, bandwidths = normal(9, 3, 0), normal(9, 3, 1, shift=1.0), [0.7, 2.0]

    def k(x: Tensor, y: Tensor) -> float:
        return sum(math.exp(-float((x - y).square().sum()) / (2 * s**2)) for s in bandwidths) / 2

    terms = [k(a[i], a[j]) + k(b[i], b[j]) - k(a[i], b[j]) - k(a[j], b[i]) for i, j in permutations(range(9), 2)]
    found = unbiased_mmd2(a, b, bandwidths)  # both sides are drawn in the same order: a_i stays beside b_i
    assert found.value == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    assert (found.n, found.bandwidths) == (9, bandwidths)


def test_the_error_is_the_unbiased_estimate_of_the_variance() -> None:
    """Without the cut-offs the variance of a U-statistic is estimated without bias by U² − mean of h_ij h_kl."""
    x = normal(7, 1, 3)[:, 0].double()
    h = (x[:, None] + x) * (1 + x[:, None] * x)
    h.fill_diagonal_(0)
    value, error = mean_and_error(h)
    four = [float(h[i, j] * h[k, m]) for i, j, k, m in permutations(range(7), 4)]
    assert value == pytest.approx(float(h.sum()) / 42)
    assert error**2 == pytest.approx(value**2 - sum(four) / len(four))


@pytest.mark.parametrize("n", [8, 64])
def test_equal_distributions_have_mmd_0_at_any_size_and_the_published_measure_does_not(n: int) -> None:
    runs, width = 3200 // n, 64
    bandwidths = median_bandwidths(normal(200, width, 0))
    samples = [(normal(n, width, 2 * run + 1), normal(n, width, 2 * run + 2)) for run in range(runs)]
    found = [unbiased_mmd2(*pair, bandwidths) for pair in samples]
    values = np.array([mmd.value for mmd in found])
    spread = values.std(ddof=1)
    assert abs(values.mean()) < 4 * spread / math.sqrt(runs)
    # the stated error is that of the estimates, or a little more
    assert 0.8 * spread < np.sqrt(np.mean([mmd.stderr**2 for mmd in found])) < 1.6 * spread
    within = np.mean([abs(mmd.value) < 1.96 * mmd.stderr for mmd in found])
    assert within > 0.9
    published = np.mean([published_mmd(*pair) for pair in samples])
    assert published > 0.5 * 14 / n  # most of its diagonal


def test_the_limit_draws_from_all_samples() -> None:
    """Data are often sorted: the first `most` would be of one class or domain."""
    a, b = normal(400, 2, 0), normal(400, 2, 1)
    a[200:] += 5
    b[200:] += 5
    found = unbiased_mmd2(a, b, most=100)
    assert found.n == 100
    assert abs(found.value) < 3 * found.stderr
    assert max(found.bandwidths) > 5  # twice the median distance, which spans both halves


def test_points_that_are_all_equal_and_too_few() -> None:
    found = unbiased_mmd2(torch.ones(5, 2), torch.ones(6, 2))
    assert (found.value, found.stderr, found.n, found.bandwidths) == (0.0, 0.0, 5, [0.0] * 3)
    with pytest.raises(ValueError, match="3 and 9 samples"):
        unbiased_mmd2(torch.ones(3, 2), torch.ones(9, 2))
