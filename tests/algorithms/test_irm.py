"""IRM against a double backward pass over halves of every domain, and its annealing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from recorded import SETUP
from torch import Tensor

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.irm import IRM, rank_in_domain
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Batch


def batch(domain: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(len(domain), SETUP.width, generator=generator)
    y = torch.randint(0, 3, (len(domain),), generator=generator)
    return Batch(z, y, torch.tensor(domain), torch.arange(len(domain)), torch.arange(len(domain)))


def slope(logits: Tensor, y: Tensor) -> Tensor:
    """∂/∂s of the mean cross-entropy of s · logits at s = 1."""
    scale = torch.ones((), requires_grad=True)
    return torch.autograd.grad(F.cross_entropy(scale * logits, y), scale, create_graph=True)[0]


def by_hand(algorithm: IRM, given: Batch) -> Tensor:
    penalties = []
    for d in sorted(set(given.domain.tolist())):
        logits, y = algorithm.head(given.x[given.domain == d]), given.y[given.domain == d]
        if len(y) > 1:
            penalties.append(slope(logits[::2], y[::2]) * slope(logits[1::2], y[1::2]))
    return torch.stack(penalties).mean()


@pytest.mark.parametrize("step, weight", [(0, 1.0), (9, 1.0), (10, 100.0), (99, 100.0)])
@pytest.mark.parametrize(
    "domain",
    [[0] * 4 + [1] * 4 + [2] * 4, [0, 1, 2, 2, 1, 0, 0, 2, 1, 0, 0], [0, 1, 0, 0, 0]],  # 1 has one sample: no estimate
)
def test_double_backward(domain: list[int], step: int, weight: float) -> None:
    algorithm, given = IRM(SETUP), batch(domain)
    losses, penalty = algorithm(given.x, given, step), by_hand(algorithm, given)
    torch.testing.assert_close(losses.logs["penalty"], penalty)
    expected = ERM(SETUP)(given.x, given, step).total + weight * penalty
    torch.testing.assert_close(losses.total, expected)
    parameters = list(algorithm.head.parameters())
    plain = algorithm.average(F.cross_entropy(algorithm.head(given.x), given.y, reduction="none"), given)
    for one, other in zip(
        torch.autograd.grad(losses.total, parameters),
        torch.autograd.grad(plain + weight * penalty, parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_rank_in_domain() -> None:
    assert rank_in_domain(torch.tensor([0, 1, 0, 2, 1, 0]), 4).tolist() == [0, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("domain", [[0, 1, 2], [1]])
def test_without_an_estimate_it_is_erm(domain: list[int]) -> None:
    given = batch(domain)
    losses = IRM(SETUP)(given.x, given, 50)
    assert losses.logs["penalty"] == 0 and losses.total == ERM(SETUP)(given.x, given, 50).total


def test_one_domain_has_its_own_penalty() -> None:
    algorithm, given = IRM(SETUP), batch([1] * 6)
    assert by_hand(algorithm, given) != 0
    torch.testing.assert_close(algorithm(given.x, given, 50).logs["penalty"], by_hand(algorithm, given))


def test_annealing() -> None:
    algorithm = IRM(SETUP)
    assert algorithm.anneal_steps == 10  # DomainBed's 500 of 5000
    assert [step for step in range(100) if algorithm.resets_optimizer(step)] == [10]
    assert algorithm.first_selectable_step == 11
    assert IRM(SETUP, anneal_steps=0).first_selectable_step == 1
    with pytest.raises(UserError, match=r"irm: anneal_steps 100 leaves no step .*has 100 steps.*lower") as fault:
        IRM(SETUP, anneal_steps=100)
    assert "\n" not in str(fault.value)
