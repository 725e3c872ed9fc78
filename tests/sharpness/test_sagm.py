"""SAGM against the recorded steps, its paper's objective, and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from xdm_ft.sharpness import Tensors
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "sam_sagm.npz")


def loss_at(parameters: Tensors) -> torch.Tensor:
    x, y = torch.tensor(GOLDEN["X"]), torch.tensor(GOLDEN["y"])
    return F.cross_entropy(x @ parameters["W"].T + parameters["b"], y)


def gradients_at(parameters: Tensors) -> Tensors:
    parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    return dict(zip(parameters, torch.autograd.grad(loss_at(parameters), list(parameters.values())), strict=True))


def initial() -> Tensors:
    return {name: torch.tensor(GOLDEN[f"{name}_init"]) for name in ("W", "b")}


@pytest.mark.parametrize("recorded, adaptive", [("sagm", False), ("sagm_adaptive", True)])
def test_three_recorded_steps(recorded: str, adaptive: bool) -> None:
    parameters, sagm = initial(), SAGM(rho=0.05, alpha=0.05, adaptive=adaptive)
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.3, momentum=0.9)
    for step in range(3):
        close = {"atol": 1e-6, "rtol": 0}
        torch.testing.assert_close(loss_at(parameters), torch.tensor(GOLDEN[f"{recorded}_loss"][step]), **close)
        first = gradients_at(parameters)
        offset = sagm.offset(parameters, first, sagm.rho)
        perturbed = {name: parameters[name] + offset[name] for name in parameters}
        for name, value in sagm.combine(first, gradients_at(perturbed)).items():
            parameters[name].grad = value
        optimizer.step()
        for name in parameters:
            recorded_value = torch.tensor(GOLDEN[f"{recorded}_{name}"][step])
            torch.testing.assert_close(parameters[name], recorded_value, msg=f"{name} at step {step}", **close)


def test_is_half_the_papers_gradient() -> None:
    """L(θ) + L(θ + ρ g/‖g‖ − α g), g held fixed: the recorded code takes half of its gradient, and so do we."""
    parameters = {name: value.requires_grad_() for name, value in initial().items()}
    g = gradients_at(parameters)
    norm = torch.cat([value.flatten() for value in g.values()]).norm()
    moved = {name: value + 0.05 * g[name] / norm - 0.02 * g[name] for name, value in parameters.items()}
    objective = loss_at(parameters) + loss_at(moved)
    expected = torch.autograd.grad(objective, list(parameters.values()))

    sagm = SAGM(rho=0.05, alpha=0.02)
    centre = initial()
    offset = sagm.offset(centre, g, 0.05)
    combined = sagm.combine(g, gradients_at({name: centre[name] + offset[name] for name in centre}))
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
    together = vmap(sagm.offset)(parameters, gradients, rho)
    for head in range(2):
        own = ({name: value[head] for name, value in stack.items()} for stack in (parameters, gradients))
        torch.testing.assert_close({n: v[head] for n, v in together.items()}, sagm.offset(*own, rho[head]))
