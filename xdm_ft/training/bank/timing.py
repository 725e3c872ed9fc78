"""How long steps and evaluations of a bank take, measured on a few of them. Nothing that they compute is kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from xdm_ft.runtime.tensors import Batch, Criteria
from xdm_ft.training import Job
from xdm_ft.training.bank.data import BLOCK_STEPS, CachedData, batches
from xdm_ft.training.bank.step import stack, step
from xdm_ft.training.bank.validation import BankValidation

MOMENTS = (
    0.95,
    0.05,
    0.5,
)  # of a training, as shares of its steps: a step late in it may do more than one in a warm-up


class Timing(NamedTuple):
    """Seconds of a chunk of heads."""

    step: float
    evaluation: float


def timed(jobs: Sequence[Job], data: CachedData, criteria: Criteria, seconds: float) -> Timing:
    """Measures a few steps of a chunk of heads, and one evaluation, for about `seconds`."""
    bank, means, started = stack(jobs, data.features.device), [], time.perf_counter()
    for moment in MOMENTS:
        first = int(moment * bank.steps)
        coming = batches(jobs, data, first)
        began = time.perf_counter()
        batch = next(coming)
        draws = (time.perf_counter() - began) / min(BLOCK_STEPS, bank.steps - first)  # rows of many steps at once

        def work(batch: Batch = batch, first: int = first) -> None:
            bank.optimizer.reset()  # it counts its steps, and is not made for more than the training has
            step(bank, batch, first)

        work()  # a first call may compile, or allocate
        means.append(draws + seconds_of(work, 0.1 * seconds))
        if time.perf_counter() - started > seconds:
            break
    validation = BankValidation(jobs, data, criteria)
    evaluation = seconds_of(lambda: validation.values(bank.template, bank.main), 0.0)
    return Timing(sum(means) / len(means), evaluation)


def seconds_of(work: Callable[[], object], seconds: float) -> float:
    """Returns the median time of at least one call of `work`, and of more until `seconds` have passed.

    Not the shortest time: what else the machine does now will slow the run too. Not the mean: a call that waits for a
    core which another program holds may take many times as long as the others.
    """
    started, times = time.perf_counter(), list[float]()
    while not times or time.perf_counter() - started < seconds:
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
