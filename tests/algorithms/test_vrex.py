"""VREx against a loop over domains, and its annealing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from recorded import SETUP
from torch import Tensor

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.vrex import VREx
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Batch


def batch(domain: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(len(domain), SETUP.width, generator=generator)
    y = torch.randint(0, 3, (len(domain),), generator=generator)
    return Batch(z, y, torch.tensor(domain), torch.arange(len(domain)), torch.arange(len(domain)))


def risks(algorithm: VREx, given: Batch) -> Tensor:
    present = sorted(set(given.domain.tolist()))
    own = [(given.x[given.domain == d], given.y[given.domain == d]) for d in present]
    return torch.stack([F.cross_entropy(algorithm.head(z), y) for z, y in own])


@pytest.mark.parametrize("step, weight", [(0, 1.0), (9, 1.0), (10, 10.0), (99, 10.0)])
@pytest.mark.parametrize("domain", [[0] * 4 + [1] * 4 + [2] * 4, [0, 1, 2, 2, 1, 0, 0], [0, 2, 0, 0, 0]])
def test_loop_over_domains(domain: list[int], step: int, weight: float) -> None:
    algorithm, given = VREx(SETUP), batch(domain)
    of_domains = risks(algorithm, given)
    expected = of_domains.mean() + weight * of_domains.var(correction=0)
    losses = algorithm(given.x, given, step)
    torch.testing.assert_close(losses.total, expected)
    parameters = list(algorithm.head.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(losses.total, parameters), torch.autograd.grad(expected, parameters), atol=1e-5, rtol=1e-5
    )


def test_one_domain_does_not_vary() -> None:
    given = batch([1] * 6)
    losses = VREx(SETUP)(given.x, given, 50)
    assert losses.logs["penalty"] == 0 and losses.total == ERM(SETUP)(given.x, given, 50).total


def test_annealing() -> None:
    algorithm = VREx(SETUP)
    assert [step for step in range(100) if algorithm.resets_optimizer(step)] == [10]  # DomainBed's 500 of 5000
    assert algorithm.first_selectable_step == 11
    with pytest.raises(UserError, match=r"vrex: anneal_steps 150 leaves no step .*has 100 steps.*raise") as fault:
        VREx(SETUP, anneal_steps=150)
    assert "\n" not in str(fault.value)
