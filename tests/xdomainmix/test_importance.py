"""Equations (1) and (2): the closed form, autograd, and both on maps."""

import pytest
import torch
from torch import nn

from xdm_ft.xdomainmix import autograd_scores, linear_scores


@pytest.fixture
def example() -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(10, 24), nn.Linear(24, 5), torch.randint(0, 5, (10,))


def test_worked_out_by_hand() -> None:
    z = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    weight = torch.tensor([[10.0, 20.0], [-1.0, 0.5]])
    scores = linear_scores(z, weight, torch.tensor([0, 1]))
    assert scores.tolist() == [[10.0, -40.0], [-3.0, 2.0]]


def test_closed_form_equals_autograd(example) -> None:
    z, head, target = example
    torch.testing.assert_close(
        linear_scores(z, head.weight, target), autograd_scores(z, head, target), atol=1e-7, rtol=1e-6
    )


def test_closed_form_equals_autograd_on_maps(example) -> None:
    _, head, target = example
    maps = torch.randn(10, 24, 3, 5)
    by_autograd = autograd_scores(maps, lambda features: head(features.mean((2, 3))), target)
    torch.testing.assert_close(linear_scores(maps, head.weight, target), by_autograd, atol=1e-7, rtol=1e-5)


def test_map_scores_are_those_of_the_pooled_features_up_to_a_constant(example) -> None:
    _, head, target = example
    maps = torch.randn(10, 24, 4, 4)
    pooled = linear_scores(maps.mean((2, 3)), head.weight, target)
    torch.testing.assert_close(linear_scores(maps, head.weight, target) * 16, pooled, atol=1e-7, rtol=1e-6)


def test_any_head(example) -> None:
    """A two-layer head, one sample at a time, by `torch.autograd` itself."""
    z, _, target = example
    head = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 5))
    scores = autograd_scores(z, head, target)
    for row, (features, label) in enumerate(zip(z, target, strict=True)):
        features = features.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(head(features)[label], features)
        torch.testing.assert_close(scores[row], (gradient * features).detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("of_z", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_head", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_of_any_precision(example, of_head: torch.dtype, of_z: torch.dtype) -> None:
    """The derivative of a linear head is a row of its weight in any precision, so both are equal in all bits."""
    z, head, target = example
    z, head = z.to(of_z), head.to(of_head)
    scores = autograd_scores(z, head, target)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, linear_scores(z, head.weight, target))
    if of_z == of_head:
        assert torch.equal(autograd_scores(z, lambda features: head(features), target), scores)
    two_layers = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 5))
    expected = autograd_scores(z.float(), two_layers, target)
    tolerance = {"atol": 0.03, "rtol": 0.05} if of_head == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(autograd_scores(z, two_layers.to(of_head), target), expected, **tolerance)


def test_no_gradient_and_float32(example) -> None:
    z, head, target = example
    z = z.requires_grad_()
    for scores in (linear_scores(z, head.weight, target), autograd_scores(z, head, target)):
        assert not scores.requires_grad
    half = linear_scores(z.bfloat16(), head.weight.bfloat16(), target)
    assert half.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(autograd_scores(z, head, target), autograd_scores(z.detach(), head, target))
        under_autocast = autograd_scores(z, head, target)
    assert torch.equal(under_autocast, autograd_scores(z, head, target))
