"""The host never waits for the device inside a step; compiled and in another memory layout it trains the same."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import bank_problems
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from bank_problems import digits, job_of
from loop_models import SmallCNN, WithDomainHead, assert_close, final_state, make_job, one_process, step_batch, train
from torch import Tensor, nn
from torch._dynamo.utils import counters

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.coral import CORAL
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.fish import Fish
from xdm_ft.algorithms.groupdro import GroupDRO
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixstyle import MixStyle
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.rsc import RSC
from xdm_ft.algorithms.vrex import VREx
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Batch, Losses
from xdm_ft.features.cache import Features
from xdm_ft.heads.mlp import MLP
from xdm_ft.runtime.errors import UserError
from xdm_ft.sharpness import Sharpness
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM
from xdm_ft.storage.checkpoint import read, write
from xdm_ft.training import Job, Trained, Training, compile_function
from xdm_ft.training.bank import step as step_module
from xdm_ft.training.bank import train as bank_train
from xdm_ft.training.bank.data import CachedData, batches
from xdm_ft.training.bank.step import Bank
from xdm_ft.training.end_to_end import model as model_module
from xdm_ft.training.end_to_end.batch_norm import RunningStatistics
from xdm_ft.training.end_to_end.gradients import StepGradients, StepLosses
from xdm_ft.training.end_to_end.inputs import StepBatch
from xdm_ft.training.end_to_end.model import EndToEnd, is_cnn, optimizer_of
from xdm_ft.training.end_to_end.train import AHEAD, PendingScalars

TRAINING, COMPILED = Training(batch_size=4), Training(batch_size=4, compile=True)
CPU = torch.device("cpu")


def jobs_of(method: Callable[..., Algorithm], **more: Any) -> list[Job]:
    return [job_of(method, seed=seed, steps=9, lr=0.01 * (seed + 1), **more) for seed in range(2)]


MIXING = {"warmup_steps": 3, "quantile_steps": 1}
BANK = {
    "xdomainmix+sam": jobs_of(XDomainMix, sharpness=SAM(), **MIXING),
    "rsc": jobs_of(RSC),
    "mixup+sagm": jobs_of(Mixup, sharpness=SAGM()),
    "irm": jobs_of(IRM, anneal_steps=4),
    "groupdro": jobs_of(GroupDRO),
    "coral": jobs_of(CORAL),
    "vrex": jobs_of(VREx, anneal_steps=4),
    "lisa": jobs_of(LISA),
    "fish": jobs_of(Fish),
    "mlp": jobs_of(XDomainMix, setup={"head": MLP}, **MIXING),
}


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` has no values: what reads one fails. Autocast does not know it."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **named: nullcontext())


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("case", BANK)
def test_a_step_of_a_bank_reads_nothing_from_the_device(case: str) -> None:
    batch, bank = next(iter(batches(BANK[case], digits()))), Bank(BANK[case], torch.device("meta"))
    batch = Batch(**{name: value.to("meta") for name, value in batch.fields().items()})
    for number in (0, 5):  # of a warm-up, and after it
        loss = step_module.step(bank, batch, number)["loss"]
        assert loss.device.type == "meta" and loss.shape == (2,)


def without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, list):
        return [without_values(each) for each in value]
    return type(value)(*map(without_values, value)) if isinstance(value, tuple) else value


def step_without_values(make: Callable[[Setup], Algorithm], sharpness: Sharpness | None, accelerator: Any) -> None:
    job = make_job(make, sharpness=sharpness)
    inner = EndToEnd(SmallCNN(), job.make(job.setup), "train").train().to("meta")
    batch = step_batch(job, TRAINING, accelerator, 0)
    batch = StepBatch(without_values(batch.parts), without_values(batch.full_batch), batch.positions, batch.process)
    optimizer = optimizer_of(inner, TRAINING)
    losses = StepGradients(inner, inner, accelerator, sharpness, 0, by_parts=False).run(batch, 0)
    optimizer.step()
    assert losses.loss.is_meta


class Waits(ERM):
    """A loss with a branch that depends on its value."""

    def loss(self, z: Tensor, batch: Any, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        return losses if losses.total > 0 else losses._replace(total=-losses.total)


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize(
    ("make", "sharpness"),
    [
        *((ERM, sharpness) for sharpness in (None, SAM(adaptive=True), SAGM())),
        *((make, SAM()) for make in (CORAL, GroupDRO, IRM, RSC, VREx, partial(XDomainMix, warmup_steps=0), Waits)),
    ],
)
def test_a_step_end_to_end_reads_nothing_from_the_device(
    make: Callable[[Setup], Algorithm], sharpness: Sharpness | None, accelerator: Accelerator
) -> None:
    if make is not Waits:
        step_without_values(make, sharpness, accelerator)
        return
    with pytest.raises((RuntimeError, NotImplementedError)):
        step_without_values(make, sharpness, accelerator)


# --- scalars that the host reads some steps later


class Breaks(WithDomainHead):
    """Its loss is not finite from step 3 (counted from 0) on."""

    def loss(self, z: Tensor, batch: Any, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        return losses._replace(total=losses.total * (float("nan") if step >= 3 else 1))


@pytest.mark.parametrize("make", [WithDomainHead, Breaks])
def test_reading_later_changes_nothing(
    make: type[Algorithm], accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight steps with an evaluation after 6, on a CPU as late as on a GPU."""
    training, rows, results, added = Training(batch_size=4, evaluate_every=6), [], [], list[int]()
    job = dataclasses.replace(make_job(make, steps=8), training=training)
    for _ in range(2):
        record = lambda step, models: rows.append((step, models[0][1]))  # noqa: E731
        results.append(train(job, SmallCNN(), training, accelerator, record=record))
        begin, add = PendingScalars.__init__, PendingScalars.add
        later = lambda self, device, begin=begin: (begin(self, device), setattr(self, "ahead", AHEAD))[0]  # noqa: E731
        monkeypatch.setattr(PendingScalars, "__init__", later)
        monkeypatch.setattr(
            PendingScalars, "add", lambda self, step, *rest, add=add: (added.append(step), add(self, step, *rest))[1]
        )
    at_once, later_read = results
    if make is WithDomainHead:
        assert [step for step, _ in rows] == [6, 8, 6, 8] and rows[:2] == rows[2:]
        torch.testing.assert_close(final_state(later_read), final_state(at_once), rtol=0, atol=0)
    else:
        assert added == [*range(6)], "steps 4 and 5 are taken before the loss of step 3 is read"
        assert str(at_once.failure).startswith("the loss is nan at step 4 of 8; images in its ")
        assert later_read.failure == at_once.failure


