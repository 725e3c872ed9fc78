"""Trains jobs on cached features, chunk by chunk; `stacked` holds what one step of a chunk does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xdm_ft.interrupt import deferred, stop_requested
from xdm_ft.progress import Progress, progress
from xdm_ft.storage.checkpoint import Checkpoint
from xdm_ft.tensors import Annotations, Criteria
from xdm_ft.training import Job, Trained
from xdm_ft.training.averages import LOSS_SPLIT, Averages
from xdm_ft.training.bank.cached_data import CachedData, batches
from xdm_ft.training.bank.stacked import Bank, algorithm_of, settings_of, stack, step
from xdm_ft.training.bank.state import ChunkState
from xdm_ft.training.bank.validation import BankValidation
from xdm_ft.training.memory import keep_freed_memory
from xdm_ft.training.schedule import learning_rate_factor
from xdm_ft.training.selection import Selector, evaluation_steps, known_values

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features


CHUNK_HEADS = 32  # heads trained at once: fewer share the cost of a step, more leave less for other processes …
CHUNK_BYTES = 32 << 20  # … and the features of a step beyond this, which `allocator` can not keep, cost page faults

STACKED = {"lr", "encoder_lr", "weight_decay", "momentum"}
"""Keys of `training` in which heads of a chunk may differ; encoder_lr means nothing to them."""

Record = Callable[[Job, int, dict[str, float]], None]


def train_bank(
    jobs: Sequence[Job],
    features: Features,
    annotations: Annotations,
    criteria: Criteria,
    *,
    record: Record,
    show: bool,
    place: str = "",
    checkpoint: Callable[[Sequence[Job]], Checkpoint] | None = None,
) -> Iterator[Trained]:
    """Trains the jobs, chunk by chunk; results come in the order of `chunks`. `place` is said of each in its progress.

    With `checkpoint`, that of a chunk, an interrupted chunk goes on where it was saved, on a CPU bit for bit as if
    nothing had been; a signal to stop then raises `Interrupted` after the step.

    At each evaluation `record(job, number of steps taken, values)` is given the means since the last one of `loss`,
    `auxiliary_loss` and what the algorithm logs, the learning rate `lr`, and `<rule>/<metric>` for each selection rule.

    A model whose loss or logits are not finite, or of which the first rule could select nothing, comes with a `failure`
    and without weights; the other heads are not disturbed. `seconds` is a head's share of its chunk's time.
    """
    keep_freed_memory()
    data = CachedData(features, annotations.to(features.device))
    with progress(f"{jobs[0].method}{place}", sum(job.setup.steps for job in jobs), "head-steps", show) as bar:
        for chunk in chunks(jobs):
            kept = checkpoint(chunk) if checkpoint is not None else None
            yield from _train_chunk(chunk, data, criteria, record, bar, kept)
            if kept is not None:
                kept.remove()  # whoever asks for the next model has kept these


def chunks(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs whose tensors stack, `chunk_heads` at a time: a function of the jobs, never of who trains them.

    They have the same number of training domains, the same steps, and the same settings but for what is stacked and
    those of averaging.
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
            type(job.averaging),  # whose settings are every head's own
            *(tuple(sorted(s.items(), key=str)) for s in settings),
        )
        groups.setdefault(alike, []).append(job)
    cut = []
    for group in groups.values():
        size = chunk_heads(group[0])
        cut += [group[first : first + size] for first in range(0, len(group), size)]
    return cut


def chunk_heads(job: Job) -> int:
    """How many heads like this one train at once; `benchmarks/heads.py --chunks` measures it."""
    rows = job.training.images_per_step(len(job.split.train))
    return max(1, min(CHUNK_HEADS, CHUNK_BYTES // (4 * rows * job.setup.width)))


def _train_chunk(
    jobs: list[Job],
    data: CachedData,
    criteria: Criteria,
    record: Record,
    bar: Progress,
    checkpoint: Checkpoint | None,
) -> list[Trained]:
    started, training = time.perf_counter(), jobs[0].training
    bank = stack(jobs, data.features.device)
    averages, validation_loss = _averages(jobs, bank, data)
    first_step = bank.template.first_selectable_step
    selectors = [Selector(criteria, first_step, training.patience) for _ in jobs]
    state = ChunkState(jobs, bank, selectors, averages, [None for _ in jobs], started=started)
    if checkpoint is not None:
        state.resume(checkpoint, data)
    bar.skip(len(jobs) * state.taken)
    validation = BankValidation(jobs, data, criteria)
    due = set(evaluation_steps(bank.steps, training.evaluate_every))
    with deferred():
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
    return state.results(criteria.rules)


def _evaluate(state: ChunkState, data: CachedData, validation: BankValidation, taken: int, record: Record) -> None:
    """The evaluation after `taken` steps, of every head that has neither failed nor stopped."""
    bank, jobs, failures, metric = state.bank, state.jobs, state.failures, validation.metric
    means, broken_at = state.means.take()
    lr = bank.lr * learning_rate_factor(taken - 1, bank.steps, bank.schedule)
    for head, values in enumerate(validation.values(bank.template, bank.main)):
        if failures[head] is not None or state.selectors[head].stopped_at is not None:
            continue
        failures[head] = _failure(jobs[head], data, taken, broken_at.get(head), values)
        if failures[head] is None and values is not None:
            values |= known_values(jobs[head], taken)
            state.selectors[head].offer(taken, values, lambda head=head: bank.state(head))  # type: ignore[misc]
            scalars = {name: float(mean[head]) for name, mean in means.items()} | {"lr": float(lr[head])}
            record(jobs[head], taken, scalars | {f"{rule}/{metric}": v for rule, v in values.items()})


def _averages(jobs: list[Job], bank: Bank, data: CachedData) -> tuple[Averages | None, BankValidation | None]:
    """Where the method asks for an average: it, and the losses that it looks at."""
    averagings = [job.averaging for job in jobs if job.averaging is not None]
    if not averagings:
        return None, None
    assert len(averagings) == len(jobs), "a bank has one kind of averaging"
    averages = Averages(averagings, bank.template.first_selectable_step)
    return averages, BankValidation(jobs, data, Criteria((LOSS_SPLIT,), "nll")) if averagings[0].reads_loss else None


def _losses_to_average_by(validation: BankValidation | None, bank: Bank) -> list[float | None]:
    """The validation loss of every head; None where its logits are not finite, nan where no average looks at it."""
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
    """Why a head failed by the evaluation after `taken` steps; None where it did not."""
    if broken_at is not None:
        drawn = job.sampler(data.annotations.labels).indices(broken_at, broken_at + 1)[0]
        rows = ", ".join(str(row) for row in drawn.tolist())
        return f"the loss was not finite at step {broken_at + 1} of {job.setup.steps}; rows of its batch: {rows}"
    if values is None:
        return f"the logits of the validation images were not finite after step {taken} of {job.setup.steps}"
    return None
