"""The stacked optimizers against torch.optim, head by head."""

import pytest
import torch

from xdm_ft.training.bank.optimizers import SGD, Adam, Optimizer, clip

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
@pytest.mark.parametrize("decays", [False, True])
def test_every_head_steps_as_under_torch_optim(name: str, amsgrad: bool, decays: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = stacked(generator)
    weight_decay = WEIGHT_DECAY * decays
    alone = [{key: value[h].clone().requires_grad_() for key, value in parameters.items()} for h in range(HEADS)]
    theirs = [
        torch_optimizer(name, list(own.values()), h, float(weight_decay[h]), amsgrad) for h, own in enumerate(alone)
    ]
    ours: Optimizer = SGD(parameters, LR, weight_decay, MOMENTUM)
    if name != "sgd":
        ours = Adam(parameters, LR, weight_decay, BETAS, amsgrad, decoupled=name == "adamw", steps=STEPS)
    for step in range(STEPS):
        factor, gradients = 1 - step / STEPS, stacked(generator)
        if step >= STEPS // 2:  # smaller ones, from which only amsgrad's second moment does not fall
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
