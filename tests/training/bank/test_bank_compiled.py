"""A step of a bank computes with tensors only: it never waits for a GPU, and it compiles whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from bank_problems import digits, job_of

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
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM
from xdm_ft.tensors import Batch
from xdm_ft.training import Job
from xdm_ft.training.bank import stacked
from xdm_ft.training.bank.cached_data import CachedData, batches
from xdm_ft.training.bank.stacked import stack, step

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
    bank = stack(jobs, torch.device("cpu"))
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

    compiled = torch.compile(stacked.inner_step, fullgraph=True, backend=backend)
    monkeypatch.setattr(stacked, "inner_step", compiled)
    for name, value in weights(jobs).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-5)
    assert len(graphs) == (2 if isinstance(jobs[0].make(jobs[0].setup), XDomainMix) else 1)


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_nothing_from_the_device(case: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` has no values: what reads one fails."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **named: nullcontext())  # it does not know `meta`
    jobs = CASES[case]
    batch = next(iter(batches(jobs, digits())))
    bank = stack(jobs, torch.device("meta"))
    scalars = step(bank, Batch(**{name: value.to("meta") for name, value in batch.fields().items()}), number)
    assert scalars["loss"].device.type == "meta" and scalars["loss"].shape == (2,)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_trains_as_the_cpu(case: str) -> None:
    jobs, gpu, data = CASES[case], torch.device("cuda"), digits()
    features = Features([data.features[torch.arange(len(data.annotations.labels))]], device=gpu)
    bank = stack(jobs, gpu)
    for number, batch in enumerate(batches(jobs, CachedData(features, data.annotations.to(gpu)))):
        step(bank, batch, number)
    for name, expected in weights(jobs).items():
        torch.testing.assert_close(bank.stacked()[name].detach().cpu(), expected, rtol=1e-3, atol=1e-4)
