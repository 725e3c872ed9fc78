"""The loop that trains one model, encoder and head, end to end on Accelerate.

A step encodes its images once, or twice with sharpness. The random draws of a step are a function of the job's seed and
the step, so that the same seed, device type, process and thread count give the same weights, bit for bit on a CPU.
torch's global generator is reseeded at every step and not restored.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xdm_ft.core import Annotations, Criteria
from xdm_ft.encoders import Encoder
from xdm_ft.images import ImageDataset
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import Interrupted, deferred, stop_requested
from xdm_ft.runtime.machine import PeakMemory, retain_freed_memory
from xdm_ft.runtime.progress import Progress, unseen
from xdm_ft.runtime.randomness import Stream, bits
from xdm_ft.storage import tensors_digest
from xdm_ft.storage.checkpoint import Checkpoint, State
from xdm_ft.training import Job, ScalarSink, Selected, Trained
from xdm_ft.training.end_to_end.batch_norm import gather_statistics, synchronise
from xdm_ft.training.end_to_end.gradients import StepGradients, StepLosses
from xdm_ft.training.end_to_end.inputs import ImageInputs, Inputs, StepBatch, TrainingBatches
from xdm_ft.training.end_to_end.model import FULL_ENCODER, BatchNorm, EncoderPart, EndToEnd, optimizer_of
from xdm_ft.training.end_to_end.prediction import EndToEndValidation, inputs_of
from xdm_ft.training.selection import Averages, Selector, evaluation_steps, external_values
from xdm_ft.training.state import TrainingState

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

BROKEN_LOGITS = "logits on validation images are not finite"
STATISTICS_BATCHES = 500  # training batches that determine the batch-norm statistics of averaged weights
# steps in a row that fp16's gradient scaler may skip: each halves the scale, so 16 steps reduce it from 2^16 to 1
MAX_SKIPPED = 32
AHEAD = 2  # steps that a GPU has in its queue: with fewer it waits for the host between them


def train_model(
    job: Job,
    encoder: Encoder,
    dataset: ImageDataset,
    annotations: Annotations,
    criteria: Criteria,
    accelerator: Accelerator,
    *,
    batch_norm: BatchNorm,
    record: ScalarSink,
    bar: Progress | None = None,
    unfreeze_at: int = 0,
    checkpoint: Checkpoint | None = None,
    part: EncoderPart = FULL_ENCODER,
) -> Trained:
    """Trains a copy of `encoder`, from its present weights, with the job's method for `job.setup.steps` steps.

    `part` says how much of the encoder trains: all, what lies above a cut, or low-rank updates there.

    Images have the encoder's own preprocessing, in training with the job's augmentations. At each evaluation the main
    process calls `record(number of steps taken, [(job, values)])` with the means since the last evaluation of `loss`,
    `auxiliary_loss` and the algorithm's logs, the heads' learning rate `lr`, and `<rule>/<metric>` for each selection
    rule.

    Before step `unfreeze_at` only the head is trained, on features of the unchanged encoder in eval mode (LP-FT, Kumar
    et al. 2022); these steps cannot be selected. One optimizer serves both phases: the encoder's parameters have no
    state in it before `unfreeze_at`.

    With a `checkpoint`, an interrupted training resumes from it; on a CPU the result is bit for bit that of a training
    without interruption. A signal to stop raises `Interrupted` in all processes after the same step.

    If loss or logits are not finite, or the first rule could select nothing, the result has a `failure` and no weights.
    Raises `UserError` for an image that does not decode, for fp16 with sharpness or without a GPU, for more
    micro-batches than a domain has images in a batch, and for a launch configuration that is not supported.
    """
    started, training = time.perf_counter(), job.training
    _refuse_unsupported(job, accelerator)
    algorithm = job.new_algorithm()
    retain_freed_memory()
    memory = PeakMemory(accelerator.device)
    inner = EndToEnd(
        copy.deepcopy(encoder), algorithm, batch_norm, part.trainable, seed=job.seed, normalized=job.normalized
    )
    inner = inner.placed(accelerator.device).train()
    inner = synchronise(inner, accelerator.num_processes, training.accumulation, accelerator.device)
    if training.compile:
        inner.compile_encoding()
    images = ImageInputs(dataset, encoder.preprocessing, job.augmentations, accelerator)
    inputs = inputs_of(inner, part, images, accelerator)
    loop = _Loop(job, inner, inputs, annotations, criteria, accelerator, unfreeze_at, checkpoint, started)
    loop.resume()
    failure = loop.take_steps(record, bar or unseen())
    selected = loop.selector.selected
    if loop.averages is None:
        failure = failure or loop.selector.failure()
    elif failure is None:
        selected = dict.fromkeys(criteria.rules, loop.selected_average())
    return Trained(
        job=job,
        selected={} if failure else selected,
        mixed_steps=algorithm.mixed_steps(loop.taken),
        seconds=loop.seconds,
        failure=failure,
        course=loop.selector.course,
        stopped_at=loop.selector.stopped_at,
        restarts=loop.restarts,
        parameters=sum(parameter.numel() for of_role in loop.roles for parameter in of_role.values()),
        peak_memory=memory.peak,
    )


class _Loop(TrainingState):
    """The training of one model. Its state is the same in every process: one writes it, and each resumes from it."""

    def __init__(
        self,
        job: Job,
        inner: EndToEnd,
        inputs: Inputs,
        annotations: Annotations,
        criteria: Criteria,
        accelerator: Accelerator,
        unfreeze_at: int,
        checkpoint: Checkpoint | None,
        started: float,
    ) -> None:
        self.job, self.inner, self.annotations, self.accelerator = job, inner, annotations, accelerator
        self.unfreeze_at, steps, device = unfreeze_at, job.setup.steps, accelerator.device
        first_step = max(inner.algorithm.first_selectable_step, unfreeze_at + 1)
        self.selector = Selector(criteria, first_step, job.training.patience)
        averages = Averages([job.averaging], first_step, steps) if job.averaging else None
        name = f"{job.method}, {', '.join(job.test_domains)} held out, seed {job.seed}"
        super().__init__(name, steps, [self.selector], averages, device, checkpoint, started)
        self.batches = TrainingBatches(job, inputs, annotations, accelerator)
        # evaluations read batches of the size of a part, which training has room for
        largest_part = max(map(len, self.batches.positions(self.batches.rows(0))[accelerator.process_index]))
        reads_loss = job.averaging is not None and job.averaging.reads_loss
        self.validation = EndToEndValidation(
            job, inputs, annotations, criteria, largest_part, accelerator, loss=reads_loss
        )
        self.roles = inner.roles()  # of all parameters that some step trains
        self.optimizer = optimizer_of(inner, job.training)
        self.pending = PendingScalars(device)
        self.is_evaluated = True  # False: an evaluation is due after the steps taken and not done
        self.skipped = 0  # steps in a row that the gradient scaler skipped, as a loss or gradient was not finite
        if accelerator.scaler is not None:
            # one scaler serves all models of a process: reset it, so that no model depends on those before it
            accelerator.scaler.load_state_dict(torch.amp.GradScaler(device.type).state_dict())

    def take_steps(self, record: ScalarSink, bar: Progress) -> str | None:
        """Takes the remaining steps. Returns why the training failed; None if it did not."""
        job, inner, training = self.job, self.inner, self.job.training
        evaluate_after = set(evaluation_steps(self.steps, training.evaluate_every))
        by_parts = inner.algorithm.loss_over != "batch" and inner.algorithm.parts_add_up(training.sampler == "pooled")
        note = ""
        with deferred(), closing(self.batches.begin(self.taken)) as batches:  # what reads ahead ends with the loop
            bar.skip(self.taken)
            if self.taken == 0:
                self._average()
            if not self.is_evaluated and not self._evaluate(record):
                return self._failure(BROKEN_LOGITS, self.taken)
            for frozen, last in ((True, self.unfreeze_at), (False, self.steps)):
                if self.taken >= last or self.selector.stopped_at is not None:
                    continue
                inner.freeze_encoder(frozen)
                # DDP takes the parameters that train when it wraps the model, so each phase wraps it anew
                with _prepare(inner, self.optimizer, self.accelerator) as (model, optimizer):
                    gradients = StepGradients(model, inner, self.accelerator, job.sharpness, job.seed, by_parts)
                    for step, batch in islice(batches, last - self.taken):
                        factor = training.schedule.factor(step, self.steps)
                        losses = take_step(gradients, optimizer, batch, step, factor, training.clip_norm)
                        self.pending.add(step, losses, optimizer.step_was_skipped)
                        self.taken, self.is_evaluated = step + 1, step + 1 not in evaluate_after
                        self._average()
                        for scalars in self.pending.read(all_of_them=not self.is_evaluated):
                            if (failure := self._check(scalars)) is not None:
                                return failure
                            note = f"loss {scalars.total:.3f}"
                        if not self.is_evaluated and not self._evaluate(record):
                            return self._failure(BROKEN_LOGITS, step + 1)
                        self.save_if_due(event=step + 1 in evaluate_after)
                        bar.advance(1, note)
                        if self.selector.stopped_at is not None:
                            break
                    else:
                        if stop_requested():
                            self.save_and_stop()  # without waiting: the signal has ended this process's loader workers
        return None

    def _average(self) -> None:
        """Adds the weights after the steps taken to the model's average, if it has one."""
        if self.averages is not None:
            trained = self.roles.main | self.roles.auxiliary
            self.averages.add(self.taken, {name: parameter[None] for name, parameter in trained.items()})

    def _check(self, scalars: StepScalars) -> str | None:
        """Records a step that the host has read. Returns as `take_steps`. Raises `Interrupted` after a signal."""
        finite = math.isfinite(scalars.loss)
        self.skipped = 0 if finite and not scalars.skipped else self.skipped + 1
        if self.skipped > (0 if self.accelerator.scaler is None else MAX_SKIPPED):
            self.taken = scalars.step  # later steps continue from weights that are not finite
            problem = "gradients are not finite" if finite else f"the loss is {scalars.loss}"
            return self._failure(problem, scalars.step + 1)
        if finite:
            self.means.add(scalars.step, {name: value[None] for name, value in scalars.recorded.items()})
        if scalars.stop:
            self._stop_together()
        return None

    def _stop_together(self) -> NoReturn:
        """Saves and raises `Interrupted` in all processes, which are at the same step."""
        # a launcher kills the other processes when the first one exits
        self.save_and_stop(self.accelerator.wait_for_everyone)

    def _evaluate(self, record: ScalarSink) -> bool:
        """Evaluates, selects and records after the steps taken. Returns False if logits are not finite."""
        try:
            values = self.validation.evaluate(self.inner)
        except Interrupted:
            self._stop_together()
        if values is None:
            return False
        training = self.job.training
        values |= external_values(self.job, self.taken)
        self.selector.offer(self.taken, values, self.inner.weights)
        if self.averages is not None:
            self.averages.evaluated(self.taken, [self.validation.loss])
        if self.accelerator.is_main_process:
            lr = training.lr * training.schedule.factor(self.taken - 1, self.steps)
            means = {name: float(mean) for name, mean in self.means.take()[0].items()}
            scores = {f"{rule}/{self.validation.metric}": value for rule, value in values.items()}
            record(self.taken, [(self.job, {**means, "lr": lr, **scores})])
        self.is_evaluated = True
        return True

    def _failure(self, problem: str, taken: int) -> str:
        rows = ", ".join(map(str, self.batches.rows(taken - 1).tolist()))
        return f"{problem} at step {taken} of {self.steps}; images in its batch: rows {rows}"

    def selected_average(self) -> Selected:
        """Returns the averaged weights, with batch-norm statistics of them, and leaves them in the model."""
        assert self.averages is not None
        inner, accelerator, average = self.inner, self.accelerator, self.averages.selected(0)
        with torch.no_grad():
            for name, parameter in inner.named_weights().items():
                if name in average.state:
                    parameter.copy_(average.state[name])
        # dropout draws in training mode, and a resumed training must get the same statistics
        torch.manual_seed(int(bits(self.job.seed, self.steps, Stream.ENCODER, accelerator.process_index)))
        inner.train()
        batches = (batch for _, batch in islice(self.batches.begin(), STATISTICS_BATCHES))
        gather_statistics(inner.encoder, inner.encode, batches, accelerator)
        return replace(average, state=inner.weights())

    def resume(self) -> None:
        super().resume()
        if self.checkpoint is not None:
            taken = self.accelerator.gather(torch.tensor([self.taken], device=self.accelerator.device))
            if (taken != self.taken).any():
                raise UserError(
                    f"{self.checkpoint.path}: processes read different checkpoints; set output.dir to a shared folder"
                )

    def _settings(self) -> dict[str, Any]:
        split, annotations = self.job.split, self.annotations
        data = [annotations.labels, annotations.domains, *split.train, *split.evaluation.values()]
        return {
            "layout": 2,  # of `state`; raise it when it changes
            "processes": self.accelerator.num_processes,
            "device": self.device.type,
            "data": tensors_digest(dict(enumerate(data))),
            "weights": tensors_digest(self.inner.state_dict()),  # below a cut too
        }

    def state(self) -> State:
        scaler = self.accelerator.scaler
        return super().state() | {
            "evaluated": self.is_evaluated,
            "skipped": self.skipped,
            "weights": self.inner.named_weights(),
            # without the groups: their learning rates follow from the recipe and the step
            "optimizer": self.optimizer.state_dict()["state"],
            "scaler": None if scaler is None else scaler.state_dict(),
            "pending": self.pending.state(),
        }

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self.inner.load_weights(state["weights"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.pending.load_state(state["pending"])
        self.is_evaluated, self.skipped = state["evaluated"], state["skipped"]


def take_step(
    gradients: StepGradients,
    optimizer: AcceleratedOptimizer,
    batch: StepBatch,
    step: int,
    factor: float,
    clip_norm: float | None,
) -> StepLosses:
    """Takes one step with `factor` × the learning rates. Returns its losses, as means over the inner steps."""
    algorithm, roles, inner_steps = gradients.algorithm, gradients.roles, list[StepLosses]()
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    for domain in algorithm.update(roles.main | roles.auxiliary, dict(algorithm.named_buffers()), step):
        part = batch if domain is None else batch.block(domain, algorithm.task.num_domains)
        inner_steps.append(gradients.run(part, step))
        if clip_norm is not None:
            gradients.accelerator.clip_grad_norm_(roles.main.values(), clip_norm)
        if algorithm.resets_optimizer(step):
            optimizer.state.clear()  # torch's optimizers initialise a state that is missing
        optimizer.step()
        optimizer.zero_grad()
    return StepLosses.mean(inner_steps)


class StepScalars(NamedTuple):
    """A step, as the host knows it."""

    step: int
    total: float  # `Losses.total`
    loss: float  # the sum of all losses: finite only if each of them is
    stop: bool  # whether a process has received a signal to stop
    skipped: bool  # whether the gradient scaler has skipped its update
    recorded: dict[str, Tensor]  # on the device


class PendingScalars:
    """The scalars of the last steps, which the host reads some steps later, in order.

    On a GPU the host only queues work. A `float(loss)` would make it wait until the whole queue is done, and then the
    GPU until the host has queued the next step. So the loss of a step, and whether a process was asked to stop, are
    copied to the host's memory as part of the queue, and read when AHEAD more steps are queued. Every process reads the
    same values after the same step, so that all of them end at the same step. On a CPU each step is read at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.ahead = AHEAD if device.type == "cuda" else 0
        self._steps: deque[tuple[int, Tensor, bool, dict[str, Tensor], torch.cuda.Event | None]] = deque()

    def add(self, step: int, losses: StepLosses, skipped: bool) -> None:
        """Adds the last step, and begins to copy its scalars to the host."""
        values = torch.stack([losses.total, losses.loss, losses.stop]).to("cpu", non_blocking=True)
        copied = None
        if losses.total.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._steps.append((step, values, skipped, losses.scalars, copied))

    def read(self, all_of_them: bool) -> Iterator[StepScalars]:
        """Yields and forgets the oldest steps: all but the last `ahead`, or all, for which the host waits."""
        while len(self._steps) > (0 if all_of_them else self.ahead):
            step, values, skipped, recorded, copied = self._steps.popleft()
            if copied is not None:
                copied.synchronize()
            total, loss, stop = values.tolist()
            yield StepScalars(step, total, loss, stop > 0, skipped, recorded)

    def state(self) -> list[Any]:
        """Returns the steps as a checkpoint stores them; the host waits for their scalars."""
        for *_, copied in self._steps:
            if copied is not None:
                copied.synchronize()
        return [list(step[:4]) for step in self._steps]

    def load_state(self, state: list[Any]) -> None:
        self._steps = deque((step, values, skipped, recorded, None) for step, values, skipped, recorded in state)


def _refuse_unsupported(job: Job, accelerator: Accelerator) -> None:
    """Raises `UserError` for a launch configuration that cannot train this model."""
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UserError(f"accelerate: {kind} is not supported for training end to end; launch without it")
    if accelerator.gradient_accumulation_steps != 1:
        # Accelerate would divide the losses by it
        raise UserError("accelerate: gradient_accumulation_steps must be 1; set training.accumulation instead")
    if accelerator.mixed_precision == "fp16" and job.sharpness is not None:
        # the gradient scaler would leave the second pass scaled
        raise UserError(
            f"training.mixed_precision: fp16 does not support the two passes of {job.method}; use bf16 or no"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        # without a GPU Accelerate would silently compute in float32
        raise UserError("training.mixed_precision: fp16 needs a GPU, and this process runs on the CPU; use bf16 or no")


@contextmanager
def _prepare(
    inner: EndToEnd, optimizer: Optimizer, accelerator: Accelerator
) -> Iterator[tuple[nn.Module, AcceleratedOptimizer]]:
    """Context that yields the model and its optimizer as Accelerate prepares them."""
    prepared = accelerator.prepare(inner, optimizer)
    try:
        yield prepared
    finally:
        # otherwise a second phase would wrap the forward pass in autocast twice
        accelerator.unwrap_model(prepared[0], keep_fp32_wrapper=False)
        accelerator.free_memory()


def shut_down(accelerator: Accelerator) -> None:
    """Frees Accelerate's resources; every process calls it at the end of a run."""
    # in another order a rank sometimes aborts at exit
    accelerator.free_memory()
    gc.collect()
    accelerator.wait_for_everyone()
    accelerator.end_training()
