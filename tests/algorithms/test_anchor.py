"""The pull of a class head to its start: by hand, beside every method's loss, and with CLAP's strengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_contract import ALGORITHMS, CLASSES, METHODS, STEPS, setup, toy
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm, pull, text_confidence
from xdm_ft.algorithms.erm import ERM
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.training.bank.step import settings_of


def moved(algorithm: Algorithm) -> Algorithm:
    """With other parameters than those that it starts from."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return algorithm


def by_hand(start: nn.Module, end: nn.Module, a: Tensor, same_divisor: bool) -> float:
    """The mean over classes, one class after the other."""
    rows = [(float(w.detach().double().square().sum()), c) for c, w in enumerate(start.weight)]  # type: ignore[arg-type]
    mean, total = sum(length for length, _ in rows) / len(rows), 0.0
    for length, c in rows:
        way = float((end.weight[c] - start.weight[c]).detach().double().square().sum())  # type: ignore[index]
        if hasattr(end, "bias"):
            way += float((end.bias[c] - start.bias[c]).detach() ** 2)  # type: ignore[index]
        total += float(a[c]) * way / (mean if same_divisor else length)
    return total / len(rows)


def pulled(algorithm: Algorithm, scale: float = 1.0) -> tuple[float, dict[str, Tensor]]:
    """The value and what is added to gradients of 1."""
    parameters = dict(algorithm.named_parameters())
    gradients = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
    value = pull(parameters, dict(algorithm.named_buffers()), gradients, scale)
    return float(value), {name: gradient - 1 for name, gradient in gradients.items()}


@pytest.mark.parametrize("head", [Linear, Cosine])
@pytest.mark.parametrize("head_init", ["random", "zero_shot"])
def test_the_pull_is_that_of_the_definition(head: Any, head_init: Any) -> None:
    a, arguments = torch.tensor([0.0, 0.5, 3.0]), {"head": head, "head_init": head_init}
    start, end = ERM(setup(**arguments)), moved(ERM(setup(**arguments, anchor=a)))
    before = {name: parameter.detach().clone() for name, parameter in end.named_parameters()}
    value, gradients = pulled(end)
    assert value == pytest.approx(by_hand(start.head, end.head, a, same_divisor=head_init == "random"), rel=1e-5)
    assert all(torch.equal(parameter, before[name]) for name, parameter in end.named_parameters())
    # the gradient, by differences along a random direction
    way = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for name, p in before.items()}
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in end.named_parameters():
                parameter.copy_(before[name] + sign * 1e-2 * way[name])
        ends.append(by_hand(start.head, end.head, a, same_divisor=head_init == "random"))
    slope = sum(float((gradients[name] * way[name]).sum()) for name in way)
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=1e-3)
    assert pulled(ERM(setup(**arguments, anchor=a)))[0] == 0 == pulled(ERM(setup(**arguments)))[0]


def test_a_scaler_scales_the_gradient_alone() -> None:
    algorithm = moved(ERM(setup(anchor=torch.ones(CLASSES))))
    (value, once), (again, eight) = pulled(algorithm), pulled(algorithm, scale=8.0)
    assert value == again > 0
    for name, gradient in once.items():
        torch.testing.assert_close(eight[name], 8 * gradient, rtol=1e-4, atol=1e-5)


def test_one_number_pulls_a_linear_and_a_cosine_head_alike() -> None:
    """A linear head holds s·t, a cosine head t: the same turn of all weights costs the same."""
    values = []
    for head in (Linear, Cosine):
        algorithm = ERM(setup(head=head, head_init="zero_shot", anchor=torch.ones(CLASSES)))
        with torch.no_grad():
            algorithm.head.weight *= 1.5  # type: ignore[operator]
        values.append(pulled(algorithm)[0])
    assert values == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_method_sees_it_and_no_file_of_weights_holds_it(name: str) -> None:
    plain, anchored = (moved(METHODS[name](setup(anchor=anchor))) for anchor in (None, torch.ones(CLASSES)))
    batch = toy()
    for step in (0, STEPS - 1):
        assert torch.equal(plain(batch.x, batch, step).total, anchored(batch.x, batch, step).total)
    assert anchored.state_dict().keys() == plain.state_dict().keys()
    assert settings_of(plain) != settings_of(anchored), "a bank stacks no heads of which some have it"
    assert pulled(anchored)[0] > 0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=12))
def test_the_strengths_of_clap_are_means_over_a_class(images: list[tuple[int, float]]) -> None:
    y, probability = (torch.tensor(values) for values in zip(*images, strict=True))
    found = text_confidence(probability, y, 5)
    for c in range(5):
        of_class = [p for label, p in images if label == c]
        assert float(found[c]) == pytest.approx(sum(of_class) / len(of_class) if of_class else 0, abs=1e-6)