def test_a_checkpoint_holds_the_steps_that_are_not_read(tmp_path: Path) -> None:
    pending, loaded, scalar = PendingScalars(CPU), PendingScalars(CPU), torch.tensor(0.5)
    pending.ahead = 2
    for number in (7, 8):
        losses = StepLosses(scalar * number, scalar, scalar, torch.tensor(number - 7.0), {"margin": scalar + number})
        pending.add(number, losses, skipped=number == 8)
    write(tmp_path / "state", {"unread": pending.state()}, {})
    loaded.load_state(read(tmp_path / "state")[0]["unread"])
    assert not [*pending.read(all_of_them=False)]
    for one, other in zip(pending.read(all_of_them=True), loaded.read(all_of_them=True), strict=True):
        assert one[:5] == other[:5]
        assert {name: float(value) for name, value in one.recorded.items()} == other.recorded
    assert (one.step, one.total, one.loss, one.stop, one.skipped) == (8, 4.0, 5.0, True, True)


@pytest.mark.parametrize("sharpness", [None, SAM()], ids=["", "sam"])
def test_batch_norm_of_a_single_pass_is_that_of_collected_statistics(
    sharpness: Sharpness | None, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, begin = make_job(WithDomainHead, sharpness=sharpness), RunningStatistics.begin
    alone = final_state(train(job, SmallCNN(), TRAINING, accelerator))
    monkeypatch.setattr(RunningStatistics, "begin", lambda self, collects: begin(self, True))
    collected = final_state(train(job, SmallCNN(), TRAINING, accelerator))
    torch.testing.assert_close(collected, alone, rtol=0, atol=0)


# --- compiled


def weights(jobs: list[Job], device: torch.device = CPU) -> dict[str, Tensor]:
    data, bank = digits(), Bank(jobs, device)
    features = Features([data.features[torch.arange(len(data.annotations.labels))]], device=device)
    for number, batch in enumerate(batches(jobs, CachedData(features, data.annotations.to(device)))):
        step_module.step(bank, batch, number)
    return {name: value.detach().cpu() for name, value in bank.stacked().items()}


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ("xdomainmix+sam", "irm") else pytest.mark.soak) for case in BANK]
)
def test_a_step_compiles_whole_and_once_per_phase(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph break, the same numbers to rounding, and one graph: two with a warm-up."""
    graphs, expected = [], weights(BANK[case])

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    one_graph = torch.compile(step_module.inner_step, fullgraph=True, backend=backend)
    monkeypatch.setattr(step_module, "inner_step", one_graph)
    torch.testing.assert_close(weights(BANK[case]), expected, rtol=1e-5, atol=2e-5)
    assert len(graphs) == (2 if case in ("xdomainmix+sam", "mlp") else 1)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_compiled_training_is_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits do not depend on the chunks that were trained before."""
    monkeypatch.setattr(bank_train, "CHUNK_HEADS", 2)
    jobs = [job_of(seed=seed, steps=4, lr=0.01 * (seed + 1)) for seed in range(3)]
    plain, compiling = Training(batch_size=8), Training(batch_size=8, compile=True)
    assert not Training().compile
    expected, together = bank_problems.train(jobs, plain), bank_problems.train(jobs, compiling)
    step_module.compile_step.cache_clear()
    torch.compiler.reset()
    alone = bank_problems.train(jobs[2:], compiling)
    states = [[each.selected["train_val"].state for each in trained] for trained in (expected, together, alone)]
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(states[2], states[1][2:], rtol=0, atol=0)


@pytest.mark.slow
def test_without_a_compiler_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._inductor.config as config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    line = r"^training.compile: torch.compile fails here \(.*\); install a C\+\+ compiler"
    with config.patch({"cpp.cxx": (None, "/nowhere/g++")}), pytest.raises(UserError, match=line):
        compile_function(torch.sin)(torch.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_an_encoder_is_one_graph_without_breaks_and_trains_the_same(
    backend: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of two passes each. A graph break or recompilation is an error."""
    job = make_job(WithDomainHead, steps=6, sharpness=SAM())
    eager = final_state(train(job, SmallCNN(), TRAINING, accelerator))
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        trained: Trained = train(job, SmallCNN(), COMPILED, accelerator)
    assert counters["stats"]["unique_graphs"] == 1
    assert_close(final_state(trained), eager, 1e-4, 1e-4)


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


# --- memory layouts and GPUs


def test_channels_last_trains_the_same(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(WithDomainHead, steps=3)
    last = final_state(train(job, SmallCNN(), TRAINING, accelerator))
    weight = EndToEnd(SmallCNN(), WithDomainHead(job.setup), "train").placed(CPU).encoder.layers[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    monkeypatch.setattr(model_module, "is_cnn", lambda encoder: False)
    assert_close(final_state(train(job, SmallCNN(), TRAINING, accelerator)), last, 1e-4, 1e-4)
    assert is_cnn(SmallCNN()) and not is_cnn(nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8))), "a ViT is none"


@pytest.mark.gpu
@pytest.mark.parametrize("case", BANK)
def test_a_bank_on_a_gpu_trains_as_on_a_cpu(case: str) -> None:
    on_gpu, on_cpu = (weights(BANK[case], torch.device(device)) for device in ("cuda", "cpu"))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_cnn_on_a_gpu_trains_as_on_a_cpu() -> None:
    job = make_job(WithDomainHead, steps=3)
    with one_process() as accelerator:
        on_cpu = final_state(train(job, SmallCNN(), TRAINING, accelerator))
    AcceleratorState._reset_state(reset_partial_state=True)
    on_gpu = final_state(train(job, SmallCNN(), TRAINING, Accelerator()))
    torch.testing.assert_close(on_gpu, on_cpu, atol=1e-3, rtol=1e-3)
