"""SAGM against recorded steps, the objective of its paper, and values worked out by hand."""

from __future__ import annotations

import pytest
import torch
from recorded_steps import CLOSE, GOLDEN, assert_recorded, gradients_at, initial, loss_at, take_step
from torch.func import vmap

from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM


@pytest.mark.parametrize("recorded, adaptive", [("sagm", False), ("sagm_adaptive", True)])
def test_three_recorded_steps(recorded: str, adaptive: bool) -> None:
    parameters, sagm = initial(), SAGM(rho=0.05, alpha=0.05, adaptive=adaptive)
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.3, momentum=0.9)
    for step in range(3):
        torch.testing.assert_close(loss_at(parameters), torch.tensor(GOLDEN[f"{recorded}_loss"][step]), **CLOSE)
        take_step(parameters, sagm, optimizer)
        assert_recorded(parameters, recorded, step)


def test_is_half_the_papers_gradient() -> None:
    """That of L(θ) + L(θ + ρ g/‖g‖ − α g) with g constant; the recorded code halves it too."""
    parameters = {name: value.requires_grad_() for name, value in initial().items()}
    g = gradients_at(parameters)
    norm = torch.cat([value.flatten() for value in g.values()]).norm()
    perturbed = {name: value + 0.05 * g[name] / norm - 0.02 * g[name] for name, value in parameters.items()}
    objective = loss_at(parameters) + loss_at(perturbed)
    expected = torch.autograd.grad(objective, list(parameters.values()))

    sagm = SAGM(rho=0.05, alpha=0.02)
    start = initial()
    offset = sagm.offset(start, g, 0.05)
    combined = sagm.combine(g, gradients_at({name: start[name] + offset[name] for name in start}))
    torch.testing.assert_close(2 * combined["W"], expected[0])
    torch.testing.assert_close(2 * combined["b"], expected[1])


def test_offset_by_hand() -> None:
    parameters = {"w": torch.tensor([2.0, -1.0]), "b": torch.tensor([0.0])}
    gradients = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([-4.0])}
    plain = SAGM(alpha=0.1).offset(parameters, gradients, 1.0)
    torch.testing.assert_close(plain, {"w": torch.tensor([0.3, 0.0]), "b": torch.tensor([-0.4])})  # 3/5 − 0.1·3
    adaptive = SAGM(alpha=0.01, adaptive=True).offset(parameters, gradients, 0.5)
    torch.testing.assert_close(adaptive, {"w": torch.tensor([0.88, 0.0]), "b": torch.tensor([0.0])})  # ½·4·3/6 − …


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_alpha_the_offset_is_sams(adaptive: bool) -> None:
    parameters, gradients = initial(), gradients_at(initial())
    own = SAGM(alpha=0.0, adaptive=adaptive).offset(parameters, gradients, 0.1)
    torch.testing.assert_close(own, SAM(adaptive=adaptive).offset(parameters, gradients, 0.1))


def test_every_head_of_a_bank_has_its_own_norm_and_rho() -> None:
    parameters = {name: torch.stack([value, 2 * value]) for name, value in initial().items()}
    gradients = {name: torch.stack([value, -value]) for name, value in gradients_at(initial()).items()}
    rho, sagm = torch.tensor([0.1, 0.3]), SAGM(alpha=0.2, adaptive=True)
    stacked = vmap(sagm.offset)(parameters, gradients, rho)
    for head in range(2):
        own = ({name: value[head] for name, value in tensors.items()} for tensors in (parameters, gradients))
        torch.testing.assert_close({n: v[head] for n, v in stacked.items()}, sagm.offset(*own, rho[head]))
