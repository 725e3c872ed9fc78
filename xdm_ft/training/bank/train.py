"""Trains heads on cached features, a chunk of them together. `stacked.step` is one step of a chunk."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xdm_ft.runtime.interrupt import deferred, stop_requested
from xdm_ft.runtime.machine import keep_freed_memory
from xdm_ft.runtime.progress import Progress, unseen
from xdm_ft.runtime.tensors import Annotations, Criteria
from xdm_ft.storage.checkpoint import Checkpoint
from xdm_ft.training import Job, Record, Trained
from xdm_ft.training.averages import LOSS_SPLIT, Averages
from xdm_ft.training.bank.cached_data import CachedData, batches
from xdm_ft.training.bank.stacked import Bank, algorithm_of, settings_of, stack, step
from xdm_ft.training.bank.state import ChunkState
from xdm_ft.training.bank.validation import BankValidation
from xdm_ft.training.schedule import learning_rate_factor
from xdm_ft.training.selection import Selector, evaluation_steps, external_values

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features


# Heads trained at once, and bytes of their features at a step. With fewer heads the fixed cost of a step is shared by
# fewer; with more heads there are fewer chunks for other processes. Another number changes the rounding of results. A
# GPU launches a step's operators for 256 heads as fast as for 32.
CHUNK_HEADS, CHUNK_BYTES = 32, 32 << 20
GPU_CHUNK_HEADS, GPU_CHUNK_BYTES = 256, 256 << 20

STACKED = {"lr", "encoder_lr", "weight_decay", "momentum"}
"""Keys of `training` in which the heads of a chunk may differ; heads do not use encoder_lr."""


def train_chunk(
    jobs: Sequence[Job],
    features: Features,
    annotations: Annotations,
    criteria: Criteria,
    *,
    record: Record,
    bar: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> list[Trained]:
    """Trains one of the `chunks` of jobs, all of its heads together, and returns their results in the same order.

    An interrupted chunk resumes from its `checkpoint`, which the caller removes when the results are stored; on a CPU
    the result is bit for bit that of a chunk without interruption. A signal to stop raises `Interrupted` after the
    current step. `bar` counts one unit for each step of each head.

    At each evaluation `record(number of steps taken, [(job, values), …])` receives, for each head that was evaluated,
    the means since the last evaluation of `loss`, `auxiliary_loss` and the algorithm's logs, the learning rate `lr`,
    and `<rule>/<metric>` for each selection rule.

    If a model's loss or logits are not finite, or the first rule could select nothing, its result has a `failure` and
    no weights; the other heads are not affected.
    """
    keep_freed_memory()
    started, training = time.perf_counter(), jobs[0].training
    data = CachedData(features, annotations.to(features.device))
    bank = stack(jobs, features.device, training.compile and not algorithm_of(jobs[0]).has_kernels)
    averages, validation_loss = _averages(jobs, bank, data)
    first_step = bank.template.first_selectable_step
    selectors = [Selector(criteria, first_step, training.patience) for _ in jobs]
    state = ChunkState(jobs, bank, selectors, averages, [None for _ in jobs], started=started)
    if checkpoint is not None:
        state.resume(checkpoint, data)
    _take_steps(state, data, BankValidation(jobs, data, criteria), validation_loss, record, bar or unseen(), checkpoint)
    return state.results(criteria.rules)


def _take_steps(
    state: ChunkState,
    data: CachedData,
    validation: BankValidation,
    validation_loss: BankValidation | None,
    record: Record,
    bar: Progress,
    checkpoint: Checkpoint | None,
) -> None:
    """Takes the steps that are left; evaluates and saves in between."""
    jobs, bank, averages = state.jobs, state.bank, state.averages
    bar.skip(len(jobs) * state.taken)
    due = set(evaluation_steps(bank.steps, jobs[0].training.evaluate_every))
    with deferred():
        if averages is not None and state.taken == 0:
            averages.add(0, bank.main | bank.auxiliary)
        for number, batch in enumerate(batches(jobs, data, state.taken), start=state.taken):
            state.means.add(number, step(bank, batch, number))
            if averages is not None:
                averages.add(number + 1, bank.main | bank.auxiliary)
            bar.advance(len(jobs))
            if number + 1 in due:
                _evaluate(state, data, validation, number + 1, record)
                if averages is not None:
                    losses = _losses_to_average_by(validation_loss, bank)
                    averages.evaluated(number + 1, losses, ended=state.stopped_before(number + 1))
                if state.ended:
                    break
            state.taken = number + 1
            if stop_requested():
                state.save_and_stop(checkpoint)
            if checkpoint is not None:
                checkpoint.save_if_due(state.state, event=number + 1 in due)


def chunks(jobs: Sequence[Job], device: torch.device) -> list[list[Job]]:
    """Returns jobs that can be stacked, at most `chunk_heads` each.

    The result depends on the jobs and on the kind of device only.

    The jobs of a chunk have the same number of training domains, the same steps, and the same settings, except for
    STACKED, buffers, and the settings of averaging. Trials of one split and seed, whose batches are the same, share a
    chunk if they fill more than half of it.
    """
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        algorithm = algorithm_of(job)
        settings = (settings_of(algorithm), settings_of(algorithm.head), settings_of(job.sharpness))
        shared = job.training.model_dump_json(exclude=STACKED)
        alike = (
            job.setup.task.num_domains,
            job.setup.steps,
            shared,
            type(job.averaging),  # its settings may differ between heads
            *(tuple(sorted(s.items(), key=str)) for s in settings),
        )
        groups.setdefault(alike, []).append(job)
    cut = list[list[Job]]()
    for group in groups.values():
        size = chunk_heads(group[0], device)
        trials: dict[tuple[int, int], list[Job]] = {}
        for job in group:
            trials.setdefault((id(job.split), job.seed), []).append(job)
        parts = [part for of_one in trials.values() for part in _cut(of_one, size)]
        rest = [job for part in parts if 2 * len(part) <= size for job in part]
        cut += [part for part in parts if 2 * len(part) > size] + _cut(rest, size)
    return cut


def _cut(jobs: list[Job], size: int) -> list[list[Job]]:
    return [jobs[first : first + size] for first in range(0, len(jobs), size)]


def chunk_heads(job: Job, device: torch.device) -> int:
    """Returns how many heads like this one train at once; `benchmarks/heads.py --chunks` measures other numbers."""
    rows = job.training.images_per_step(len(job.split.train))
    size = CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    return max(1, min(most_heads(device), size // (4 * rows * job.setup.width)))


def most_heads(device: torch.device) -> int:
    return CHUNK_HEADS if device.type == "cpu" else GPU_CHUNK_HEADS


def _evaluate(state: ChunkState, data: CachedData, validation: BankValidation, taken: int, record: Record) -> None:
    """Evaluates every head that has neither failed nor stopped, after `taken` steps; selects and records."""
    bank, jobs, failures, metric = state.bank, state.jobs, state.failures, validation.metric
    means, broken_at = state.means.take()
    lr = (bank.lr * learning_rate_factor(taken - 1, bank.steps, bank.schedule)).tolist()
    evaluated, picked = list[tuple[Job, dict[str, float]]](), dict[str, list[int]]()
    for head, values in enumerate(validation.values(bank.template, bank.main)):
        if failures[head] is not None or state.selectors[head].stopped_at is not None:
            continue
        failures[head] = _failure(jobs[head], data, taken, broken_at.get(head), values)
        if failures[head] is None and values is not None:
            values |= external_values(jobs[head], taken)
            for rule in state.selectors[head].offer(taken, values, dict):  # the weights stay stacked until the end
                picked.setdefault(rule, []).append(head)
            scalars = {name: float(mean[head]) for name, mean in means.items()} | {"lr": lr[head]}
            evaluated.append((jobs[head], scalars | {f"{rule}/{metric}": v for rule, v in values.items()}))
    if state.averages is None:
        state.pick(picked)
    if evaluated:
        record(taken, evaluated)


def _averages(jobs: Sequence[Job], bank: Bank, data: CachedData) -> tuple[Averages | None, BankValidation | None]:
    """Returns the averages of the heads, and the validation whose losses they need; None for what is not needed."""
    averagings = [job.averaging for job in jobs if job.averaging is not None]
    if not averagings:
        return None, None
    assert len(averagings) == len(jobs), "a bank has one kind of averaging"
    averages = Averages(averagings, bank.template.first_selectable_step, bank.steps)
    return averages, BankValidation(jobs, data, Criteria((LOSS_SPLIT,), "nll")) if averagings[0].reads_loss else None


def _losses_to_average_by(validation: BankValidation | None, bank: Bank) -> list[float | None]:
    """Returns the validation loss of every head: None if its logits are not finite, nan if no average needs it."""
    if validation is None:
        return [math.nan] * len(bank.lr)
    values = validation.values(bank.template, bank.main)
    return [None if of_head is None else of_head[LOSS_SPLIT] for of_head in values]


def _failure(
    job: Job,
    data: CachedData,
    taken: int,
    broken_at: int | None,
    values: Mapping[str, float] | None,
) -> str | None:
    """Returns why a head has failed by the evaluation after `taken` steps; None if it has not."""
    if broken_at is not None:
        drawn = job.sampler(data.annotations.labels).indices(broken_at, broken_at + 1)[0]
        rows = ", ".join(str(row) for row in drawn.tolist())
        return f"the loss was not finite at step {broken_at + 1} of {job.setup.steps}; rows of its batch: {rows}"
    if values is None:
        return f"the logits of the validation images were not finite after step {taken} of {job.setup.steps}"
    return None
