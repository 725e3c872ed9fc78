"""Trains heads on cached features: a chunk of them together, or the head of a solver. `step.step` is a chunk's step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from xdm_ft.algorithms import Solver
from xdm_ft.core import ORACLE, Annotations, Batch, Criteria, Tensors
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, is_defined
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.interrupt import deferred, stop_requested
from xdm_ft.runtime.machine import retain_freed_memory
from xdm_ft.runtime.progress import Progress, unseen
from xdm_ft.storage import tensors_digest
from xdm_ft.storage.checkpoint import Checkpoint, State
from xdm_ft.training import Job, ScalarSink, Trained
from xdm_ft.training.bank.data import BankValidation, CachedData, CachedPredictor, batches
from xdm_ft.training.bank.step import Bank, settings_of, step
from xdm_ft.training.selection import (
    LOSS_SPLIT,
    Averages,
    RuleImages,
    Selector,
    evaluation_steps,
    external_values,
    rows_of_rules,
    split_of,
)  # fmt: skip
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
    record: ScalarSink,
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
    retain_freed_memory()
    started, bar = time.perf_counter(), bar or unseen()
    data = CachedData(features, annotations.to(features.device))
    chunk = _Chunk(jobs, data, criteria, checkpoint, started)
    bank, evaluate_after = chunk.bank, set(evaluation_steps(chunk.steps, jobs[0].training.evaluate_every))
    chunk.resume()
    bar.skip(len(jobs) * chunk.taken)
    with deferred():
        if chunk.averages and chunk.taken == 0:
            # an average over the whole training counts the weights before it too (θ_0 of BMA)
            chunk.averages.add(0, bank.parameters)
        for number, batch in enumerate(batches(jobs, data, chunk.taken), start=chunk.taken):
            chunk.means.add(number, step(bank, batch, number))
            if chunk.averages:
                chunk.averages.add(number + 1, bank.parameters)
            bar.advance(len(jobs))
            if number + 1 in evaluate_after and not chunk.evaluate(number + 1, record):
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
        training, steps, device = jobs[0].training, jobs[0].setup.steps, data.features.device
        self.jobs, self.data, self.rules = jobs, data, criteria.rules
        compiles = training.compile and not jobs[0].new_algorithm().has_kernels
        self.bank = Bank(jobs, device, compiles)
        self.failures: list[str | None] = [None for _ in jobs]
        self.best: dict[str, Tensors] = {}
        """{selection rule: {name: weights that it has picked so far, [H,…] on the device}}; selectors have the steps"""
        self.validation, self.loss_validation = BankValidation(jobs, data, criteria), None
        first_step, averages = self.bank.template.first_selectable_step, None
        averagings = [job.averaging for job in jobs if job.averaging is not None]
        if averagings:
            assert len(averagings) == len(jobs), "a bank has one kind of averaging"
            averages = Averages(averagings, first_step, steps)
            if averagings[0].reads_loss:
                self.loss_validation = BankValidation(jobs, data, Criteria((LOSS_SPLIT,), "nll"))
        name = f"{jobs[0].method}, {plural(len(jobs), 'model')} together"
        selectors = [Selector(criteria, first_step, training.patience) for _ in jobs]
        super().__init__(name, steps, selectors, averages, device, checkpoint, started)

    def evaluate(self, taken: int, record: ScalarSink) -> bool:
        """Evaluates, selects and records every head that has neither failed nor stopped, after `taken` steps.

        Returns whether one of them goes on.
        """
        bank, metric, jobs = self.bank, self.validation.metric, self.jobs
        means, broken_at = self.means.take()
        lr = (bank.optimizer.lr * bank.factors[taken - 1]).tolist()
        evaluated, heads_of_rule = list[tuple[Job, dict[str, float]]](), dict[str, list[int]]()
        for head, values in enumerate(self.validation.values(bank.template, bank.main)):
            job, selector = jobs[head], self.selectors[head]
            if self.failures[head] is not None or selector.stopped_at is not None:
                continue
            if head in broken_at:
                number = broken_at[head]
                rows = job.sampler(self.data.annotations.labels).indices(number, number + 1)[0].tolist()
                moment = f"at step {number + 1} of {self.steps}; rows of its batch: {', '.join(map(str, rows))}"
                self.failures[head] = f"the loss was not finite {moment}"
            elif values is None:
                moment = f"after step {taken} of {self.steps}"
                self.failures[head] = f"the logits of the validation images were not finite {moment}"
            else:
                values |= external_values(job, taken)
                for rule in selector.offer(taken, values, dict):  # the weights stay stacked until the end
                    heads_of_rule.setdefault(rule, []).append(head)
                scalars = {name: float(mean[head]) for name, mean in means.items()} | {"lr": lr[head]}
                evaluated.append((job, scalars | {f"{rule}/{metric}": value for rule, value in values.items()}))
        if evaluated:
            record(taken, evaluated)

        if self.averages is None:
            stacked = {name: values.detach() for name, values in bank.stacked().items()}
            for rule, heads in heads_of_rule.items():
                best, index = self.best.setdefault(rule, {}), torch.tensor(heads, device=self.device)
                for name, weights in stacked.items():
                    if name not in best:
                        best[name] = torch.zeros_like(weights)
                    best[name].index_copy_(0, index, weights.index_select(0, index))
        else:
            losses: list[float | None] = [math.nan for _ in jobs]  # of averages that read none
            if self.loss_validation is not None:
                loss_values = self.loss_validation.values(bank.template, bank.main)
                losses = [None if of_head is None else of_head[LOSS_SPLIT] for of_head in loss_values]
            stops = enumerate(selector.stopped_at for selector in self.selectors)
            ended = {head for head, stop in stops if stop is not None and stop < taken}
            self.averages.evaluated(taken, losses, ended)
        ends = zip(self.failures, self.selectors, strict=True)
        return any(failure is None and selector.stopped_at is None for failure, selector in ends)

    def _settings(self) -> dict[str, Any]:
        splits, annotations = [job.split for job in self.jobs], self.data.annotations
        rows = [rows for split in splits for rows in (*split.train, *split.evaluation.values())]
        return {
            "layout": 2,  # of `state`; raise it when it changes
            "device": self.device.type,
            "features": self.data.features.key,
            "data": tensors_digest(dict(enumerate([annotations.labels, annotations.domains, *rows]))),
            "weights": tensors_digest(self.bank.stacked()),
        }

    def state(self) -> State:
        return super().state() | {
            "parameters": self.bank.parameters,
            "buffers": self.bank.buffers,
            "optimizer": self.bank.optimizer.moments,
            "best": self.best,
            "failures": self.failures,
        }

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        super().load_state(state)
        for name, parameter in self.bank.parameters.items():
            parameter.copy_(state["parameters"][name])
        for name, value in state["buffers"].items():
            self.bank.buffers[name].copy_(value)
        self.bank.optimizer.load_state(state["optimizer"])
        self.best = {
            rule: {name: value.to(self.device) for name, value in weights.items()}
            for rule, weights in state["best"].items()
        }
        self.failures = state["failures"]

    def results(self) -> list[Trained]:
        """Returns one result per head. `seconds` is the chunk's time divided by its number of heads."""
        template, seconds, results = self.bank.template, self.seconds / len(self.jobs), list[Trained]()
        best = {rule: {name: value.cpu() for name, value in weights.items()} for rule, weights in self.best.items()}
        # all heads of a bank have parameters of the same sizes
        parameters = sum(parameter.numel() for parameter in template.parameters() if parameter.requires_grad)
        for head, (job, selector, failure) in enumerate(zip(self.jobs, self.selectors, self.failures, strict=True)):
            if self.averages is not None:
                failure, selected = failure or self.averages.failure(head), {}
                if failure is None:
                    average = self.averages.selected(head)
                    average = dataclasses.replace(average, state=self.bank.state(head) | average.state)
                    selected = dict.fromkeys(self.rules, average)
            else:
                failure, selected = failure or selector.failure(), selector.selected
                for rule, picked in selected.items():
                    if not picked.state:  # of rules that picked the same step, the first fills the weights they share
                        picked.state.update({name: value[head].clone() for name, value in best[rule].items()})
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


