"""Heads of one bank that differ in the settings of their method, and how many heads a chunk has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bank_problems import WIDTH, digits, job_of
from own_training import under

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.fish import Fish
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.rsc import RSC
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.data import batches
from xdm_ft.training.bank.step import Bank, algorithm_of, stack, step
from xdm_ft.training.bank.train import CHUNK_HEADS, GPU_CHUNK_BYTES, GPU_CHUNK_HEADS, chunks

CPU, GPU = torch.device("cpu"), torch.device("cuda")
STEPS = 4


def varied(method: Callable[..., Algorithm], *settings: dict[str, float]) -> list[Job]:
    return [job_of(method, seed=0, steps=STEPS, **own) for own in settings]


SEARCHES = {
    "rsc": varied(RSC, {}, {"feature_drop": 0.1, "batch_drop": 0.9}, {"feature_drop": 0.5}),
    "mixup": varied(Mixup, {}, {"alpha": 0.1}, {"alpha": 10.0}),
    "lisa": varied(LISA, {}, {"alpha": 0.5}, {"p_sel": 0.5}),
    "fish": varied(Fish, {}, {"meta_lr": 0.05}, {"meta_lr": 0.1}),
    "irm": varied(IRM, {"anneal_steps": 2}, {"anneal_steps": 2, "penalty_weight": 1.0}),
    "sagm": [job_of(ERM, steps=STEPS, sharpness=SAGM(alpha=alpha, rho=rho)) for alpha, rho in ((0.01, 0.1), (1, 1))],
}


def trained(jobs: list[Job]) -> Bank:
    bank = stack(jobs, CPU)
    for number, batch in enumerate(batches(jobs, digits())):
        step(bank, batch, number)
    return bank


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_over_settings_is_one_bank_of_heads_as_alone(name: str) -> None:
    jobs = SEARCHES[name]
    assert chunks(jobs, CPU) == [jobs]
    together, ends = trained(jobs), []
    for head, job in enumerate(jobs):
        alone = trained([job]).state(0)
        assert alone.keys() == algorithm_of(job).state_dict().keys(), "a weights file holds no other buffers"
        torch.testing.assert_close(together.state(head), alone, rtol=1e-5, atol=1e-6)
        ends.append(alone["head.weight"])
    assert all((end - ends[0]).abs().max() > 1e-4 for end in ends[1:]), "the settings matter"


def test_a_gpu_trains_more_heads_at_once() -> None:
    jobs = [job_of(steps=5, seed=seed) for seed in range(GPU_CHUNK_HEADS + 3)]
    assert [len(chunk) for chunk in chunks(jobs, GPU)] == [GPU_CHUNK_HEADS, 3]
    assert max(map(len, chunks(jobs, CPU))) == CHUNK_HEADS
    large = Training(batch_size=GPU_CHUNK_BYTES // (4 * 3 * WIDTH) // 5)  # three domains
    assert [len(chunk) for chunk in chunks([under(large, job) for job in jobs[:7]], GPU)] == [5, 2]
