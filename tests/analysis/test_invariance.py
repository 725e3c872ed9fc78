"""Distances of covariances and the variance of risks: recorded numbers, a plain reading of the formulas, properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import golden
from torch import Tensor
from torch.nn.functional import cross_entropy

from xdm_ft.analysis.invariance import Invariance, covariance_distance, covariance_noise, risk_variance


def of_domains(features: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Features [n,K] of all domains, and the domains."""
    return torch.cat(features), torch.arange(len(features)).repeat_interleave(torch.tensor([len(z) for z in features]))


def drawn(seed: int, n: int = 60, width: int = 4, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Features, three classes, three domains; the covariance depends on both."""
    source = torch.Generator().manual_seed(seed)
    place = torch.randperm(n, generator=source)
    y, domain = place % 3, place // 3 % 3
    z = torch.randn(n, width, generator=source) * (1 + y + 2 * domain)[:, None] + offset
    return z, y, domain


def by_the_book(z: Tensor, y: Tensor, domain: Tensor) -> tuple[float, float]:
    """Both distances as the formulas say, in numpy, where every cell has images."""
    paper, published = 0.0, []
    for c in range(3):
        cells = [z[(y == c) & (domain == i)].double().numpy() for i in range(3)]
        covariances = [np.cov(cell, rowvar=False) for cell in cells]
        paper += sum(float(((a - b) ** 2).sum()) for a in covariances for b in covariances)
        published.append(
            np.mean([
                np.mean((cells[a].mean(0) - cells[b].mean(0)) ** 2) + np.mean((covariances[a] - covariances[b]) ** 2)
                for a in range(3)
                for b in range(a + 1, 3)
            ])
        )  # fmt: skip
    return paper / 9, float(np.mean(published))


def test_the_recorded_distance_is_the_published_variant() -> None:
    g = golden("invariance.npz")
    z, domain = of_domains([g[f"X{i}"] for i in range(3)])
    y = torch.cat([g[f"y{i}"] for i in range(3)])
    found = covariance_distance(z, y, domain, 3, 3)
    assert found.published_code == pytest.approx(float(g["cov_distance"]), abs=1e-6)
    assert found.paper == pytest.approx(by_the_book(z, y, domain)[0], rel=1e-9)
    assert (found.classes, found.domains) == (3, 3)


def test_the_recorded_risk_variance_is_over_means_of_batches() -> None:
    g = golden("invariance.npz")
    losses, domain = [], []
    for i in range(3):
        per_image = cross_entropy(g[f"X{i}"] @ g["W"].T, g[f"y{i}"], reduction="none")
        batches = per_image.split([int(size) for size in g["batch_sizes"][i]])
        losses += [batch.mean() for batch in batches]
        domain += [i] * len(batches)
    found = risk_variance(torch.stack(losses), torch.tensor(domain), "abc")
    assert found["risk_variance"] == pytest.approx(float(g["risk_variance"]), abs=1e-6)


@pytest.mark.parametrize(
    ("domain", "risk", "variance"),
    [
        ([0, 0, 2, 0], {"a": 8 / 3, "b": None, "c": 5.0}, (5 - 8 / 3) ** 2 / 2),  # half of the squared difference
        ([0, 0, 0, 0], {"a": 13 / 4, "b": None, "c": None}, None),
        ([3, 3, 3, 3], {"a": None, "b": None, "c": None}, None),
    ],
)
def test_risks_by_hand(domain: list[int], risk: dict[str, float | None], variance: float | None) -> None:
    found = risk_variance(torch.tensor([1.0, 3.0, 5.0, 4.0]), torch.tensor(domain), "abc")
    assert found == {
        "risk_variance": variance and pytest.approx(variance),
        "risk": {name: pytest.approx(value) for name, value in risk.items()},
    }


def test_cells_of_one_image_and_classes_of_one_domain_do_not_count() -> None:
    z, y, domain = drawn(2)
    two = (y == 0) & (domain < 2)  # class 0 in two domains
    one = (y == 1) & (domain == 2)  # class 1 in one domain
    lonely = ((y == 2) & (domain == 0)).nonzero()[:1, 0]
    rows = torch.cat([two.nonzero()[:, 0], one.nonzero()[:, 0], lonely])
    found = covariance_distance(z[rows], y[rows], domain[rows], 3, 3)
    only = covariance_distance(z[two], torch.zeros_like(y[two]), domain[two], 1, 2)
    assert found == only
    assert (found.classes, found.domains) == (1, 2)


@pytest.mark.parametrize(("sizes", "off"), [((12, 40, 90), 0.15)])
def test_the_noise_is_what_equal_distributions_have(sizes: tuple[int, ...], off: float) -> None:
    """Skewed, dependent features of one distribution in all domains: the mean distance is the mean noise."""
    source, found = torch.Generator().manual_seed(0), []
    mixing = torch.randn(5, 5, generator=source)
    for _ in range(200):
        z, domain = of_domains([torch.randn(n, 5, generator=source).exp().clamp(max=4) @ mixing for n in sizes])
        found.append(covariance_distance(z, torch.zeros_like(domain), domain, 1, len(sizes)))
    paper, published, _, _, *noise = (sum(column) / len(found) for column in zip(*found, strict=True))
    assert noise == [pytest.approx(paper, rel=off), pytest.approx(published, rel=off)]


def test_the_noise_of_other_features_is_what_the_derivation_says() -> None:
    """Every draw of three of two values is enumerated: the bias is −κ / (n(n−1)), κ the fourth cumulant."""
    values, n = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64), 3
    found = []
    for draw in itertools.product(range(2), repeat=n):
        x = values[list(draw)]
        x = (x - x.mean(0)) * (n / (n - 1)) ** 0.5
        found.append(covariance_noise(x, x.T @ x / n))
    u = values - values.mean(0)
    sigma = u.T @ u / 2
    t, q = float(sigma.trace()), float(sigma.square().sum())
    kappa = float(u.square().sum(1).square().mean()) - t**2 - 2 * q
    assert kappa != 0
    exact = kappa / n + (t**2 + q) / (n - 1)
    assert sum(found) / len(found) == pytest.approx(exact - kappa / (n * (n - 1)))


@pytest.mark.parametrize("small", [2, 3])
def test_the_noise_is_unknown_where_a_domain_has_two_images(small: int) -> None:
    z = torch.randn(20 + small, 4, generator=torch.Generator().manual_seed(0))
    found = covariance_distance(z, torch.zeros(len(z)), (torch.arange(len(z)) >= 20).long(), 1, 2)
    assert found.paper is not None and found.published_code is not None
    assert (found.paper_noise is None) == (found.published_code_noise is None) == (small == 2)
    z, y, domain = (part[: small - 2] for part in drawn(0))
    assert covariance_distance(z, y, domain, 3, 3) == Invariance(None, None, 0, 0, None, None), "no pairs"


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_properties(seed: int) -> None:
    z, y, domain = drawn(seed)
    found = covariance_distance(z, y, domain, 3, 3)
    paper, published = by_the_book(z, y, domain)
    assert found[:2] == (pytest.approx(paper, rel=1e-9), pytest.approx(published, rel=1e-9))
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    permuted = covariance_distance(z[order], y[order], 2 - domain[order], 3, 3)
    assert permuted[:2] == (pytest.approx(paper, rel=1e-9), pytest.approx(published, rel=1e-9))
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).double()).Q
    rotated = covariance_distance(z.double() @ rotation, y, domain, 3, 3)
    assert rotated[:2] == (pytest.approx(paper, rel=1e-9), pytest.approx(published, rel=1e-9))
    scaled = covariance_distance(3 * z, y, domain, 3, 3)
    assert scaled.paper == pytest.approx(81 * paper, rel=1e-5)  # of fourth order: no measure between encoders
