"""CLIPood against its equation term by term, and against the authors' form of it; what it trains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.clipood import CLIPood
from xdm_ft.core import Batch, Task

CLASSES, WIDTH, SCALE = 4, 6, 100.0
Y, DOMAIN = torch.tensor([0, 3, 2, 2, 1]), torch.tensor([0, 0, 1, 1, 1])


def embeddings() -> Tensor:
    return F.normalize(torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1)), dim=1)


def images() -> Tensor:
    return F.normalize(torch.randn(len(Y), WIDTH, generator=torch.Generator().manual_seed(2)), dim=1)


def clipood(settings: dict[str, Any] | None = None, **setup: Any) -> CLIPood:
    task = Task(tuple("abcd"), ("p", "q"))
    about = {"text_weight": SCALE * embeddings(), "head_init": "zero_shot", **setup}
    return CLIPood(Setup(task, WIDTH, 10, 0, **about), **(settings or {}))


def loss(algorithm: CLIPood, z: Tensor) -> Tensor:
    batch = Batch(z, Y, DOMAIN, torch.arange(len(Y)), torch.arange(len(Y)))
    return algorithm(z, batch, 0).total


def naive(z: Tensor, margin: float) -> list[float]:
    """The equation, sample by sample and class by class, in float64."""
    text, found = embeddings().double(), []
    for image, y in zip(z.double(), Y.tolist(), strict=True):
        top = math.exp(float(image @ text[y]) * SCALE)
        bottom = sum(
            math.exp((float(image @ text[c]) + margin * (1 - float(text[y] @ text[c]))) * SCALE) for c in range(CLASSES)
        )
        found.append(-math.log(top / bottom))
    return found


@pytest.mark.parametrize("margin", [0.0, 0.3, 1.0])
def test_the_equation(margin: float) -> None:
    own = clipood({"margin": margin}, loss_average="sample")
    expected = naive(images(), margin)
    assert float(loss(own, images())) == pytest.approx(sum(expected) / 5, rel=1e-4)
    by_domain = clipood({"margin": margin}, loss_average="domain")
    of_domains = (sum(expected[:2]) / 2 + sum(expected[2:]) / 3) / 2
    assert float(loss(by_domain, images())) == pytest.approx(of_domains, rel=1e-4)


def test_no_margin_is_zero_shot_and_the_features_alone_get_the_gradient() -> None:
    algorithm, z = clipood({"margin": 0.0}, loss_average="sample"), images().requires_grad_()
    plain = loss(algorithm, z)
    torch.testing.assert_close(plain, F.cross_entropy(SCALE * z @ embeddings().T, Y))
    assert loss(clipood(loss_average="sample"), z) > plain + 1
    assert not any(parameter.requires_grad for parameter in algorithm.parameters())
    assert torch.autograd.grad(plain, z)[0].any()
    assert algorithm.state_dict().keys() == {"head.weight", "head.bias", "seed"}, "margins follow from the setup"
