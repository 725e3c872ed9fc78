"""A step of a bank computes with tensors only: it never waits for a GPU, and it compiles whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from bank_problems import digits, job_of, train

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.coral import CORAL
from xdm_ft.algorithms.fish import Fish
from xdm_ft.algorithms.groupdro import GroupDRO
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.rsc import RSC
from xdm_ft.algorithms.vrex import VREx
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.features.cache import Features
from xdm_ft.heads.mlp import MLP
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Batch
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Training, compiled
from xdm_ft.training.bank import step as step_module
from xdm_ft.training.bank import train as bank_train
from xdm_ft.training.bank.data import CachedData, batches
from xdm_ft.training.bank.step import Bank, step

STEPS = 9
MIXING = {"warmup_steps": 3, "quantile_steps": 1}


def jobs_of(method: Callable[..., Algorithm], **more: object) -> list[Job]:
    return [job_of(method, seed=seed, steps=STEPS, lr=0.01 * (seed + 1), **more) for seed in range(2)]


CASES = {
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


def weights(jobs: list[Job]) -> dict[str, torch.Tensor]:
    bank = Bank(jobs, torch.device("cpu"))
    for number, batch in enumerate(batches(jobs, digits())):
        step(bank, batch, number)
    return {name: value.detach() for name, value in bank.stacked().items()}


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("case", CASES)
def test_a_step_compiles_whole_and_once_per_phase(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph break, the same numbers to rounding, and one graph: two with a warm-up."""
    graphs, jobs = [], CASES[case]
    expected = weights(jobs)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        step_module, "inner_step", torch.compile(step_module.inner_step, fullgraph=True, backend=backend)
    )
    for name, value in weights(jobs).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-5)
    assert len(graphs) == (2 if isinstance(jobs[0].make(jobs[0].setup), XDomainMix) else 1)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_compiled_training_is_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits do not depend on the chunks that were trained before."""
    monkeypatch.setattr(bank_train, "CHUNK_HEADS", 2)
    jobs = [job_of(Mixup, seed=seed, steps=STEPS, lr=0.01 * (seed + 1), sharpness=SAM()) for seed in range(5)]
    plain, compiling = Training(batch_size=8), Training(batch_size=8, compile=True)
    assert not Training().compile
    expected, found = train(jobs, plain), train(jobs, compiling)
    step_module.compiled_step.cache_clear()
    torch.compiler.reset()
    alone = train(jobs[4:], compiling)
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in ours.selected["train_val"].state.items():
            torch.testing.assert_close(value, theirs.selected["train_val"].state[name], rtol=1e-5, atol=2e-5)
    for name, value in alone[0].selected["train_val"].state.items():
        assert torch.equal(value, found[4].selected["train_val"].state[name])


@pytest.mark.slow
def test_without_a_compiler_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._inductor.config as config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    line = r"^training.compile: torch.compile fails here \(.*\); install a C\+\+ compiler"
    with config.patch({"cpp.cxx": (None, "/nowhere/g++")}), pytest.raises(UserError, match=line):
        compiled(torch.sin)(torch.ones(3))


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_nothing_from_the_device(case: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` has no values: what reads one fails."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **named: nullcontext())  # it does not know `meta`
    jobs = CASES[case]
    batch = next(iter(batches(jobs, digits())))
    bank = Bank(jobs, torch.device("meta"))
    scalars = step(bank, Batch(**{name: value.to("meta") for name, value in batch.fields().items()}), number)
    assert scalars["loss"].device.type == "meta" and scalars["loss"].shape == (2,)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_trains_as_the_cpu(case: str) -> None:
    jobs, gpu, data = CASES[case], torch.device("cuda"), digits()
    features = Features([data.features[torch.arange(len(data.annotations.labels))]], device=gpu)
    bank = Bank(jobs, gpu)
    for number, batch in enumerate(batches(jobs, CachedData(features, data.annotations.to(gpu)))):
        step(bank, batch, number)
    for name, expected in weights(jobs).items():
        torch.testing.assert_close(bank.stacked()[name].detach().cpu(), expected, rtol=1e-3, atol=1e-4)
