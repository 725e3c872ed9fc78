"""The host never waits for the device inside a step; compiled and in another memory layout it trains the same."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_models import SmallCNN, WithDomainHead, assert_close, final_state, make_job, one_process, step_batch, train
from torch import Tensor, nn
from torch._dynamo.utils import counters

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.coral import CORAL
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.groupdro import GroupDRO
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.mixstyle import MixStyle
from xdm_ft.algorithms.rsc import RSC
from xdm_ft.algorithms.vrex import VREx
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.runtime.tensors import Losses
from xdm_ft.sharpness import Sharpness
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM
from xdm_ft.storage.checkpoint import read, write
from xdm_ft.training import Trained, Training
from xdm_ft.training.end_to_end import model as model_module
from xdm_ft.training.end_to_end import train as train_module
from xdm_ft.training.end_to_end.batch_norm import RunningStatistics
from xdm_ft.training.end_to_end.gradients import StepGradients, StepLosses
from xdm_ft.training.end_to_end.inputs import StepBatch
from xdm_ft.training.end_to_end.model import EndToEnd, is_cnn, optimizer_of

TRAINING = Training(batch_size=4)


def mixing(setup: Setup) -> Algorithm:
    return XDomainMix(setup, warmup_steps=0)


class Waits(ERM):
    """A loss with a branch that depends on its value."""

    def loss(self, z: Tensor, batch: Any, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        return losses if losses.total > 0 else losses._replace(total=-losses.total)


def without_values(value: Any) -> Any:
    """The same with tensors that have shapes and no values, as a GPU's have none that the host could read at once."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, list):
        return [without_values(one) for one in value]
    return type(value)(*map(without_values, value)) if isinstance(value, tuple) else value


def step_without_values(
    make: Callable[[Setup], Algorithm], sharpness: Sharpness | None, accelerator: Accelerator
) -> None:
    """Takes a step with such tensors: to read one is an error."""
    job = make_job(make, sharpness=sharpness)
    inner = EndToEnd(SmallCNN(), job.make(job.setup), "train").train().to("meta")
    batch = step_batch(job, TRAINING, accelerator, 0)
    batch = StepBatch(without_values(batch.parts), without_values(batch.full_batch), batch.positions, batch.process)
    optimizer = optimizer_of(inner, TRAINING)
    losses = StepGradients(inner, inner, accelerator, sharpness, 0, by_parts=False).run(batch, 0)
    optimizer.step()
    assert losses.loss.is_meta


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *device, **how: nullcontext())  # there is none without a device


