"""A whole training of a linear head against the one recorded from the published code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xdm_ft.algorithms import Setup, xdomainmix
from xdm_ft.algorithms.xdomainmix import Noise, XDomainMix
from xdm_ft.runtime.tensors import Batch, Task
from xdm_ft.xdomainmix import Partners

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "clip_trajectory_sgd.npz")


def golden(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[name])


class Replayed(XDomainMix):
    """With the recorded random numbers in place of our own; those of partners are their places."""

    def noise(self, place: Tensor, step: int) -> Noise:
        call = step - self.warmup_steps
        places = torch.stack([golden("same")[call], golden("diff")[call]], 1)
        return Noise(places, golden("lam")[call], golden("p")[call].float().expand(len(place)))  # one p for the batch


def recorded_partners(y: Tensor, domain: Tensor, noise: Tensor, other: str) -> Partners:
    everyone = torch.ones(len(y), dtype=torch.bool)
    return Partners(noise[:, 0], noise[:, 1], everyone, everyone)


def set_parameters(head: nn.Linear, weight: str, bias: str) -> None:
    with torch.no_grad():
        head.weight.copy_(golden(weight))
        head.bias.copy_(golden(bias))


def test_trajectory_of_the_published_Linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 warm-up steps, 5 mixed ones with τ_d falling every 2; SGD, the class head's gradient clipped to norm 1, the
    domain head's not. No draw is ours, all else is: scores, masks, cycle, mixing, losses, both gradients."""
    monkeypatch.setattr(xdomainmix, "draw_partners", recorded_partners)
    steps, _, width = GOLDEN["X"].shape
    task = Task(tuple("abcd"), tuple("xyz"))
    algorithm = Replayed(
        Setup(task, width, steps, seed=0, loss_average="sample"),
        warmup_steps=int(GOLDEN["warmup"]),
        quantile_steps=int(GOLDEN["step_to_change"]),
    )
    set_parameters(algorithm.head, "W_init", "b_init")
    set_parameters(algorithm.domain_head, "V_init", "a_init")
    heads = algorithm.head, algorithm.domain_head
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9) for head in heads]
    for step in range(steps):
        x, y, domain = (golden(name)[step] for name in ("X", "y", "domain"))
        losses = algorithm(x, Batch(x, y, domain, torch.arange(len(y)), torch.arange(len(y))), step)
        algorithm.zero_grad()
        (losses.total + losses.auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(algorithm.head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        close = {"atol": 1e-5, "rtol": 1e-6}
        torch.testing.assert_close(losses.total.double(), golden("class_loss")[step], **close)
        torch.testing.assert_close(losses.auxiliary.double(), golden("domain_loss")[step], **close)
        for value, name in zip((p for head in heads for p in head.parameters()), "WbVa", strict=True):
            torch.testing.assert_close(value.detach(), golden(name)[step], **close, msg=f"{name} after step {step}")
