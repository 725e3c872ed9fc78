"""Solvers that begin at the class embeddings: the linear probe around them, the Gaussian discriminant beside."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import Tensor

from xdm_ft.algorithms import LossAverage, Setup, normalised_sample_weight
from xdm_ft.algorithms.gda import ALPHAS, GDA, discriminant
from xdm_ft.algorithms.linear_probe import STRENGTHS, LinearProbe
from xdm_ft.core import Batch, Task

SCALE = 100.0


def problem(
    n: int = 60, width: int = 12, classes: int = 4, average: LossAverage = "domain", seed: int = 0, text: bool = True
) -> tuple[Setup, Tensor, Batch]:
    """Features of length 1 around class embeddings of length 1, in two domains of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = F.normalize(torch.randn(classes, width, generator=generator), dim=1)
    y = torch.arange(n) % classes
    z = F.normalize(embeddings[y] + 0.6 * torch.randn(n, width, generator=generator), dim=1)
    task = Task(tuple(f"c{c}" for c in range(classes)), ("a", "b"))
    weight = SCALE * embeddings if text else None
    setup = Setup(task, width, steps=0, seed=0, loss_average=average, text_weight=weight)
    domain = (torch.arange(n) < n // 4).long()
    return setup, z, Batch(z, y, domain, torch.arange(n), torch.arange(n))


def factors(batch: Batch, average: LossAverage) -> np.ndarray:
    return normalised_sample_weight(batch.domain, 2, average, dtype=torch.float64).numpy()


@pytest.mark.parametrize("average", ["domain", "sample"])
def test_every_point_of_the_road_is_the_optimum_of_the_problem_as_it_is_written(average: LossAverage) -> None:
    """A second implementation in NumPy, solved by scipy from zero, in float64."""
    setup, z, batch = problem(average=average)
    assert setup.text_weight is not None
    x, y, w, text = z.double().numpy(), batch.y.numpy(), factors(batch, average), setup.text_weight.double().numpy()
    classes, width = text.shape

    def objective(flat: np.ndarray, l2: float) -> tuple[float, np.ndarray]:
        weight, bias = flat[: classes * width].reshape(classes, width), flat[classes * width :]
        logits = x @ weight.T + bias
        p = np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
        loss = -w @ np.log(p[np.arange(len(y)), y]) + l2 / 2 * (((weight - text) ** 2).sum() + (bias**2).sum())
        p[np.arange(len(y)), y] -= 1
        gradient = (p * w[:, None]).T @ x + l2 * (weight - text), (p * w[:, None]).sum(0) + l2 * bias
        return loss, np.concatenate([gradient[0].ravel(), gradient[1]])

    first, *road = LinearProbe(setup, center="zero_shot", tolerance=1e-6).solve(z, batch)
    assert first.hparams == {"strength": None, "l2": None} and not first.head["bias"].any()
    assert torch.equal(first.head["weight"], setup.text_weight)
    assert [point.hparams["strength"] for point in road] == [*STRENGTHS["zero_shot"]]
    for point in road:
        l2 = point.hparams["l2"]
        assert l2 is not None and l2 == point.hparams["strength"]
        found, _ = objective(np.concatenate([point.head[k].double().numpy().ravel() for k in ("weight", "bias")]), l2)
        options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 0, "gtol": 1e-9}
        best = minimize(objective, np.append(text.ravel(), np.zeros(classes)), (l2,), "L-BFGS-B", True, options=options)
        assert found == pytest.approx(best.fun, rel=1e-6, abs=1e-9)


def test_the_road_leads_from_zero_shot_to_the_plain_probe() -> None:
    setup, z, batch = problem(average="sample")
    assert setup.text_weight is not None
    _, far = LinearProbe(setup, center="zero_shot", strengths=(1e6,)).solve(z, batch)
    torch.testing.assert_close(far.head["weight"], setup.text_weight, rtol=0, atol=1e-5)
    # where the pull is weak, the training images alone count
    _, near = LinearProbe(setup, center="zero_shot", strengths=(1e-6,)).solve(z, batch)
    assert float(F.cross_entropy(z @ near.head["weight"].T + near.head["bias"], batch.y)) < 5e-3


def test_without_a_center_it_is_the_probe_around_zero() -> None:
    setup, z, batch = problem()
    for written in (None, "zero"):
        heads = [of.head["weight"] for of in LinearProbe(setup, center=written).solve(z, batch)]
        assert len(heads) == len(STRENGTHS["zero"])
        alone = [of.head["weight"] for of in LinearProbe(problem(text=False)[0], center="zero").solve(z, batch)]
        assert all(map(torch.equal, heads, alone))


