"""Class means, their classifier and its scale, against loops over images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor

from xdm_ft.algorithms import Candidate, Setup
from xdm_ft.algorithms.prototypes import Prototypes, best_scale, class_means
from xdm_ft.runtime.tensors import Batch, Task

CLASSES, WIDTH = 4, 6
Y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 0, 1])  # nothing of class 3
DOMAIN = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])  # class 2 in one domain only
SETUP = Setup(Task(tuple("abcd"), ("p", "q")), WIDTH, steps=0, seed=0)


def features() -> Tensor:
    return F.normalize(torch.randn(len(Y), WIDTH, generator=torch.Generator().manual_seed(0)), dim=1)


def batch(z: Tensor) -> Batch:
    return Batch(z, Y, DOMAIN, torch.arange(len(Y)), torch.arange(len(Y)))


def naive(average: str) -> list[Tensor]:
    """The normalised mean of classes 0, 1, 2."""
    z, found = features().double(), []
    for c in range(3):
        if average == "sample":
            mean = torch.stack([z[i] for i in range(len(Y)) if Y[i] == c]).mean(0)
        else:
            parts = [[z[i] for i in range(len(Y)) if Y[i] == c and DOMAIN[i] == d] for d in range(2)]
            mean = torch.stack([torch.stack(part).mean(0) for part in parts if part]).mean(0)
        found.append(mean / mean.norm())
    return found


def solved(average: Any = "domain", **settings: Any) -> Candidate:
    setup = Setup(**{**vars(SETUP), "loss_average": average})
    [candidate] = Prototypes(setup, **settings).solve(features(), batch(features()))
    return candidate


@pytest.mark.parametrize("rows", [3, 4096])
@pytest.mark.parametrize("average", ["domain", "sample"])
def test_the_means_are_those_of_a_loop(average: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xdm_ft.algorithms.prototypes.ROWS", rows)
    means = class_means(features(), batch(features()), CLASSES, 2, average)
    for c, expected in enumerate(naive(average)):
        torch.testing.assert_close(F.normalize(means, dim=1)[c], expected, rtol=1e-6, atol=1e-7)
    assert not means[3].any()


@pytest.mark.parametrize("average", ["domain", "sample"])
def test_logits_are_the_scaled_cosines_and_a_missing_class_never_wins(average: Any) -> None:
    head = solved(average, scale=7.0).head
    logits = features() @ head["weight"].T + head["bias"]
    for c, prototype in enumerate(naive(average)):
        torch.testing.assert_close(logits[:, c], 7 * (features().double() @ prototype).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[:, 3], torch.full((len(Y),), -7.0))


def test_the_two_averages_differ() -> None:
    one, other = (solved(average, scale=1.0).head["weight"] for average in ("domain", "sample"))
    assert (one - other)[:2].abs().max() > 0.01 and torch.allclose(one[2], other[2])


def test_the_scale_has_the_lowest_loss() -> None:
    """Scipy finds the same minimum of the loss as it is written."""
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(300) % CLASSES
    cosines = 0.3 * torch.rand(300, CLASSES, generator=generator)
    cosines[torch.arange(300), y] += 0.1
    weight = torch.rand(300, generator=generator, dtype=torch.float64)

    def loss(scale: float) -> float:
        return float(F.cross_entropy(scale * cosines.double(), y, reduction="none") @ weight)

    found = best_scale(cosines, y, weight)
    assert found == pytest.approx(minimize_scalar(loss, bounds=(1, 100), method="bounded").x, rel=1e-3)
    assert 2 < found < 60


def test_the_scale_stays_within_its_range() -> None:
    y, weight = torch.arange(8) % 2, torch.ones(8, dtype=torch.float64)
    right = F.one_hot(y, 2).float()
    assert best_scale(right, y, weight) == pytest.approx(100)  # separated: no scale is too large
    assert best_scale(1 - right, y, weight) == pytest.approx(1)  # wrong: the smaller the better


def test_the_scale_follows_class_weights() -> None:
    of_class = torch.tensor([5.0, 0.1, 0.1, 1.0])
    [weighted] = Prototypes(Setup(**{**vars(SETUP), "class_weight": of_class})).solve(features(), batch(features()))
    assert not np.isclose(weighted.hparams["scale"], solved().hparams["scale"], rtol=1e-3)
