"""The loop that trains one model, encoder and head, end to end on Accelerate.

A step encodes its images once, or twice with sharpness. The random draws of a step are a function of the job's seed and
the step, so that the same seed, device type, process and thread count give the same weights, bit for bit on a CPU.
torch's global generator is reseeded at every step and not restored.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from xdm_ft.algorithms import Algorithm
from xdm_ft.encoders import Encoder
from xdm_ft.images.dataset import Augmentation, ImageDataset
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import Interrupted, deferred, stop_requested
from xdm_ft.runtime.machine import PeakMemory, keep_freed_memory
from xdm_ft.runtime.progress import Progress, unseen
from xdm_ft.runtime.randomness import Stream, bits
from xdm_ft.runtime.tensors import Annotations, Criteria
from xdm_ft.storage.checkpoint import Checkpoint
from xdm_ft.storage.digests import tensors_digest
from xdm_ft.training import Job, Record, Trained
from xdm_ft.training.averages import Averages
from xdm_ft.training.end_to_end.accelerated import prepared, refuse_unsupported
from xdm_ft.training.end_to_end.batch_norm import gather_statistics, synchronised
from xdm_ft.training.end_to_end.batches import StepBatch, TrainingBatches
from xdm_ft.training.end_to_end.gradients import StepGradients, StepLosses
from xdm_ft.training.end_to_end.inputs import Images
from xdm_ft.training.end_to_end.model import WHOLE, BatchNorm, EncoderPart, EndToEnd
from xdm_ft.training.end_to_end.optimizer import optimizer_of
from xdm_ft.training.end_to_end.prediction import inputs_of, predict
from xdm_ft.training.end_to_end.state import LoopState
from xdm_ft.training.end_to_end.unread import Read
from xdm_ft.training.end_to_end.validation import EndToEndValidation
from xdm_ft.training.schedule import learning_rate_factor
from xdm_ft.training.selection import Selector, evaluation_steps, external_values

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["predict", "train_model"]

logger = logging.getLogger("xdm_ft")
BROKEN_LOGITS = "logits on validation images are not finite"
STATISTICS_BATCHES = 500  # training batches that determine the batch-norm statistics of averaged weights
# steps in a row that fp16's gradient scaler may skip: each halves the scale, so 16 steps reduce it from 2^16 to 1
MOST_SKIPPED = 32


def train_model(
    job: Job,
    encoder: Encoder,
    dataset: ImageDataset,
    annotations: Annotations,
    criteria: Criteria,
    accelerator: Accelerator,
    *,
    batch_norm: BatchNorm,
    record: Record,
    bar: Progress | None = None,
    unfreeze_at: int = 0,
    augmentation: Augmentation = "none",
    checkpoint: Checkpoint | None = None,
    part: EncoderPart = WHOLE,
) -> Trained:
    """Trains a copy of `encoder`, from its present weights, with the job's method for `job.setup.steps` steps.

    `part` says how much of the encoder trains: all, what lies above a cut, or low-rank updates there.

    Images have the encoder's own preprocessing, in training with the `augmentation`. At each evaluation the main
    process calls `record(number of steps taken, [(job, values)])` with the means since the last evaluation of `loss`,
    `auxiliary_loss` and the algorithm's logs, the heads' learning rate `lr`, and `<rule>/<metric>` for each selection
    rule.

    Before step `unfreeze_at` only the head is trained, on features of the unchanged encoder in eval mode (LP-FT, Kumar
    et al. 2022); these steps can not be selected. One optimizer serves both phases: the encoder's parameters have no
    state in it before `unfreeze_at`.

    With a `checkpoint`, an interrupted training resumes from it; on a CPU the result is bit for bit that of a training
    without interruption. A signal to stop raises `Interrupted` in all processes after the same step.

    If loss or logits are not finite, or the first rule could select nothing, the result has a `failure` and no weights.
    Raises `UserError` for an image that does not decode, for fp16 with sharpness or without a GPU, for more
    micro-batches than a domain has images in a batch, and for a launch configuration that is not supported.
    """
    started, training = time.perf_counter(), job.training
    refuse_unsupported(job, accelerator)
    algorithm = job.make(job.setup)
    assert isinstance(algorithm, Algorithm), f"{job.method} trains no encoder"
    keep_freed_memory()
    memory = PeakMemory(accelerator.device)
    inner = EndToEnd(copy.deepcopy(encoder), algorithm, batch_norm, part.trainable, seed=job.seed)
    inner = inner.placed(accelerator.device).train()
    inner = synchronised(inner, accelerator.num_processes, training.accumulation, accelerator.device)
    if training.compile:
        inner.compile_encoding()
    images = Images(dataset, encoder.preprocessing, augmentation, accelerator)
    inputs = inputs_of(inner, part, images, accelerator)
    batches = TrainingBatches(job, inputs, annotations, accelerator)
    first_step = max(algorithm.first_selectable_step, unfreeze_at + 1)
    averages = Averages([job.averaging], first_step, job.setup.steps) if job.averaging else None
    reads_loss = job.averaging is not None and job.averaging.reads_loss
    validation = EndToEndValidation(
        job, inputs, annotations, criteria, batches.largest_part, accelerator, loss=reads_loss
    )
    selector = Selector(criteria, first_step, training.patience)
    roles = inner.roles()
    optimizer = optimizer_of(inner, training)
    state = LoopState(inner, roles, optimizer, selector, averages, accelerator, started=started)
    run = _Run(job, batches, validation, record, checkpoint)
    _resume(run, state, annotations)
    failure = _train(run, state, unfreeze_at, bar or unseen())
    selected = selector.selected
    if averages is None:
        failure = failure or selector.nothing_selected()
    elif failure is None:
        selected = averages.selected(0, lambda mean: _with_weights(mean, inner, run, accelerator), criteria.rules)
    return Trained(
        job=job,
        selected={} if failure else selected,
        mixed_steps=algorithm.mixed_steps(state.taken),
        seconds=state.seconds,
        failure=failure,
        course=selector.course,
        stopped_at=selector.stopped_at,
        restarts=() if checkpoint is None else tuple(checkpoint.restarts),
        parameters=sum(parameter.numel() for of_role in roles for parameter in of_role.values()),
        peak_memory=memory.peak,
    )


@dataclass(frozen=True)
class _Run:
    """The constants of one training."""

    job: Job
    batches: TrainingBatches
    validation: EndToEndValidation
    record: Record
    checkpoint: Checkpoint | None

    @property
    def name(self) -> str:
        return f"{self.job.method}, {', '.join(self.job.test_domains)} held out, seed {self.job.seed}"


def _resume(run: _Run, state: LoopState, annotations: Annotations) -> None:
    """Loads the checkpoint that an interrupted process has left of this training, if there is one, into `state`."""
    if run.checkpoint is None:
        return
    accelerator, split, images = state.accelerator, run.job.split, (annotations.labels, annotations.domains)
    saved = run.checkpoint.load(  # one that was written for other values of these is not used
        {
            "processes": accelerator.num_processes,
            "device": accelerator.device.type,
            "data": tensors_digest(dict(enumerate([*images, *split.train, *split.evaluation.values()]))),
            "weights": tensors_digest(state.inner.state_dict()),  # below a cut too
        }
    )
    if saved is not None:
        state.load_state(saved)
        logger.info("%s: resumes after %d of %d steps", run.name, state.taken, run.job.setup.steps)
    taken = accelerator.gather(torch.tensor([state.taken], device=accelerator.device))
    if (taken != state.taken).any():
        raise UserError(
            f"{run.checkpoint.path}: processes read different checkpoints; set output.dir to a shared folder"
        )


def _train(run: _Run, state: LoopState, unfreeze_at: int, bar: Progress) -> str | None:
    """Takes the remaining steps. Returns why the training failed; None if it did not."""
    steps = run.job.setup.steps
    with deferred(), closing(run.batches.begin(state.taken)) as batches:  # what reads ahead ends with the loop
        bar.skip(state.taken)
        if state.taken == 0:
            state.average()
        if not state.evaluated and not _evaluate(run, state):
            return _failure(BROKEN_LOGITS, run, state.taken)
        for frozen, last in ((True, unfreeze_at), (False, steps)):
            if state.taken >= last or state.selector.stopped_at is not None:
                continue
            state.inner.freeze_encoder(frozen)
            failure = _phase(run, state, islice(batches, last - state.taken), bar)
            if failure is not None:
                return failure
    return None


def _phase(run: _Run, state: LoopState, batches: Iterable[tuple[int, StepBatch]], bar: Progress) -> str | None:
    """Takes the steps of `batches`, which train the same parameters. Returns as `_train`."""
    steps = run.job.setup.steps
    evaluate_after = set(evaluation_steps(steps, run.job.training.evaluate_every))
    with prepared(state.inner, state.optimizer, state.accelerator) as (model, optimizer):
        algorithm = state.inner.algorithm
        by_parts = algorithm.loss_over != "batch" and algorithm.parts_add_up(run.job.training.sampler == "pooled")
        gradients = StepGradients(model, state.inner, state.accelerator, run.job.sharpness, run.job.seed, by_parts)
        note = ""
        for step, batch in batches:
            factor = learning_rate_factor(step, steps, run.job.training.schedule)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

            losses = _step(gradients, batch, optimizer, run.job.training.clip_norm, step)
            state.unread.add(step, losses, optimizer.step_was_skipped)
            state.taken, state.evaluated = step + 1, step + 1 not in evaluate_after
            state.average()
            for read in state.unread.read(all_of_them=not state.evaluated):
                failure = _checked(run, state, read)
                if failure is not None:
                    return failure
                note = f"loss {read.total:.3f}"
            if not state.evaluated and not _evaluate(run, state):
                return _failure(BROKEN_LOGITS, run, step + 1)
            if run.checkpoint is not None:
                run.checkpoint.save_if_due(state.state, event=step + 1 in evaluate_after)
            bar.advance(1, note)
            if state.selector.stopped_at is not None:
                return None
    if stop_requested():
        _save_and_stop(run, state, together=False)  # the signal has ended this process's loader workers
    return None


def _checked(run: _Run, state: LoopState, read: Read) -> str | None:
    """Records a step that the host has read. Returns as `_train`. Raises `Interrupted` if a process was asked to."""
    finite = math.isfinite(read.loss)
    state.skipped = 0 if finite and not read.skipped else state.skipped + 1
    if state.skipped > (0 if state.accelerator.scaler is None else MOST_SKIPPED):
        state.taken = read.step  # later steps continue from weights that are not finite
        what = "gradients are not finite" if finite else f"the loss is {read.loss}"
        return _failure(what, run, read.step + 1)
    if finite:
        state.means.add(read.step, {name: value[None] for name, value in read.scalars.items()})
    if read.stop:
        _save_and_stop(run, state)
    return None


def _save_and_stop(run: _Run, state: LoopState, together: bool = True) -> NoReturn:
    """Saves the checkpoint, if any, and raises `Interrupted`. `together`: all processes are at the same step."""
    if run.checkpoint is None:
        raise Interrupted
    run.checkpoint.save(state.state)
    if together:
        state.accelerator.wait_for_everyone()  # a launcher kills the other processes when the first one exits
    raise Interrupted(f"{run.name}: {state.taken} of {run.job.setup.steps} steps")


def _evaluate(run: _Run, state: LoopState) -> bool:
    """Evaluates, selects and records after the steps taken. Returns False if logits are not finite."""
    try:
        values = run.validation.evaluate(state.inner)
    except Interrupted:
        _save_and_stop(run, state)
    if values is None:
        return False
    taken, training = state.taken, run.job.training
    values |= external_values(run.job, taken)
    state.selector.offer(taken, values, state.inner.weights)
    if state.averages is not None:
        state.averages.evaluated(taken, [run.validation.loss])
    if state.accelerator.is_main_process:
        factor = learning_rate_factor(taken - 1, run.job.setup.steps, training.schedule)
        means = {name: float(mean) for name, mean in state.means.take()[0].items()}
        scores = {f"{rule}/{run.validation.metric}": value for rule, value in values.items()}
        run.record(taken, [(run.job, {**means, "lr": training.lr * factor, **scores})])
    state.evaluated = True
    return True


def _with_weights(mean: dict[str, Tensor], inner: EndToEnd, run: _Run, accelerator: Accelerator) -> dict[str, Tensor]:
    """Returns the model's weights with the averaged ones in them, and with batch-norm statistics of these weights."""
    with torch.no_grad():
        for name, parameter in inner.named_weights().items():
            if name in mean:
                parameter.copy_(mean[name])
    torch.manual_seed(int(bits(run.job.seed, run.job.setup.steps, Stream.ENCODER, accelerator.process_index)))
    inner.train()
    steps = (batch for _, batch in islice(run.batches.begin(), STATISTICS_BATCHES))
    gather_statistics(inner.encoder, inner.encode, steps, accelerator)
    return inner.weights()


def _step(
    gradients: StepGradients, batch: StepBatch, optimizer: Optimizer, clip_norm: float | None, step: int
) -> StepLosses:
    """Takes one step of the algorithm. Returns its losses, as means over its inner steps."""
    algorithm, taken = gradients.inner.algorithm, list[StepLosses]()

    def inner_step(domain: int | None) -> None:
        part = batch if domain is None else batch.block(domain, algorithm.task.num_domains)
        taken.append(gradients.run(part, step))
        if clip_norm is not None:
            gradients.accelerator.clip_grad_norm_(gradients.roles.main.values(), clip_norm)
        if algorithm.resets_optimizer(step):
            optimizer.state.clear()  # torch's optimizers initialise a state that is missing
        optimizer.step()
        optimizer.zero_grad()

    parameters = gradients.roles.main | gradients.roles.auxiliary
    algorithm.update(parameters, dict(algorithm.named_buffers()), inner_step, step)
    return StepLosses.mean(taken)


def _failure(what: str, run: _Run, taken: int) -> str:
    rows = ", ".join(map(str, run.batches.rows(taken - 1).tolist()))
    return f"{what} at step {taken} of {run.job.setup.steps}; images in its batch: rows {rows}"
