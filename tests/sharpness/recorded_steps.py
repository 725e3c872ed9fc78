"""The model of the recorded SAM and SAGM steps: a linear classifier, and its loss on one batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from xdm_ft.sharpness import Sharpness, Tensors

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "sam_sagm.npz")
CLOSE = {"atol": 1e-6, "rtol": 0}


def initial() -> Tensors:
    return {name: torch.tensor(GOLDEN[f"{name}_init"]) for name in ("W", "b")}


def loss_at(parameters: Tensors) -> torch.Tensor:
    x, y = torch.tensor(GOLDEN["X"]), torch.tensor(GOLDEN["y"])
    return F.cross_entropy(x @ parameters["W"].T + parameters["b"], y)


def gradients_at(parameters: Tensors) -> Tensors:
    parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    return dict(zip(parameters, torch.autograd.grad(loss_at(parameters), list(parameters.values())), strict=True))


def take_step(parameters: Tensors, sharpness: Sharpness, optimizer: torch.optim.Optimizer) -> Tensors:
    """Changes the parameters by one step, and returns those of the second pass."""
    first = gradients_at(parameters)
    offset = sharpness.offset(parameters, first, sharpness.rho)
    perturbed = {name: parameters[name] + offset[name] for name in parameters}
    for name, value in sharpness.combine(first, gradients_at(perturbed)).items():
        parameters[name].grad = value
    optimizer.step()
    return perturbed


def assert_recorded(parameters: Tensors, recorded: str, step: int) -> None:
    for name, value in parameters.items():
        expected = torch.tensor(GOLDEN[f"{recorded}_{name}"][step])
        torch.testing.assert_close(value, expected, msg=f"{recorded}_{name} at step {step}", **CLOSE)
