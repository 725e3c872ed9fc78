"""Trains heads on cached features, a chunk of them together. `step.step` is one step of a chunk."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.interrupt import deferred, stop_requested
from xdm_ft.runtime.machine import keep_freed_memory
from xdm_ft.runtime.progress import Progress, unseen
from xdm_ft.runtime.tensors import Annotations, Criteria
from xdm_ft.sharpness import Tensors
from xdm_ft.storage.checkpoint import Checkpoint, State
from xdm_ft.storage.digests import tensors_digest
from xdm_ft.training import Job, Record, Selected, Trained
from xdm_ft.training.averages import LOSS_SPLIT, Averages
from xdm_ft.training.bank.data import CachedData, batches
from xdm_ft.training.bank.step import algorithm_of, settings_of, stack, step
from xdm_ft.training.bank.validation import BankValidation
from xdm_ft.training.selection import Selector, evaluation_steps, external_values
from xdm_ft.training.state import TrainingState

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
    started, bar = time.perf_counter(), bar or unseen()
    data = CachedData(features, annotations.to(features.device))
    chunk = _Chunk(jobs, data, criteria, checkpoint, started)
    bank, evaluate_after = chunk.bank, set(evaluation_steps(chunk.steps, jobs[0].training.evaluate_every))
    chunk.resume()
    bar.skip(len(jobs) * chunk.taken)
    with deferred():
        if chunk.taken == 0:
            chunk.average(0)
        for number, batch in enumerate(batches(jobs, data, chunk.taken), start=chunk.taken):
            chunk.means.add(number, step(bank, batch, number))
            chunk.average(number + 1)
            bar.advance(len(jobs))
            if number + 1 in evaluate_after:
                chunk.evaluate(number + 1, record)
                if chunk.has_ended:
                    break
            chunk.taken = number + 1
            if stop_requested():
                chunk.save_and_stop()
            chunk.save_if_due(event=number + 1 in evaluate_after)
    return chunk.results()


class _Chunk(TrainingState):
    """Heads that train together, and what has been selected of them."""

    def __init__(
        self,
        jobs: Sequence[Job],
        data: CachedData,
        criteria: Criteria,
        checkpoint: Checkpoint | None,
        started: float,
    ) -> None:
        training, steps = jobs[0].training, jobs[0].setup.steps
        super().__init__(f"{jobs[0].method}, {plural(len(jobs), 'model')} together", steps, checkpoint, started)
        self.jobs, self.data, self.rules = jobs, data, criteria.rules
        compiles = training.compile and not algorithm_of(jobs[0]).has_kernels
        self.bank = stack(jobs, data.features.device, compiles)
        first_step = self.bank.template.first_selectable_step
        self.selectors = [Selector(criteria, first_step, training.patience) for _ in jobs]
        self.failures: list[str | None] = [None for _ in jobs]
        self.best: dict[str, Tensors] = {}
        """{selection rule: {name: weights that it has picked so far, [H,…] on the device}}; selectors have the steps"""
        self.validation = BankValidation(jobs, data, criteria)
        self.averages, self.loss_validation = None, None
        averagings = [job.averaging for job in jobs if job.averaging is not None]
        if averagings:
            assert len(averagings) == len(jobs), "a bank has one kind of averaging"
            self.averages = Averages(averagings, first_step, steps)
            if averagings[0].reads_loss:
                self.loss_validation = BankValidation(jobs, data, Criteria((LOSS_SPLIT,), "nll"))

    def _settings(self) -> dict[str, Any]:
        splits, annotations = [job.split for job in self.jobs], self.data.annotations
        rows = [rows for split in splits for rows in (*split.train, *split.evaluation.values())]
        return {
            "device": self.data.features.device.type,
            "features": self.data.features.key,
            "data": tensors_digest(dict(enumerate([annotations.labels, annotations.domains, *rows]))),
            "weights": tensors_digest(self.bank.stacked()),
        }

    @property
    def has_ended(self) -> bool:
        """Whether every head has failed or stopped."""
        return all(
            failure is not None or selector.stopped_at is not None
            for failure, selector in zip(self.failures, self.selectors, strict=True)
        )

    def average(self, taken: int) -> None:
        """Adds the weights after `taken` steps to the averages, if the heads have any."""
        if self.averages is not None:
            self.averages.add(taken, self.bank.parameters)

    def evaluate(self, taken: int, record: Record) -> None:
        """Evaluates every head that has neither failed nor stopped, after `taken` steps; selects and records."""
        bank, metric = self.bank, self.validation.metric
        means, broken_at = self.means.take()
        lr = (bank.optimizer.lr * bank.factors[taken - 1]).tolist()
        evaluated, heads_of_rule = list[tuple[Job, dict[str, float]]](), dict[str, list[int]]()
        for head, values in enumerate(self.validation.values(bank.template, bank.main)):
            job, selector = self.jobs[head], self.selectors[head]
            if self.failures[head] is not None or selector.stopped_at is not None:
                continue
            if head in broken_at:
                self.failures[head] = self._broken_loss(job, broken_at[head])
            elif values is None:
                where = f"after step {taken} of {self.steps}"
                self.failures[head] = f"the logits of the validation images were not finite {where}"
            else:
                values |= external_values(job, taken)
                for rule in selector.offer(taken, values, dict):  # the weights stay stacked until the end
                    heads_of_rule.setdefault(rule, []).append(head)
                scalars = {name: float(mean[head]) for name, mean in means.items()} | {"lr": lr[head]}
                evaluated.append((job, scalars | {f"{rule}/{metric}": value for rule, value in values.items()}))
        if self.averages is None:
            self._keep_best(heads_of_rule)
        if evaluated:
            record(taken, evaluated)
        if self.averages is not None:
            stops = enumerate(selector.stopped_at for selector in self.selectors)
            ended = {head for head, stop in stops if stop is not None and stop < taken}
            self.averages.evaluated(taken, self._losses(), ended)

    def _broken_loss(self, job: Job, number: int) -> str:
        rows = job.sampler(self.data.annotations.labels).indices(number, number + 1)[0].tolist()
        where = f"at step {number + 1} of {self.steps}; rows of its batch: {', '.join(map(str, rows))}"
        return f"the loss was not finite {where}"

    def _keep_best(self, heads_of_rule: Mapping[str, Sequence[int]]) -> None:
        """Keeps the present weights of some heads as the best ones, {selection rule: heads}."""
        stacked = {name: values.detach() for name, values in self.bank.stacked().items()}
        for rule, heads in heads_of_rule.items():
            best = self.best.setdefault(rule, {})
            index = torch.tensor(heads, device=self.bank.factors.device)
            for name, values in stacked.items():
                if name not in best:
                    best[name] = torch.zeros_like(values)
                best[name].index_copy_(0, index, values.index_select(0, index))

    def _losses(self) -> list[float | None]:
        """Returns the validation loss of every head: None if its logits are not finite, nan if no average needs it."""
        if self.loss_validation is None:
            return [math.nan] * len(self.jobs)
        values = self.loss_validation.values(self.bank.template, self.bank.main)
        return [None if of_head is None else of_head[LOSS_SPLIT] for of_head in values]

    def _own_state(self) -> State:
        return {
            "parameters": self.bank.parameters,
            "buffers": self.bank.buffers,
            "optimizer": self.bank.optimizer.state(),
            "selectors": [selector.state() for selector in self.selectors],
            "best": self.best,
            "averages": None if self.averages is None else self.averages.state(),
            "failures": self.failures,
        }

    def _load_own_state(self, state: State) -> None:
        bank, device = self.bank, self.bank.factors.device
        for name, parameter in bank.parameters.items():
            parameter.copy_(state["parameters"][name])
        for name, value in state["buffers"].items():
            bank.buffers[name].copy_(value)
        bank.optimizer.load_state(state["optimizer"])
        for selector, saved in zip(self.selectors, state["selectors"], strict=True):
            selector.load_state(saved)
        self.best = {
            rule: {name: value.to(device) for name, value in weights.items()} for rule, weights in state["best"].items()
        }
        if self.averages is not None:
            self.averages.load_state(state["averages"], device)
        self.failures = state["failures"]

    def results(self) -> list[Trained]:
        """Returns one result per head. `seconds` is the chunk's time divided by its number of heads."""
        template, seconds = self.bank.template, self.seconds / len(self.jobs)
        best = {rule: {name: value.cpu() for name, value in weights.items()} for rule, weights in self.best.items()}
        # all heads of a bank have parameters of the same sizes
        parameters = sum(parameter.numel() for parameter in template.parameters() if parameter.requires_grad)
        results = []
        for head, (job, selector) in enumerate(zip(self.jobs, self.selectors, strict=True)):
            failure, selected = self._selected(head, best)
            results.append(
                Trained(
                    job=job,
                    selected={} if failure else selected,
                    mixed_steps=template.mixed_steps(selector.stopped_at or self.steps),
                    seconds=seconds,
                    failure=failure,
                    course=selector.course,
                    stopped_at=selector.stopped_at,
                    restarts=self.restarts,
                    parameters=parameters,
                )
            )
        return results

    def _selected(self, head: int, best: Mapping[str, Tensors]) -> tuple[str | None, dict[str, Selected]]:
        """Returns why a head has failed (None: it has not), and what was selected of it."""
        selector, failure = self.selectors[head], self.failures[head]
        if self.averages is not None:
            failure = failure or self.averages.nothing_averaged(head)
            if failure:
                return failure, {}
            return None, self.averages.selected(head, lambda mean: self.bank.state(head) | mean, self.rules)
        for rule, selected in selector.selected.items():
            if not selected.state:  # of rules that picked the same step, the first fills the weights that they share
                selected.state.update({name: value[head].clone() for name, value in best[rule].items()})
        return failure or selector.nothing_selected(), selector.selected


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
        shared = (
            job.setup.task.num_domains,
            job.setup.steps,
            job.training.model_dump_json(exclude=STACKED),
            type(job.averaging),  # its settings may differ between heads
            *(tuple(sorted(s.items(), key=str)) for s in settings),
        )
        groups.setdefault(shared, []).append(job)
    chunked = list[list[Job]]()
    for group in groups.values():
        size = chunk_heads(group[0], device)
        trials: dict[tuple[int, int], list[Job]] = {}
        for job in group:
            trials.setdefault((id(job.split), job.seed), []).append(job)
        parts = [part for same_batches in trials.values() for part in _slices(same_batches, size)]
        rest = [job for part in parts if 2 * len(part) <= size for job in part]
        chunked += [part for part in parts if 2 * len(part) > size] + _slices(rest, size)
    return chunked


def _slices(jobs: list[Job], size: int) -> list[list[Job]]:
    return [jobs[first : first + size] for first in range(0, len(jobs), size)]


def chunk_heads(job: Job, device: torch.device) -> int:
    """Returns how many heads like this one train at once; `benchmarks/heads.py --chunks` measures other numbers."""
    rows = job.training.images_per_step(len(job.split.train))
    size = CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    return max(1, min(most_heads(device), size // (4 * rows * job.setup.width)))


def most_heads(device: torch.device) -> int:
    return CHUNK_HEADS if device.type == "cpu" else GPU_CHUNK_HEADS
