"""The published code's head training, number for number, through the bank's step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bank_problems import split_of
from torch import Tensor

from xdm_ft.algorithms import Setup, xdomainmix
from xdm_ft.algorithms.xdomainmix import Noise, XDomainMix
from xdm_ft.evaluation.records import ModelKey
from xdm_ft.runtime.tensors import Batch, Task
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.step import Bank, step
from xdm_ft.xdomainmix import Partners

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "clip_trajectory_sgd.npz"
WARMUP, STEPS = 2, 7


@pytest.fixture
def golden() -> dict[str, Tensor]:
    with np.load(GOLDEN) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


class Replayed(XDomainMix):
    """XDomainMix from the recorded weights, with the recorded draws."""

    def __init__(self, setup: Setup, golden: dict[str, Tensor]) -> None:
        super().__init__(setup, warmup_steps=WARMUP, quantile_steps=int(golden["step_to_change"]), discard_per="batch")
        self.golden = golden
        initial = {"head.weight": "W_init", "head.bias": "b_init"}
        initial |= {"domain_head.weight": "V_init", "domain_head.bias": "a_init"}
        self.load_state_dict({name: golden[key] for name, key in initial.items()}, strict=False)

    def noise(self, place: Tensor, step: int) -> Noise:
        """The places of partners in place of the numbers that draw them."""
        call = step - WARMUP
        places = torch.stack([self.golden["same"][call], self.golden["diff"][call]], 1)
        return Noise(places, self.golden["lam"][call], self.golden["p"][call].float().expand(len(place)))


def recorded_partners(y: Tensor, domain: Tensor, noise: Tensor, other: str) -> Partners:
    everyone = torch.ones_like(y, dtype=torch.bool)
    return Partners(noise[:, 0], noise[:, 1], everyone, everyone)


@pytest.mark.parametrize("heads", [1, 3])
def test_the_recorded_trajectory_of_both_heads(
    golden: dict[str, Tensor], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD with momentum, class head clipped to norm 1, domain head unclipped, mean over the batch. (2 + 5 steps)"""
    monkeypatch.setattr(xdomainmix, "draw_partners", recorded_partners)
    setup = Setup(Task(tuple("abcd"), tuple("xyz")), width=16, steps=STEPS, seed=0, loss_average="sample")
    split = split_of(0, 0)
    training = Training(optimizer="sgd", lr=0.5, momentum=0.9, clip_norm=1.0, loss_average="sample")
    job = Job(ModelKey("xdomainmix", ("d0",), 0, 0), split, setup, lambda s: Replayed(s, golden), None, training)
    bank = Bank([job] * heads, torch.device("cpu"))
    for t in range(STEPS):
        x, y, domain = (golden[name][t].expand(heads, *golden[name][t].shape) for name in ("X", "y", "domain"))
        losses = step(bank, Batch(x, y, domain, *(torch.arange(10).expand(heads, -1),) * 2), t)
        values = bank.main | bank.auxiliary
        for h in range(heads):
            # the recorded class loss of a warm-up step is the plain one, of a mixing step the mean of two
            assert float(losses["loss"][h]) == pytest.approx(float(golden["class_loss"][t]), abs=1e-5)
            assert float(losses["auxiliary_loss"][h]) == pytest.approx(float(golden["domain_loss"][t]), abs=1e-5)
            for name, key in {
                "head.weight": "W",
                "head.bias": "b",
                "domain_head.weight": "V",
                "domain_head.bias": "a",
            }.items():
                torch.testing.assert_close(values[name][h].detach(), golden[key][t], rtol=0, atol=1e-5)
