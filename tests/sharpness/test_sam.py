"""SAM against the recorded steps, by hand, and stacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from xdm_ft.sharpness.sam import SAM

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "sam_sagm.npz")


def gradients_at(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    x, y = torch.tensor(GOLDEN["X"]), torch.tensor(GOLDEN["y"])
    parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    loss = F.cross_entropy(x @ parameters["W"].T + parameters["b"], y)
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, amsgrad=True)


@pytest.mark.parametrize(
    "recorded, sam, optimizer",
    [
        ("sam_sgd", SAM(rho=0.05), sgd),
        ("sam_adaptive_sgd", SAM(rho=0.5, adaptive=True), sgd),
        ("sam_adam", SAM(rho=0.05), adam),
    ],
)
def test_three_recorded_steps(recorded: str, sam: SAM, optimizer) -> None:
    parameters = {name: torch.tensor(GOLDEN[f"{name}_init"]) for name in ("W", "b")}
    steps = optimizer(list(parameters.values()))
    for step in range(3):
        first = gradients_at(parameters)
        offset = sam.offset(parameters, first, sam.rho)
        perturbed = {name: parameters[name] + offset[name] for name in parameters}
        for name, value in sam.combine(first, gradients_at(perturbed)).items():
            parameters[name].grad = value
        steps.step()
        for name in parameters:
            close = {"atol": 1e-6, "rtol": 0, "msg": f"{name} at step {step}"}
            torch.testing.assert_close(
                perturbed[name], torch.tensor(GOLDEN[f"{recorded}_perturbed_{name}"][step]), **close
            )
            torch.testing.assert_close(parameters[name], torch.tensor(GOLDEN[f"{recorded}_{name}"][step]), **close)


def test_offset_by_hand() -> None:
    parameters = {"w": torch.tensor([2.0, -1.0]), "b": torch.tensor([0.0])}
    gradients = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([-4.0])}
    plain = SAM(rho=1.0).offset(parameters, gradients, 1.0)
    torch.testing.assert_close(plain, {"w": torch.tensor([0.6, 0.0]), "b": torch.tensor([-0.8])})
    adaptive = SAM(rho=1.0, adaptive=True).offset(parameters, gradients, 0.5)
    torch.testing.assert_close(adaptive, {"w": torch.tensor([1.0, 0.0]), "b": torch.tensor([-0.0])})  # ½·4·3/6


def test_offset_is_in_proportion_to_rho() -> None:
    parameters, gradients = {"w": torch.tensor([2.0, -1.0])}, {"w": torch.tensor([3.0, 0.5])}
    near, far = (SAM().offset(parameters, gradients, rho)["w"] for rho in (0.1, 0.2))
    torch.testing.assert_close(2 * near, far)


def test_no_gradient_no_offset() -> None:
    nothing = {"w": torch.zeros(3)}
    assert torch.equal(SAM().offset({"w": torch.ones(3)}, nothing, 0.05)["w"], torch.zeros(3))


@pytest.mark.parametrize("adaptive", [False, True])
def test_every_head_of_a_bank_has_its_own_norm_and_rho(adaptive: bool) -> None:
    torch.manual_seed(0)
    parameters = {"w": torch.randn(5, 3, 4), "b": torch.randn(5, 3)}
    gradients = {name: torch.randn_like(value) for name, value in parameters.items()}
    rho, sam = torch.rand(5), SAM(adaptive=adaptive)
    together = vmap(sam.offset)(parameters, gradients, rho)
    for head in range(5):
        one = sam.offset(
            *({name: value[head] for name, value in d.items()} for d in (parameters, gradients)), rho[head]
        )
        torch.testing.assert_close({name: value[head] for name, value in together.items()}, one)