@pytest.mark.parametrize("sharpness", [None, SAM(), SAM(adaptive=True), SAGM()], ids=["", "sam", "asam", "sagm"])
@pytest.mark.parametrize("make", [ERM, CORAL, GroupDRO, IRM, RSC, VREx, mixing])
def test_a_step_reads_nothing_from_the_device(
    make: Callable[[Setup], Algorithm], sharpness: Sharpness | None, accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    patch(monkeypatch)
    step_without_values(make, sharpness, accelerator)


def test_a_step_that_reads_something_is_found(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    step_without_values(ERM, None, accelerator)
    with pytest.raises((RuntimeError, NotImplementedError)):
        step_without_values(Waits, None, accelerator)


def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the loop read as late on a CPU as on a GPU."""
    before = train_module.PendingScalars.__init__

    def later(self: train_module.PendingScalars, device: torch.device) -> None:
        before(self, device)
        self.ahead = train_module.AHEAD

    monkeypatch.setattr(train_module.PendingScalars, "__init__", later)


class Breaks(WithDomainHead):
    """Its loss is not finite at step 3 (counted from 0) and after it."""

    def loss(self, z: Tensor, batch: Any, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        return losses._replace(total=losses.total * (float("nan") if step >= 3 else 1))


def recorded(make: Callable[[Setup], Algorithm], accelerator: Accelerator) -> tuple[Any, Any]:
    """A training of eight steps with an evaluation after 6: the result, and all that it has recorded."""
    rows: list[tuple[int, dict[str, float]]] = []
    training = Training(batch_size=4, evaluate_every=6)
    job = dataclasses.replace(make_job(make, steps=8), training=training)
    record = lambda step, models: rows.append((step, models[0][1]))  # noqa: E731
    return train(job, SmallCNN(), training, accelerator, record=record), rows


def test_reading_later_changes_nothing(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, rows = recorded(WithDomainHead, accelerator)
    ahead(monkeypatch)
    later, rows_later = recorded(WithDomainHead, accelerator)
    assert [step for step, _ in rows] == [6, 8] and rows == rows_later
    for name, value in final_state(at_once).items():
        assert torch.equal(value, final_state(later)[name]), name


def test_a_loss_that_is_read_later_names_its_step(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, _ = recorded(Breaks, accelerator)
    steps: list[int] = []
    ahead(monkeypatch)
    add = train_module.PendingScalars.add
    monkeypatch.setattr(
        train_module.PendingScalars, "add", lambda self, step, *rest: (steps.append(step), add(self, step, *rest))
    )
    later, _ = recorded(Breaks, accelerator)
    assert steps == [*range(6)], "steps 4 and 5 are taken before the loss of step 3 is read"
    assert at_once.failure is not None and at_once.failure.startswith("the loss is nan at step 4 of 8; images in its ")
    assert later.failure == at_once.failure


def test_a_checkpoint_holds_the_steps_that_are_not_read(tmp_path: Path) -> None:
    kept, scalar = train_module.PendingScalars(torch.device("cpu")), torch.tensor(0.5)
    kept.ahead = 2
    for step in (7, 8):
        losses = StepLosses(scalar * step, scalar, scalar, torch.tensor(step - 7.0), {"margin": scalar + step})
        kept.add(step, losses, skipped=step == 8)
    write(tmp_path / "state", {"unread": kept.state()}, {})
    loaded = train_module.PendingScalars(torch.device("cpu"))
    loaded.load_state(read(tmp_path / "state")[0]["unread"])
    assert not [*kept.read(all_of_them=False)]
    for one, other in zip(kept.read(all_of_them=True), loaded.read(all_of_them=True), strict=True):
        assert one[:5] == other[:5]
        assert {name: float(value) for name, value in one.recorded.items()} == other.recorded
    assert (one.step, one.total, one.loss, one.stop, one.skipped) == (8, 4.0, 5.0, True, True)


@pytest.mark.parametrize("sharpness", [None, SAM()], ids=["", "sam"])
def test_batch_norm_of_a_single_pass_is_that_of_collected_statistics(
    sharpness: Sharpness | None, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, training = make_job(WithDomainHead, sharpness=sharpness), Training(batch_size=4)
    alone = final_state(train(job, SmallCNN(), training, accelerator))
    begin = RunningStatistics.begin
    monkeypatch.setattr(RunningStatistics, "begin", lambda self, collects: begin(self, True))
    for name, value in final_state(train(job, SmallCNN(), training, accelerator)).items():
        assert torch.equal(value, alone[name]), name


COMPILED = Training(batch_size=4, compile=True)


def compiled(monkeypatch: pytest.MonkeyPatch, backend: str, accelerator: Accelerator) -> Trained:
    """A compiled training of 6 steps, of two passes each. A graph break or recompilation is an error."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        trained = train(make_job(WithDomainHead, steps=6, sharpness=SAM()), SmallCNN(), COMPILED, accelerator)
    assert counters["stats"]["unique_graphs"] == 1
    return trained


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_without_breaks_trains_the_same(
    backend: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = train(make_job(WithDomainHead, steps=6, sharpness=SAM()), SmallCNN(), TRAINING, accelerator)
    assert_close(final_state(compiled(monkeypatch, backend, accelerator)), final_state(eager), 1e-4, 1e-4)


def test_modules_inside_the_encoder_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", lambda encode: pytest.fail("compiled"))
    encoder = SmallCNN()
    encoder.stage_names = ("layers.2", "layers.5")
    inner = EndToEnd(encoder, MixStyle(make_job().setup), "train")
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        inner.compile_encoding()
    assert "training.compile: has no effect" in caplog.text


def test_channels_last_trains_the_same(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    job, training = make_job(WithDomainHead, steps=3), Training(batch_size=4)
    last = train(job, SmallCNN(), training, accelerator)
    placed = EndToEnd(SmallCNN(), WithDomainHead(job.setup), "train").placed(accelerator.device)
    weight = placed.encoder.layers[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    monkeypatch.setattr(model_module, "is_cnn", lambda encoder: False)
    assert_close(final_state(train(job, SmallCNN(), training, accelerator)), final_state(last), 1e-4, 1e-4)


def test_a_vision_transformer_is_no_cnn() -> None:
    assert is_cnn(SmallCNN()) and not is_cnn(nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8)))


@pytest.mark.gpu
def test_a_cnn_on_a_gpu_trains_as_on_a_cpu() -> None:
    with one_process() as accelerator:
        job = make_job(WithDomainHead, steps=3)
        on_cpu = train(job, SmallCNN(), Training(batch_size=4), accelerator)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    on_gpu = train(job, SmallCNN(), Training(batch_size=4), Accelerator())
    for name, value in final_state(on_gpu).items():
        torch.testing.assert_close(value, final_state(on_cpu)[name], atol=1e-3, rtol=1e-3)
