"""The head bank: many models on cached features, trained together.

Everything of H models of one method is stacked to [H,…]: parameters, buffers, batches, learning rates. A step of all of
them is one call of the algorithm's loss under `torch.func.vmap`. Heads never touch each other: head h of a bank equals
the same head trained alone to float32 rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from xdm_ft.algorithms import Algorithm
from xdm_ft.data.loading.samplers import sampler
from xdm_ft.interrupt import deferred, stop_requested
from xdm_ft.progress import Progress, progress
from xdm_ft.sharpness import Sharpness, Tensors
from xdm_ft.tensors import Batch, Losses
from xdm_ft.training import Job, Schedule, Trained, Training
from xdm_ft.training.allocator import keep_freed_memory
from xdm_ft.training.averages import LOSS_SPLIT, Averages
from xdm_ft.training.bank_state import ChunkState
from xdm_ft.training.batches import block
from xdm_ft.training.cached_data import CachedData, Validation, batches, head_logits
from xdm_ft.training.checkpoint import Checkpoint
from xdm_ft.training.inputs import fields_of, on_inputs
from xdm_ft.training.optimizers import Optimizer, clip, make_optimizer
from xdm_ft.training.schedule import learning_rate_factor
from xdm_ft.training.selection import Selector, evaluation_steps, known_values

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features

__all__ = ["Bank", "chunks", "head_logits", "stack", "step", "train_bank"]

CHUNK_HEADS = 32  # heads trained at once: fewer share the cost of a step, more leave less for other processes …
CHUNK_BYTES = 32 << 20  # … and the features of a step beyond this, which `allocator` can not keep, cost page faults

STACKED = {"lr", "encoder_lr", "weight_decay", "momentum"}
"""Keys of `training` in which heads of a chunk may differ; encoder_lr means nothing to them."""

Record = Callable[[Job, int, dict[str, float]], None]


@dataclass
class Bank:
    """H models of one method, stacked: every tensor is [H,…]."""

    template: Algorithm  # lends its code; its own parameters are never used
    main: Tensors  # parameters that `Losses.total` trains
    auxiliary: Tensors  # parameters that `Losses.auxiliary` trains
    buffers: Tensors
    lr: Tensor
    optimizer: Optimizer
    sharpness: Sharpness | None
    rho: Tensor  # of `sharpness`
    clip_norm: float | None
    schedule: Schedule
    steps: int

    def state(self, head: int) -> Tensors:
        """Parameters and buffers of one model, on the CPU."""
        stacked = {**self.main, **self.auxiliary, **self.buffers}
        return {name: values[head].detach().to("cpu", copy=True) for name, values in stacked.items()}


def train_bank(
    jobs: Sequence[Job],
    features: Features,
    labels: Tensor,
    domains: Tensor,
    training: Training,
    rules: Sequence[str],
    metric: str,
    *,
    record: Record,
    show: bool,
    worst_of: Tensor | None = None,
    place: str = "",
    checkpoint: Callable[[Sequence[Job]], Checkpoint] | None = None,
) -> Iterator[Trained]:
    """Trains the jobs, chunk by chunk; results come in the order of `chunks`. `place` is said of each in its progress.

    With `checkpoint`, that of a chunk, an interrupted chunk goes on where it was saved, on a CPU bit for bit as if
    nothing had been; a signal to stop then raises `Interrupted` after the step.

    `labels` and `domains` are int64 [N], domains numbered as in the data set; `worst_of` int64 [N] is what
    worst_domain_accuracy looks at (−1: left out), None: the domains. At each evaluation `record(job, number of
    steps taken, values)` is given the means since the last one of `loss`, `auxiliary_loss` and what the algorithm logs,
    the learning rate `lr`, and `<rule>/<metric>` for each selection rule.

    A model whose loss or logits are not finite, or of which the first rule could select nothing, comes with a `failure`
    and without weights; the other heads are not disturbed. `seconds` is a head's share of its chunk's time.
    """
    keep_freed_memory()
    device = features.device
    groups = None if worst_of is None else worst_of.to(device)
    data = CachedData(features, labels.to(device), domains.to(device), groups)
    with progress(f"{jobs[0].method}{place}", sum(job.setup.steps for job in jobs), "head-steps", show) as bar:
        for chunk in chunks(jobs, training):
            kept = checkpoint(chunk) if checkpoint is not None else None
            yield from _train_chunk(chunk, data, chunk[0].own(training), rules, metric, record, bar, kept)
            if kept is not None:
                kept.remove()  # whoever asks for the next model has kept these


def chunks(jobs: Sequence[Job], training: Training) -> list[list[Job]]:
    """Jobs whose tensors stack, `chunk_heads` at a time: a function of the jobs, never of who trains them.

    They have the same number of training domains, the same steps, and the same settings but for what is stacked and
    those of averaging.
    """
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        settings = (_settings(_algorithm(job)), _settings(job.sharpness))
        shared = job.own(training).model_dump_json(exclude=STACKED)
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
        size = chunk_heads(group[0], group[0].own(training))
        cut += [group[first : first + size] for first in range(0, len(group), size)]
    return cut


def chunk_heads(job: Job, training: Training) -> int:
    """How many heads like this one train at once; `benchmarks/heads.py --chunks` measures it."""
    rows = training.images_per_step(len(job.split.train))
    return max(1, min(CHUNK_HEADS, CHUNK_BYTES // (4 * rows * job.setup.width)))


def _train_chunk(
    jobs: list[Job],
    data: CachedData,
    training: Training,
    rules: Sequence[str],
    metric: str,
    record: Record,
    bar: Progress,
    checkpoint: Checkpoint | None,
) -> list[Trained]:
    started = time.perf_counter()
    bank = stack(jobs, training, data.features.device)
    averages, validation_loss = _averages(jobs, bank, data)
    first_step = bank.template.first_selectable_step
    selectors = [Selector(rules, metric, first_step, training.patience) for _ in jobs]
    state = ChunkState(jobs, bank, selectors, averages, [None for _ in jobs], started=started)
    if checkpoint is not None:
        state.go_on(checkpoint, data)
    bar.skip(len(jobs) * state.taken)
    validation = Validation(jobs, data, rules, metric)
    due = set(evaluation_steps(bank.steps, training.evaluate_every))
    with deferred():
        for number, batch in enumerate(batches(jobs, data, training, state.taken), start=state.taken):
            state.course.add(number, step(bank, batch, number))
            if averages is not None:
                averages.add(number + 1, bank.main | bank.auxiliary)
            bar.advance(len(jobs))
            if number + 1 in due:
                _evaluate(state, training, data, validation, number + 1, record)
                if averages is not None:
                    losses = _losses_to_average_by(validation_loss, bank)
                    averages.evaluated(number + 1, losses, ended=state.stopped_before(number + 1))
                if state.ended:
                    break
            state.taken = number + 1
            if stop_requested():
                state.leave(checkpoint)
            if checkpoint is not None:
                checkpoint.save_if_due(state.state, event=number + 1 in due)
    return state.results(rules)


def _evaluate(
    state: ChunkState, training: Training, data: CachedData, validation: Validation, taken: int, record: Record
) -> None:
    """The evaluation after `taken` steps, of every head that has neither failed nor stopped."""
    bank, jobs, failures, metric = state.bank, state.jobs, state.failures, validation.metric
    means, broken_at = state.course.take()
    lr = bank.lr * learning_rate_factor(taken - 1, bank.steps, bank.schedule)
    for head, values in enumerate(validation.values(bank.main["head.weight"], bank.main["head.bias"])):
        if failures[head] is not None or state.selectors[head].stopped_at is not None:
            continue
        failures[head] = _failure(jobs[head], training, data, taken, broken_at.get(head), values)
        if failures[head] is None and values is not None:
            values |= known_values(jobs[head], taken)
            state.selectors[head].offer(taken, values, lambda head=head: bank.state(head))  # type: ignore[misc]
            scalars = {name: float(mean[head]) for name, mean in means.items()} | {"lr": float(lr[head])}
            record(jobs[head], taken, scalars | {f"{rule}/{metric}": v for rule, v in values.items()})


def _averages(jobs: list[Job], bank: Bank, data: CachedData) -> tuple[Averages | None, Validation | None]:
    """Where the method asks for an average: it, and the losses that it looks at."""
    averagings = [job.averaging for job in jobs if job.averaging is not None]
    if not averagings:
        return None, None
    assert len(averagings) == len(jobs), "a bank has one kind of averaging"
    averages = Averages(averagings, bank.template.first_selectable_step)
    return averages, Validation(jobs, data, (LOSS_SPLIT,), "nll") if averagings[0].reads_loss else None


def _losses_to_average_by(validation: Validation | None, bank: Bank) -> list[float | None]:
    """The validation loss of every head; None where its logits are not finite, nan where no average looks at it."""
    if validation is None:
        return [math.nan] * len(bank.lr)
    values = validation.values(bank.main["head.weight"], bank.main["head.bias"])
    return [None if of_head is None else of_head[LOSS_SPLIT] for of_head in values]


def step(bank: Bank, batch: Batch, number: int) -> Tensors:
    """One step of every head on its own batch ([H,B,…]), `number` counted from 0.

    Returns the scalars before the step, each [H]: `loss`, `auxiliary_loss` where there is one, the algorithm's logs;
    their means where the algorithm takes several steps of the optimizer.
    """
    taken: list[Tensors] = []

    def inner_step(domain: int | None) -> None:
        part = batch if domain is None else block(batch, domain, bank.template.task.num_domains, axis=1)
        taken.append(_inner_step(bank, part, number))

    bank.template.update(bank.main | bank.auxiliary, inner_step, number)
    if len(taken) == 1:
        return taken[0]
    return {name: torch.stack([scalars[name] for scalars in taken]).mean(0) for name in taken[0]}


def _inner_step(bank: Bank, batch: Batch, number: int) -> Tensors:
    """One step of the optimizer on `batch`; the scalars before it."""
    batch = on_inputs(bank.template, bank.buffers, batch, number)
    losses = _losses(bank, bank.main, batch, number, held=None)
    # total and auxiliary reach different parameters, so one backward pass serves both
    every_gradient = _gradients(losses.total + losses.auxiliary, bank.main | bank.auxiliary)
    gradients = {name: every_gradient.pop(name) for name in bank.main}
    if bank.sharpness is not None:
        centre = {name: parameter.detach() for name, parameter in bank.main.items()}
        offset = vmap(bank.sharpness.offset)(centre, gradients, bank.rho)
        perturbed = {name: (centre[name] + offset[name]).requires_grad_() for name in centre}
        second = _losses(bank, perturbed, batch, number, losses.held)
        gradients = vmap(bank.sharpness.combine)(gradients, _gradients(second.total, perturbed))
    if bank.clip_norm is not None:
        gradients = clip(gradients, bank.clip_norm)
    if bank.template.resets_optimizer(number):
        bank.optimizer.reset()
    factor = learning_rate_factor(number, bank.steps, bank.schedule)
    bank.optimizer.step(bank.main | bank.auxiliary, gradients | every_gradient, factor)
    bank.buffers |= {name: value.detach() for name, value in losses.buffers.items()}
    scalars = {**losses.logs, "loss": losses.total}
    if bank.auxiliary:
        scalars["auxiliary_loss"] = losses.auxiliary
    return {name: value.detach() for name, value in scalars.items()}


def _losses(bank: Bank, main: Tensors, batch: Batch, number: int, held: Tensors | None) -> Losses:
    """The losses of every head with the parameters `main`; scalars become [H]."""

    def of_one_head(state: Tensors, fields: Tensors, held: Tensors) -> Losses:
        return functional_call(bank.template, state, (fields["x"], Batch(**fields), number, held or None))

    losses: Losses = vmap(of_one_head)({**main, **bank.auxiliary, **bank.buffers}, fields_of(batch), held or {})
    return losses


def _gradients(losses: Tensor, parameters: Tensors) -> Tensors:
    """Every head's gradient of its own loss (losses [H]): that of the sum, as heads are independent."""
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def stack(jobs: Sequence[Job], training: Training, device: torch.device) -> Bank:
    """A bank of freshly initialised models, one per job."""
    models = [_algorithm(job).to(device) for job in jobs]
    template, sharpness = models[0], jobs[0].sharpness
    assert all(_settings(model) == _settings(template) for model in models), "settings that differ must be buffers"
    assert all(_settings(job.sharpness) == _settings(sharpness) for job in jobs), "a bank has one kind of sharpness"
    stacked, buffers = stack_module_state(models)
    is_auxiliary = {name: name.split(".")[0] in template.auxiliary for name in stacked}
    lr = torch.tensor([job.lr for job in jobs], device=device)
    weight_decay = torch.tensor([job.weight_decay for job in jobs], device=device)
    momentum = torch.tensor([job.own(training).momentum for job in jobs], device=device)
    rho = torch.tensor([job.sharpness.rho if job.sharpness else 0.0 for job in jobs], device=device)
    return Bank(
        template=template,
        main={name: value for name, value in stacked.items() if not is_auxiliary[name]},
        auxiliary={name: value for name, value in stacked.items() if is_auxiliary[name]},
        buffers=buffers,
        lr=lr,
        optimizer=make_optimizer(
            training.optimizer, stacked, lr, weight_decay, momentum, (training.beta1, training.beta2), training.amsgrad
        ),
        sharpness=sharpness,
        rho=rho,
        clip_norm=training.clip_norm,
        schedule=training.schedule,
        steps=jobs[0].setup.steps,
    )


def _algorithm(job: Job) -> Algorithm:
    model = job.make(job.setup)
    assert isinstance(model, Algorithm)
    return model


def _settings(model: Algorithm | Sharpness | None) -> dict[str, object]:
    """What all heads must share: the class and its plain attributes, as against what is stacked."""
    own = {} if model is None else vars(model)
    plain = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str | tuple)}
    return {**plain, "rho": None, "class": type(model)}


def _failure(
    job: Job,
    training: Training,
    data: CachedData,
    taken: int,
    broken_at: int | None,
    values: Mapping[str, float] | None,
) -> str | None:
    """Why a head failed by the evaluation after `taken` steps; None where it did not."""
    if broken_at is not None:
        own = sampler(training.sampler, job.split.train, training.batch_size, job.seed, data.labels)
        rows = ", ".join(str(row) for row in own.indices(broken_at, broken_at + 1)[0].tolist())
        return f"the loss was not finite at step {broken_at + 1} of {job.setup.steps}; rows of its batch: {rows}"
    if values is None:
        return f"the logits of the validation images were not finite after step {taken} of {job.setup.steps}"
    return None
