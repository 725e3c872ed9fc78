"""SAM and SAGM against recorded steps and values worked out by hand; the contract of every module of `sharpness/`."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from xdm_ft.recipe.components import find, names
from xdm_ft.sharpness import Sharpness
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "sam_sagm.npz")
CLOSE = {"atol": 1e-6, "rtol": 0}


def initial():
    return {name: torch.tensor(GOLDEN[f"{name}_init"]) for name in ("W", "b")}


def loss_at(parameters):
    x, y = torch.tensor(GOLDEN["X"]), torch.tensor(GOLDEN["y"])
    return F.cross_entropy(x @ parameters["W"].T + parameters["b"], y)


def gradients_at(parameters):
    parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    return dict(zip(parameters, torch.autograd.grad(loss_at(parameters), list(parameters.values())), strict=True))


def take_step(parameters, sharpness, optimizer):
    """Changes the parameters by one step, and returns those of the second pass."""
    first = gradients_at(parameters)
    offset = sharpness.offset(parameters, first, sharpness.rho)
    perturbed = {name: parameters[name] + offset[name] for name in parameters}
    for name, value in sharpness.combine(first, gradients_at(perturbed)).items():
        parameters[name].grad = value
    optimizer.step()
    return perturbed


def assert_recorded(parameters, recorded, step):
    for name, value in parameters.items():
        expected = torch.tensor(GOLDEN[f"{recorded}_{name}"][step])
        torch.testing.assert_close(value, expected, msg=f"{recorded}_{name} at step {step}", **CLOSE)


SGD = {"optimizer": torch.optim.SGD, "lr": 0.3, "momentum": 0.9}
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.05, "amsgrad": True}


@pytest.mark.parametrize(
    ("recorded", "sharpness", "settings"),
    [
        ("sam_sgd", SAM(rho=0.05), SGD),
        ("sam_adaptive_sgd", SAM(rho=0.5, adaptive=True), SGD),
        ("sam_adam", SAM(rho=0.05), ADAM),
        ("sagm", SAGM(rho=0.05, alpha=0.05), SGD),
        ("sagm_adaptive", SAGM(rho=0.05, alpha=0.05, adaptive=True), SGD),
    ],
)
def test_three_recorded_steps(recorded, sharpness, settings):
    parameters = initial()
    optimizer = settings["optimizer"](
        list(parameters.values()), **{name: value for name, value in settings.items() if name != "optimizer"}
    )
    for step in range(3):
        if isinstance(sharpness, SAGM):
            torch.testing.assert_close(loss_at(parameters), torch.tensor(GOLDEN[f"{recorded}_loss"][step]), **CLOSE)
        perturbed = take_step(parameters, sharpness, optimizer)
        if isinstance(sharpness, SAM):
            assert_recorded(perturbed, f"{recorded}_perturbed", step)
        assert_recorded(parameters, recorded, step)


@pytest.mark.parametrize(
    ("sharpness", "rho", "w", "b"),
    [
        (SAM(), 1.0, 0.6, -0.8),
        (SAM(adaptive=True), 0.5, 1.0, 0.0),  # ½·4·3/6
        (SAGM(alpha=0.1), 1.0, 0.3, -0.4),  # 3/5 − 0.1·3
        (SAGM(alpha=0.01, adaptive=True), 0.5, 0.88, 0.0),  # ½·4·3/6 − …
    ],
)
def test_offset_by_hand(sharpness, rho, w, b):
    parameters = {"w": torch.tensor([2.0, -1.0]), "b": torch.tensor([0.0])}
    gradients = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([-4.0])}
    offset = sharpness.offset(parameters, gradients, rho)
    torch.testing.assert_close(offset, {"w": torch.tensor([w, 0.0]), "b": torch.tensor([b])})
    zero = {name: torch.zeros_like(value) for name, value in gradients.items()}
    assert all(not value.any() for value in sharpness.offset(parameters, zero, rho).values())


def test_is_half_the_papers_gradient():
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


NAMES = names("sharpness")


def tensors(seed, *stacked):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*stacked, *shape, generator=generator) for name, shape in {"w": (3, 4), "b": (3,)}.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_pure_functions_of_the_right_shape(name):
    sharpness = find("sharpness", name)()
    assert isinstance(sharpness, Sharpness) and sharpness.source and sharpness.rho > 0
    parameters, first, second = tensors(0), tensors(1), tensors(2)
    offset = sharpness.offset(parameters, first, sharpness.rho)
    combined = sharpness.combine(first, second)
    for key in parameters:
        assert offset[key].shape == combined[key].shape == parameters[key].shape
        assert offset[key].isfinite().all() and combined[key].isfinite().all()
    for now, seed in ((parameters, 0), (first, 1), (second, 2)):
        assert all(torch.equal(now[key], value) for key, value in tensors(seed).items())


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_stacked_heads_do_not_see_each_other(name, adaptive):
    sharpness = find("sharpness", name)(adaptive=adaptive)
    parameters, first, second, rho = tensors(0, 5), tensors(1, 5), tensors(2, 5), torch.rand(5)
    offsets = vmap(sharpness.offset)(parameters, first, rho)
    combined = vmap(sharpness.combine)(first, second)
    for head in range(5):
        p, f, s = ({key: value[head] for key, value in stack.items()} for stack in (parameters, first, second))
        for key, value in sharpness.offset(p, f, rho[head]).items():
            torch.testing.assert_close(offsets[key][head], value)
        for key, value in sharpness.combine(f, s).items():
            torch.testing.assert_close(combined[key][head], value)
