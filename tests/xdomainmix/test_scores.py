"""Equations (1) and (2): the closed form, autograd, and both on maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from xdm_ft.xdomainmix import autograd_scores, linear_scores

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture
def example() -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    return torch.randn(10, 24), nn.Linear(24, 5), torch.randint(0, 5, (10,))


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 5))


def test_closed_form_equals_autograd_also_on_maps(example: tuple[Tensor, nn.Linear, Tensor]) -> None:
    """Scores of a map are those of the pooled features up to a constant."""
    by_hand = torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0], [-1.0, 0.5]]), torch.tensor([0, 1])
    assert linear_scores(*by_hand).tolist() == [[10.0, -40.0], [-3.0, 2.0]]
    z, head, target = example
    closed = linear_scores(z, head.weight, target)
    torch.testing.assert_close(closed, autograd_scores(z, head, target), atol=1e-7, rtol=1e-6)
    maps = torch.randn(10, 24, 3, 5)
    on_maps = linear_scores(maps, head.weight, target)
    by_autograd = autograd_scores(maps, lambda features: head(features.mean((2, 3))), target)
    torch.testing.assert_close(on_maps, by_autograd, atol=1e-7, rtol=1e-5)
    pooled = linear_scores(maps.mean((2, 3)), head.weight, target)
    torch.testing.assert_close(on_maps * 15, pooled, atol=1e-6, rtol=1e-5)


def test_any_head(example: tuple[Tensor, nn.Linear, Tensor]) -> None:
    """A two-layer head, one sample at a time, by `torch.autograd` itself."""
    z, _, target = example
    head = two_layers()
    scores = autograd_scores(z, head, target)
    for row, (features, label) in enumerate(zip(z, target, strict=True)):
        features = features.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(head(features)[label], features)
        torch.testing.assert_close(scores[row], (gradient * features).detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("of_head", PRECISIONS)
def test_heads_of_any_precision(example: tuple[Tensor, nn.Linear, Tensor], of_head: torch.dtype) -> None:
    """The derivative of a linear head is a row of its weight in any precision, so both are equal in all bits."""
    for of_z in PRECISIONS:
        z, head, target = example[0].to(of_z), example[1].to(of_head), example[2]
        scores = autograd_scores(z, head, target)
        assert scores.dtype == torch.float32
        assert torch.equal(scores, linear_scores(z, head.weight, target))
        if of_z == of_head:
            assert torch.equal(autograd_scores(z, lambda features, head=head: head(features), target), scores)
        other = two_layers()
        expected = autograd_scores(z.float(), other, target)
        tolerance = {"atol": 0.03, "rtol": 0.05} if of_head == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
        torch.testing.assert_close(autograd_scores(z, other.to(of_head), target), expected, **tolerance)


def test_no_gradient_and_float32(example: tuple[Tensor, nn.Linear, Tensor]) -> None:
    z, head, target = example
    z = z.requires_grad_()
    scores = autograd_scores(z, head, target)
    assert not scores.requires_grad and not linear_scores(z, head.weight, target).requires_grad
    assert linear_scores(z.bfloat16(), head.weight.bfloat16(), target).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(autograd_scores(z, head, target), scores)
