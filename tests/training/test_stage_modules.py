"""Modules of a method behind stages of the encoder: at work in training alone, against loops written out by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from loop_models import SmallCNN, Staged, assert_close, batch_of, digits, final_state, make_job, predict, split, train
from torch import Tensor, nn

from xdm_ft.algorithms.dsu import DSU
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.mixstyle import MixStyle
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Batch
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Training
from xdm_ft.training.end_to_end.model import EndToEnd


def test_modules_behind_stages_work_in_training_alone() -> None:
    job, training = make_job(lambda setup: MixStyle(setup, p=1.0)), Training(batch_size=4)
    inner = EndToEnd(Staged(), job.make(job.setup), "frozen").train()
    batch = batch_of(job, training, 0)
    by_hand, stages = batch.x, job.make(job.setup).stage_modules(inner.encoder)
    for number, layer in enumerate(inner.encoder.layers):
        by_hand = layer(by_hand)
        if (name := f"layers.{number}") in stages:
            by_hand = stages[name](by_hand, batch, 7)
    z = F.adaptive_avg_pool2d(by_hand, 4).flatten(1)
    torch.testing.assert_close(inner(batch, 7), z)
    plain = Staged()(batch.x)
    assert (inner(batch, 7) - plain).abs().max() > 1e-4
    with torch.no_grad():
        assert torch.equal(inner.eval()(batch, 7), plain)
        assert torch.equal(inner.train().encoder(batch.x), Staged()(batch.x))  # outside a step


@pytest.mark.slow
@pytest.mark.parametrize("method", [MixStyle, pytest.param(DSU, marks=pytest.mark.slow)])
def test_a_loop_with_modules_behind_stages(accelerator: Accelerator, method: type[ERM]) -> None:
    """p = 0 is ERM; p = 1 is not; nothing is added to the weights; both passes of SAM see the same draws."""
    training = Training(batch_size=8, optimizer="sgd", momentum=0.0, encoder_lr=0.03)
    erm = final_state(train(make_job(ERM), Staged(), training, accelerator))
    states = [
        final_state(train(make_job(lambda s, p=p: method(s, p=p)), Staged(), training, accelerator)) for p in (0.0, 1.0)
    ]
    assert states[0].keys() == states[1].keys() == erm.keys()
    assert all(torch.equal(value, erm[name]) for name, value in states[0].items())
    assert (states[1]["encoder.layers.0.weight"] - erm["encoder.layers.0.weight"]).abs().max() > 1e-4

    sharp = [
        final_state(train(make_job(method, steps=6, sharpness=used), Staged(), training, accelerator))
        for used in (None, SAM(rho=1e-9), SAM(rho=0.1))
    ]
    assert_close(sharp[1], sharp[0], atol=1e-4)  # at the same weights the second pass gives the gradient of the first
    assert (sharp[2]["encoder.layers.0.weight"] - sharp[0]["encoder.layers.0.weight"]).abs().max() > 1e-4


class Scaled(ERM):
    """ERM with a learned scale per channel behind the second stage, while training."""

    def stage_modules(self, encoder: Encoder) -> dict[str, nn.Module]:
        return {encoder.stage_names[-1]: _Scale()}


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor, batch: Batch, step: int) -> Tensor:
        return x * self.scale[:, None, None]


def test_a_module_behind_a_stage_trains_with_the_heads_rate(accelerator: Accelerator) -> None:
    """As the same layers written out by hand; prediction goes without it."""
    training = Training(batch_size=8, optimizer="sgd", momentum=0.5, encoder_lr=0.03)
    job, encoder = make_job(Scaled, steps=5, weight_decay=0.0, lr=0.1), Staged()
    got = final_state(train(job, encoder, training, accelerator, batch_norm="frozen"))
    algorithm, scale, layers = job.make(job.setup), _Scale(), copy.deepcopy(encoder).layers
    groups = [
        {"params": list(layers.parameters()), "lr": training.encoder_lr},
        {"params": [*algorithm.parameters(), *scale.parameters()], "lr": job.training.lr},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.5)
    for number in range(5):
        batch = batch_of(job, training, number)
        z = F.adaptive_avg_pool2d(scale(layers(batch.x), batch, number), 4).flatten(1)
        optimizer.zero_grad()
        F.cross_entropy(algorithm.logits(z), batch.y).backward()
        optimizer.step()
    expected = {f"encoder.layers.{name}": value for name, value in layers.named_parameters()}
    expected |= {"stages.list.0.scale": scale.scale, **dict(algorithm.named_parameters())}
    assert (scale.scale - _Scale().scale).abs().max() > 1e-3
    assert_close({name: got[name] for name in expected}, {n: v.detach() for n, v in expected.items()}, atol=1e-5)
    rows = split().evaluation["test"][:5]
    images = ImageRows(digits(), evaluation_transform(SmallCNN.preprocessing))
    x = torch.stack([images[int(row)][0] for row in rows])
    with torch.no_grad():
        plain = algorithm.logits(F.adaptive_avg_pool2d(layers(x), 4).flatten(1))
    found = predict(job, encoder, got, digits(), rows, accelerator, batch_size=2)
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)


def test_buffers_of_a_module_behind_a_stage_are_refused() -> None:
    class Normalising(ERM):
        def stage_modules(self, encoder: Encoder) -> dict[str, nn.Module]:
            return {encoder.stage_names[-1]: nn.BatchNorm2d(16)}

    job = make_job(Normalising)
    with pytest.raises(AssertionError, match="no buffers"):
        EndToEnd(Staged(), job.make(job.setup), "train")


class Tokens(Encoder):
    """A stage that gives tokens, one that gives maps with channels last, and one that is never called."""

    width, normalize, pretraining, stage_names = 3, False, "none", ("tokens", "last", "never")
    preprocessing = SmallCNN.preprocessing

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.tokens, self.last, self.never, self.maps = nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        self.tokens(images.flatten(2).mT)
        self.last(images.permute(0, 2, 3, 1))
        return self.maps(images).mean((2, 3)) * self.weight

    def identity(self) -> dict[str, object]:
        return {}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


@pytest.mark.parametrize(
    "names, match",
    [
        (("tokens", "maps"), r"tokens returns \[12, 1024, 3\], and this method needs feature maps"),
        (("last", "maps"), r"last returns \[12, 32, 32, 3\], and this method needs feature maps"),
        (("maps", "never"), "never is never called"),
    ],
)
def test_places_that_do_not_serve_are_refused(names: tuple[str, ...], match: str) -> None:
    job, encoder = make_job(lambda setup: MixStyle(setup, p=1.0), width=3), Tokens()
    encoder.stage_names = names
    inner = EndToEnd(encoder, job.make(job.setup), "train").train()
    with pytest.raises(UserError, match=match):
        inner(batch_of(job, Training(batch_size=4), 0), 0)
