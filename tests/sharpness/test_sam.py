"""SAM against recorded steps and values worked out by hand, alone and for a bank of heads."""

from __future__ import annotations

import pytest
import torch
from recorded_steps import assert_recorded, initial, take_step
from torch.func import vmap

from xdm_ft.sharpness.sam import SAM


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
    parameters = initial()
    steps = optimizer(list(parameters.values()))
    for step in range(3):
        perturbed = take_step(parameters, sam, steps)
        assert_recorded(perturbed, f"{recorded}_perturbed", step)
        assert_recorded(parameters, recorded, step)


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
    zero = {"w": torch.zeros(3)}
    assert torch.equal(SAM().offset({"w": torch.ones(3)}, zero, 0.05)["w"], torch.zeros(3))


@pytest.mark.parametrize("adaptive", [False, True])
def test_every_head_of_a_bank_has_its_own_norm_and_rho(adaptive: bool) -> None:
    torch.manual_seed(0)
    parameters = {"w": torch.randn(5, 3, 4), "b": torch.randn(5, 3)}
    gradients = {name: torch.randn_like(value) for name, value in parameters.items()}
    rho, sam = torch.rand(5), SAM(adaptive=adaptive)
    stacked = vmap(sam.offset)(parameters, gradients, rho)
    for head in range(5):
        one = sam.offset(
            *({name: value[head] for name, value in tensors.items()} for tensors in (parameters, gradients)), rho[head]
        )
        torch.testing.assert_close({name: value[head] for name, value in stacked.items()}, one)
