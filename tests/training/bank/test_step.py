"""A step of the bank: its optimizers against torch.optim, and the published code's head training, number for number."""

from __future__ import annotations

import pytest
import torch
from bank_problems import split_of
from recorded import golden
from torch import Tensor

from xdm_ft.algorithms import Setup, xdomainmix
from xdm_ft.algorithms.xdomainmix import Noise, XDomainMix
from xdm_ft.core import Batch, ModelKey, Task
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.step import SGD, Adam, Bank, Optimizer, clip, step
from xdm_ft.xdomainmix import Partners

SHAPES = {"weight": (5, 7), "bias": (5,), "scalar": ()}
LR, WEIGHT_DECAY = torch.tensor([1e-3, 0.1, 0.02]), torch.tensor([0.0, 0.01, 0.3])
MOMENTUM = torch.tensor([0.9, 0.0, 0.5])
BETAS = (0.8, 0.99)
HEADS, STEPS = 3, 40


def stacked(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: torch.randn(HEADS, *shape, generator=generator) for name, shape in SHAPES.items()}


def torch_optimizer(
    name: str, parameters: list[torch.Tensor], head: int, weight_decay: float, amsgrad: bool
) -> torch.optim.Optimizer:
    """Of all parameters; AdamW decays those of two axes or more alone."""
    lr = float(LR[head])
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay, momentum=float(MOMENTUM[head]))
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay, betas=BETAS, amsgrad=amsgrad)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, amsgrad=amsgrad)


@pytest.mark.parametrize(
    ("name", "amsgrad"), [("sgd", False), ("adam", False), ("adam", True), ("adamw", False), ("adamw", True)]
)
def test_every_head_steps_as_under_torch_optim(name: str, amsgrad: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = stacked(generator)
    alone = [{key: value[h].clone().requires_grad_() for key, value in parameters.items()} for h in range(HEADS)]
    theirs = [
        torch_optimizer(name, list(own.values()), h, float(WEIGHT_DECAY[h]), amsgrad) for h, own in enumerate(alone)
    ]
    ours: Optimizer = SGD(parameters, LR, WEIGHT_DECAY, MOMENTUM)
    if name != "sgd":
        ours = Adam(parameters, LR, WEIGHT_DECAY, BETAS, amsgrad, decoupled=name == "adamw", steps=STEPS)
    for taken in range(STEPS):
        factor, gradients = 1 - taken / STEPS, stacked(generator)
        if taken >= STEPS // 2:  # smaller ones, from which only amsgrad's second moment does not fall
            gradients = {key: value / 10 for key, value in gradients.items()}
        ours.step(parameters, gradients, torch.tensor([factor]))
        for h, optimizer in enumerate(theirs):
            for group in optimizer.param_groups:
                group["lr"] = float(LR[h]) * factor
            for key, value in alone[h].items():
                value.grad = gradients[key][h].clone()
            optimizer.step()
        for h in range(HEADS):
            for key, value in alone[h].items():
                torch.testing.assert_close(parameters[key][h], value.detach(), rtol=2e-6, atol=2e-6)


def test_clip_is_torchs_for_every_head() -> None:
    gradients = stacked(torch.Generator().manual_seed(1))
    gradients = {
        name: g * torch.tensor([10.0, 0.01, 0.0]).view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()
    }
    clipped = clip(gradients, norm=1.0)
    for h in range(HEADS):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
        for parameter, gradient in zip(parameters, gradients.values(), strict=True):
            parameter.grad = gradient[h].clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert (norm > 1) == (h == 0)
        for parameter, ours in zip(parameters, clipped.values(), strict=True):
            torch.testing.assert_close(ours[h], parameter.grad)


WARMUP, STEPS = 2, 7
RECORDED = golden("clip_trajectory_sgd.npz")


class Replayed(XDomainMix):
    """XDomainMix from the recorded weights, with the recorded draws."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(
            setup, warmup_steps=WARMUP, quantile_steps=int(RECORDED["step_to_change"]), discard_per="batch"
        )
        initial = {"head.weight": "W_init", "head.bias": "b_init"}
        initial |= {"domain_head.weight": "V_init", "domain_head.bias": "a_init"}
        self.load_state_dict({name: RECORDED[key] for name, key in initial.items()}, strict=False)

    def noise(self, place: Tensor, step: int) -> Noise:
        """The places of partners in place of the numbers that draw them."""
        call = step - WARMUP
        places = torch.stack([RECORDED["same"][call], RECORDED["diff"][call]], 1)
        return Noise(places, RECORDED["lam"][call], RECORDED["p"][call].float().expand(len(place)))


def recorded_partners(y: Tensor, domain: Tensor, noise: Tensor, other: str) -> Partners:
    everyone = torch.ones_like(y, dtype=torch.bool)
    return Partners(noise[:, 0], noise[:, 1], everyone, everyone)


@pytest.mark.parametrize("heads", [1, 3])
def test_the_recorded_trajectory_of_both_heads(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD with momentum, class head clipped to norm 1, domain head unclipped, mean over the batch. (2 + 5 steps)"""
    monkeypatch.setattr(xdomainmix, "draw_partners", recorded_partners)
    setup = Setup(Task(tuple("abcd"), tuple("xyz")), width=16, steps=STEPS, seed=0, loss_average="sample")
    split = split_of(0, 0)
    training = Training(optimizer="sgd", lr=0.5, momentum=0.9, clip_norm=1.0, loss_average="sample")
    job = Job(ModelKey("xdomainmix", ("d0",), 0, 0), split, setup, Replayed, None, training)
    bank = Bank([job] * heads, torch.device("cpu"))
    for t in range(STEPS):
        x, y, domain = (RECORDED[name][t].expand(heads, *RECORDED[name][t].shape) for name in ("X", "y", "domain"))
        losses = step(bank, Batch(x, y, domain, *(torch.arange(10).expand(heads, -1),) * 2), t)
        values = bank.main | bank.auxiliary
        for h in range(heads):
            # the recorded class loss of a warm-up step is the plain one, of a mixing step the mean of two
            assert float(losses["loss"][h]) == pytest.approx(float(RECORDED["class_loss"][t]), abs=1e-5)
            assert float(losses["auxiliary_loss"][h]) == pytest.approx(float(RECORDED["domain_loss"][t]), abs=1e-5)
            names = {"head.weight": "W", "head.bias": "b", "domain_head.weight": "V", "domain_head.bias": "a"}
            for name, key in names.items():
                torch.testing.assert_close(values[name][h].detach(), RECORDED[key][t], rtol=0, atol=1e-5)