def solve(
    job: Job,
    features: Features,
    annotations: Annotations,
    criteria: Criteria,
    bar: Progress | None = None,
    threads: int = 1,
) -> Trained:
    """Returns the solver's candidates that the selection rules pick, offered in its order. Deterministic on a CPU.

    `features` must be L2-normalised if the solver is `normalized`. `Selected.step` is the candidate's index in the
    path, `Selected.hparams` the hyper-parameters that the solver varied. `bar` counts the candidates; the solver may
    use `threads`, while torch uses one.
    """
    started, bar = time.perf_counter(), bar or unseen()
    solver, selector = job.new_method(), Selector(criteria, 0)
    assert isinstance(solver, Solver)
    solver.threads = threads if features.device.type == "cpu" else 1
    solver.eval()
    rows_of, predictor = rows_of_rules(job, criteria.rules), CachedPredictor(job, features)
    splits = {split_of(rule): rows for rule, rows in rows_of.items()}
    splits |= job.split.evaluation if solver.keeps_curve else {}
    images = {name: RuleImages(name, rows, annotations, criteria.metric) for name, rows in splits.items()}
    curve = list[dict[str, float | None]]()
    rows, labels, domains = torch.cat(job.split.train), annotations.labels, annotations.domains
    batch = Batch(features[rows], labels[rows], job.split.domain_of[domains[rows]], rows, torch.arange(len(rows)))
    # one NaN would reach the heads of all classes, and no message would name its image
    low, high = batch.x.aminmax(dim=1)  # [n], NaN if a feature is: without a copy of the features
    broken = rows[~(low.isfinite() & high.isfinite()).cpu()].tolist()
    if broken:
        why = f"features of {plural(len(broken), 'training image')} hold NaN or ∞; the first is row {broken[0]}"
        return Trained(job, {}, None, time.perf_counter() - started, why)
    step_of_others = None
    if solver.pick == "cross_domain" and rows_of:
        step_of_others = step_across_domains(job, batch, predictor, annotations, criteria.metric, solver.threads)
        if step_of_others is None:
            why = f"pick: cross_domain: {criteria.metric} is defined on no training domain that was left out"
            return Trained(job, {}, None, time.perf_counter() - started, why)
    for candidate in solver.solve(batch.x, batch):
        state, values = candidate.state, external_values(job, candidate.step)
        measured = dict[str, float]()
        for name, rows in splits.items():
            logits = predictor.logits(state, rows)
            measured[name] = images[name].value(logits) if logits.isfinite().all() else math.nan  # nan: never selected
        values |= {rule: measured[split_of(rule)] for rule in rows_of}
        if step_of_others not in (None, candidate.step):
            values |= {rule: math.nan for rule in rows_of if rule != ORACLE}
        curve.append(candidate.hparams | {name: v if math.isfinite(v) else None for name, v in measured.items()})
        selector.offer(candidate.step, values, lambda state=state: state, candidate.hparams)  # type: ignore[misc]
        bar.advance()
    failure, seconds = selector.failure(), time.perf_counter() - started
    selected = {} if failure else selector.selected
    if solver.keeps_curve:
        selected = {rule: dataclasses.replace(picked, curve=curve) for rule, picked in selected.items()}
    return Trained(job, selected, None, seconds, failure, selector.course)