def by_loops(z: Tensor, w: np.ndarray, y: list[int], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """W and b of the discriminant, image by image, with a pseudo-inverse."""
    x, n, width = z.double().numpy(), len(z), z.shape[1]
    means = np.zeros((classes, width))
    for c in range(classes):
        mass = sum(w[i] for i in range(n) if y[i] == c)
        means[c] = sum((w[i] * x[i] for i in range(n) if y[i] == c), np.zeros(width)) / (mass or 1)
    sigma = sum(w[i] * np.outer(x[i] - means[y[i]], x[i] - means[y[i]]) for i in range(n)) * n / (n - 1)
    if np.trace(sigma) > 1e-12:
        inverse = width * np.linalg.pinv((n - 1) * sigma + np.trace(sigma) * np.eye(width))
    else:
        inverse = width * np.eye(width)
    weight = means @ inverse
    bias = np.array([-math.log(classes) - means[c] @ inverse @ means[c] / 2 for c in range(classes)])
    have = [c in y for c in range(classes)]
    weight[np.logical_not(have)], bias[np.logical_not(have)] = weight[have].mean(0), bias[have].mean()
    return weight, bias


@given(st.integers(5, 40), st.integers(2, 9), st.integers(1, 6), st.sampled_from(["domain", "sample"]), st.booleans())
def test_the_discriminant_is_that_of_loops(n: int, width: int, classes: int, average: LossAverage, lacks: bool) -> None:
    setup, z, batch = problem(n, width, classes + lacks, average, seed=n + width)
    y = batch.y % classes  # a class without images
    batch = batch._replace(y=y)
    weight, bias = by_loops(z, factors(batch, average), y.tolist(), classes + lacks)
    found = discriminant(z, torch.from_numpy(factors(batch, average)), y, classes + lacks)
    for ours, theirs in zip(found, (weight, bias), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())
    assert setup.text_weight is not None
    for candidate in GDA(setup).solve(z, batch):
        alpha = candidate.hparams["gda_alpha"]
        assert alpha is not None
        head = setup.text_weight.double().numpy() + alpha * weight
        np.testing.assert_allclose(candidate.head["weight"].numpy(), head, rtol=1e-4, atol=1e-4 * np.abs(head).max())
        np.testing.assert_allclose(
            candidate.head["bias"].numpy(), alpha * bias, rtol=1e-4, atol=1e-4 * alpha * np.abs(bias).max()
        )


def test_its_first_candidate_is_zero_shot_and_a_large_set_adds_the_plain_discriminant() -> None:
    setup, z, batch = problem()
    first, *others = GDA(setup).solve(z, batch)
    assert setup.text_weight is not None and torch.equal(first.head["weight"], setup.text_weight)
    assert not first.head["bias"].any() and first.hparams == {"gda_alpha": 0}
    assert [of.hparams["gda_alpha"] for of in others] == [*ALPHAS]
    large = problem(n=700, width=3)
    assert [*GDA(large[0]).solve(*large[1:])][-1].hparams["gda_alpha"] == pytest.approx(699 / 3)


def test_one_image_a_class_gives_the_class_means() -> None:
    _, z, batch = problem(n=4)
    weight, bias = discriminant(z, torch.full((4,), 0.25, dtype=torch.float64), batch.y, 4)
    torch.testing.assert_close(weight, 12 * z.double())
    torch.testing.assert_close(bias, torch.full((4,), -math.log(4) - 6).double(), rtol=1e-6, atol=0)


def test_without_text_one_scale_is_fitted() -> None:
    setup, z, batch = problem(text=False, average="sample")
    [only] = GDA(setup).solve(z, batch)
    weight, bias = discriminant(z, torch.from_numpy(factors(batch, "sample")), batch.y, 4)

    def loss(alpha: float) -> float:
        return float(F.cross_entropy(alpha * (z.double() @ weight.T + bias), batch.y))

    alpha = only.hparams["gda_alpha"]
    assert alpha is not None and loss(alpha) <= min(loss(alpha * 1.1), loss(alpha / 1.1))
    torch.testing.assert_close(only.head, {"weight": (alpha * weight).float(), "bias": (alpha * bias).float()})
    assert GDA(setup).candidates == 1