def step_across_domains(
    job: Job, batch: Batch, predictor: CachedPredictor, annotations: Annotations, metric: str, threads: int
) -> int | None:
    """Returns the candidate with the best mean metric on training domains that it has not seen, the first of equals.

    The solver finds its path anew without each of the domains of `batch`, all training images of the job. Domains on
    which the metric is not defined are passed over, and candidates that not every path has. None: none is left.
    """
    values, domains = dict[int, list[float]](), 0
    for domain in batch.domain.unique():
        left_out = batch.domain == domain
        if not is_defined(metric, batch.y[left_out]):
            continue
        domains += 1
        images = RuleImages("left_out", batch.row[left_out], annotations, metric)
        inside = Batch(**{name: value[~left_out.to(value.device)] for name, value in batch.fields().items()})
        solver = job.new_method()
        assert isinstance(solver, Solver)
        solver.threads = threads
        for candidate in solver.eval().solve(inside.x, inside):
            logits = predictor.logits(candidate.state, batch.row[left_out])
            values.setdefault(candidate.step, []).append(images.value(logits) if logits.isfinite().all() else math.nan)
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    means = {step: sign * math.fsum(of) / len(of) for step, of in values.items() if len(of) == domains}
    defined = {step: mean for step, mean in means.items() if not math.isnan(mean)}
    return max(defined, key=lambda step: defined[step], default=None)


def chunks(jobs: Sequence[Job], device: torch.device) -> list[list[Job]]:
    """Returns jobs that can be stacked, at most `chunk_heads` each.

    The result depends on the jobs and on the kind of device only.

    The jobs of a chunk have the same number of training domains, the same steps, and the same settings, except for
    STACKED, buffers, and the settings of averaging. Trials of one split and seed, whose batches are the same, share a
    chunk if they fill more than half of it.
    """
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        algorithm = job.new_algorithm()
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
        size, rest = chunk_heads(group[0], device), list[Job]()
        trials: dict[tuple[int, int], list[Job]] = {}
        for job in group:
            trials.setdefault((id(job.split), job.seed), []).append(job)
        for same_batches in trials.values():
            parts = _slices(same_batches, size)
            chunked += [part for part in parts if 2 * len(part) > size]
            rest += [job for part in parts if 2 * len(part) <= size for job in part]
        chunked += _slices(rest, size)
    return chunked


def _slices(jobs: list[Job], size: int) -> list[list[Job]]:
    return [jobs[first : first + size] for first in range(0, len(jobs), size)]


def chunk_heads(job: Job, device: torch.device) -> int:
    """Returns how many heads like this one train at once; `benchmarks/heads.py --chunks` measures other numbers."""
    rows = job.training.images_per_step(len(job.split.train))
    size = CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    return max(1, min(max_heads(device), size // (4 * rows * job.setup.width)))


def max_heads(device: torch.device) -> int:
    return CHUNK_HEADS if device.type == "cpu" else GPU_CHUNK_HEADS
