"""The loop: one model, encoder and head, trained end to end on Accelerate.

A step encodes its images once (twice with sharpness). What a step draws is a function of the job's seed and the step,
so the same seed, device type, process and thread count give the same weights, bit for bit on a CPU. torch's global
generator is reseeded at every step and not put back.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from xdm_ft.algorithms import Algorithm
from xdm_ft.data import Augmentation, ImageDataset
from xdm_ft.data.loading.samplers import ImageRows
from xdm_ft.data.loading.transforms import evaluation_transform, training_transform
from xdm_ft.encoders import Encoder
from xdm_ft.errors import UserError
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.progress import Progress, progress
from xdm_ft.randomness import Stream, bits
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.averages import LOSS_SPLIT, Averages
from xdm_ft.training.batch_norm import gather_statistics
from xdm_ft.training.batches import MicroBatch, TrainingBatches, block
from xdm_ft.training.passes import BatchNorm, EndToEnd, Passes, Roles, StepLosses
from xdm_ft.training.prediction import EvaluationImages, precision_of, predict
from xdm_ft.training.schedule import learning_rate_factor
from xdm_ft.training.selection import Selector, evaluation_steps, known_values, rows_of_rules

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["predict", "shut_down", "train_model"]

Record = Callable[[Job, int, dict[str, float]], None]
STATISTICS_BATCHES = 500  # of training, over which the batch-norm statistics of averaged weights are gathered


def train_model(
    job: Job,
    encoder: Encoder,
    dataset: ImageDataset,
    labels: Tensor,
    domains: Tensor,
    training: Training,
    rules: Sequence[str],
    metric: str,
    batch_norm: BatchNorm,
    accelerator: Accelerator,
    *,
    record: Record,
    show: bool,
    unfreeze_at: int = 0,
    augmentation: Augmentation = "none",
    worst_of: Tensor | None = None,
) -> Trained:
    """Trains a copy of `encoder`, from the weights it has now, with the job's method for `job.setup.steps` steps.

    `labels` and `domains` are int64 [N], domains numbered as in the data set; `worst_of` as for `train_bank`. Images
    come in the encoder's own preprocessing, in training with the `augmentation`. At each evaluation the main process
    calls `record(job, number of steps taken, values)` with the means since the last one of `loss`, `auxiliary_loss` and
    what the algorithm logs, the heads' learning rate `lr`, and `<rule>/<metric>` for each selection rule.

    Before step `unfreeze_at` the head trains alone, on features of the encoder in eval mode, which stays as it came
    (LP-FT, Kumar et al. 2022); those steps can not be selected. One optimizer serves both phases: the encoder's state
    in it begins when its training does.

    A model whose loss or logits are not finite, or for which the first rule could select nothing, comes with `failure`
    and without weights. Raises `UserError` for an image that does not decode, for fp16 with sharpness or without a GPU,
    for more micro-batches than a domain has images in a batch, and for what of Accelerate is not supported.
    """
    started = time.perf_counter()
    _refuse_unsupported(job, accelerator)
    algorithm = job.make(job.setup)
    assert isinstance(algorithm, Algorithm), f"{job.method} trains no encoder"
    inner = EndToEnd(copy.deepcopy(encoder), algorithm, batch_norm).to(accelerator.device).train()
    images = ImageRows(dataset, evaluation_transform(encoder.preprocessing))
    training_images = ImageRows(dataset, training_transform(encoder.preprocessing, augmentation))
    together = algorithm.across_processes
    batches = TrainingBatches(job, training, training_images, labels, domains, accelerator, together=together)
    first_step = max(algorithm.first_selectable_step, unfreeze_at + 1)
    averages = Averages(job.averaging, 1, first_step) if job.averaging else None
    seen = rules if averages is None else list(dict.fromkeys([*rules, LOSS_SPLIT]))
    groups = domains if worst_of is None else worst_of
    validation = Validation(job, images, labels, groups, seen, metric, max(batches.sizes), accelerator)
    run = _Run(job, training, batches, validation, Selector(rules, metric, first_step), averages, record)
    failure = _train(run, inner, accelerator, unfreeze_at, show)
    selected = run.selector.selected
    if averages is None:
        failure = failure or run.selector.nothing_selected()
    elif failure is None:
        selected = averages.selected(0, lambda mean: _with_weights(mean, inner, run, accelerator), rules)
    return Trained(
        job=job,
        selected={} if failure else selected,
        mixed_steps=algorithm.mixed_steps(job.setup.steps),
        seconds=time.perf_counter() - started,
        failure=failure,
        course=run.selector.course,
    )


@dataclass(frozen=True)
class _Run:
    """What the steps of one training read and move, beside the model."""

    job: Job
    training: Training
    batches: TrainingBatches
    validation: Validation
    selector: Selector
    averages: Averages | None
    record: Record


def _train(run: _Run, inner: EndToEnd, accelerator: Accelerator, unfreeze_at: int, show: bool) -> str | None:
    """All steps. Returns why the training broke off, None where it did not."""
    job, steps = run.job, run.job.setup.steps
    optimizer, batches = make_optimizer(inner.roles(), job, run.training), iter(run.batches)
    name = f"{job.method}, {', '.join(job.test_domains)} held out, seed {job.seed}"
    with progress(name, steps, "steps", show) as bar:
        for frozen, count in ((True, unfreeze_at), (False, steps - unfreeze_at)):
            if count == 0:
                continue
            inner.freeze_encoder(frozen)
            failure = _phase(run, inner, optimizer, accelerator, islice(batches, count), bar)
            if failure is not None:
                return failure
    return None


def _phase(
    run: _Run,
    inner: EndToEnd,
    optimizer: Optimizer,
    accelerator: Accelerator,
    batches: Iterable[tuple[int, list[MicroBatch]]],
    bar: Progress,
) -> str | None:
    """The steps of `batches`, in which the same parameters train: the accelerator must be told of a change."""
    steps = run.job.setup.steps
    evaluate_after = set(evaluation_steps(steps, run.training.evaluate_every))
    course = Course()
    with _prepared(inner, optimizer, accelerator) as (model, optimizer):
        passes = Passes(model, inner, accelerator, run.job.sharpness, run.job.seed)
        for step, micro_batches in batches:
            factor = learning_rate_factor(step, steps, run.training.schedule)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

            losses = _step(passes, micro_batches, optimizer, run.training.clip_norm, step)
            if not math.isfinite(loss := float(losses.total + losses.second + losses.auxiliary)):
                return _failure(f"the loss is {loss}", step, steps, run.batches)
            course.add(losses)
            if run.averages is not None:
                trained = passes.roles.main | passes.roles.auxiliary
                run.averages.add(step + 1, {name: parameter[None] for name, parameter in trained.items()})
            if step + 1 in evaluate_after and not _evaluate(run, passes, step + 1, course, factor):
                return _failure("logits on validation images are not finite", step, steps, run.batches)
            bar.advance(1, f"loss {float(losses.total):.3f}")
    return None


def _evaluate(run: _Run, passes: Passes, taken: int, course: Course, factor: float) -> bool:
    """The evaluation after `taken` steps; False where logits are not finite."""
    values = run.validation.evaluate(passes.inner)
    if values is None:
        return False
    values |= known_values(run.job, taken)
    run.selector.offer(taken, values, passes.inner.weights)
    if run.averages is not None:
        run.averages.evaluated(taken, [run.validation.loss])
    if passes.accelerator.is_main_process:
        scores = {f"{rule}/{run.validation.metric}": value for rule, value in values.items()}
        run.record(run.job, taken, {**course.means(), "lr": run.job.lr * factor, **scores})
    return True


def _with_weights(mean: dict[str, Tensor], inner: EndToEnd, run: _Run, accelerator: Accelerator) -> dict[str, Tensor]:
    """The model's weights with the averaged ones in their places, and batch-norm statistics that fit them."""
    with torch.no_grad():
        for name, parameter in inner.named_weights().items():
            if name in mean:
                parameter.copy_(mean[name])
    torch.manual_seed(int(bits(run.job.seed, run.job.setup.steps, Stream.ENCODER, accelerator.process_index)))
    inner.train()
    gather_statistics(inner.encoder, (batch for _, batch in islice(run.batches, STATISTICS_BATCHES)), accelerator)
    return inner.weights()


def _step(
    passes: Passes, micro_batches: list[MicroBatch], optimizer: Optimizer, clip_norm: float | None, step: int
) -> StepLosses:
    """One step of the algorithm; its losses, the mean over the steps of the optimizer that it takes."""
    algorithm, taken = passes.inner.algorithm, list[StepLosses]()

    def inner_step(domain: int | None) -> None:
        parts = micro_batches
        if domain is not None:
            domains = algorithm.task.num_domains
            parts = [MicroBatch(block(part.batch, domain, domains), part.weight) for part in micro_batches]
        taken.append(passes.run(parts, step))
        if clip_norm is not None:
            passes.accelerator.clip_grad_norm_(passes.roles.main.values(), clip_norm)
        if algorithm.resets_optimizer(step):
            optimizer.state.clear()  # torch's optimizers start anew where they find none
        optimizer.step()
        optimizer.zero_grad()

    algorithm.update(passes.roles.main | passes.roles.auxiliary, inner_step, step)
    return StepLosses.mean(taken)


def _failure(what: str, step: int, steps: int, batches: TrainingBatches) -> str:
    rows = ", ".join(map(str, batches.rows(step).tolist()))
    return f"{what} at step {step + 1} of {steps}; images in its batch: rows {rows}"


def _refuse_unsupported(job: Job, accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UserError(f"accelerate: training end to end under {kind} is not supported; launch without it")
    if accelerator.gradient_accumulation_steps != 1:
        # Accelerate would divide the losses by it
        raise UserError("accelerate: leave its gradient accumulation at 1 and set training.accumulation")
    if accelerator.mixed_precision == "fp16" and job.sharpness is not None:
        # the gradient scaler would leave the second pass scaled
        raise UserError(
            f"training.mixed_precision: fp16 does not go with the two passes of {job.method}; use bf16 or no"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError("training.mixed_precision: fp16 needs a GPU and would silently be float32 here; use bf16 or no")


def make_optimizer(roles: Roles, job: Job, training: Training) -> Optimizer:
    """Class head and auxiliary modules at the job's learning rate, the encoder at its own."""
    encoder_lr = training.encoder_lr if job.encoder_lr is None else job.encoder_lr
    momentum = training.momentum if job.momentum is None else job.momentum
    rates = (encoder_lr, job.lr, job.lr)
    groups = [
        {"params": list(parameters.values()), "lr": lr, "initial_lr": lr, "weight_decay": job.weight_decay}
        for parameters, lr in zip(roles, rates, strict=True)
        if parameters
    ]
    if training.optimizer == "sgd":
        return SGD(groups, momentum=momentum)
    return {"adam": Adam, "adamw": AdamW}[training.optimizer](groups, amsgrad=training.amsgrad)


@contextmanager
def _prepared(inner: EndToEnd, optimizer: Optimizer, accelerator: Accelerator) -> Iterator[tuple[nn.Module, Optimizer]]:
    prepared = accelerator.prepare(inner, optimizer)
    try:
        yield prepared
    finally:
        # else a second phase would wrap the forward pass in autocast twice
        accelerator.unwrap_model(prepared[0], keep_fp32_wrapper=False)
        accelerator.free_memory()


class Validation:
    """What the selection rules look at, evaluated while training, in the precision of the training."""

    def __init__(
        self,
        job: Job,
        images: ImageRows,
        labels: Tensor,
        worst_of: Tensor,
        rules: Sequence[str],
        metric: str,
        batch_size: int,
        accelerator: Accelerator,
    ) -> None:
        self.labels, self.worst_of, self.metric = labels, worst_of, metric
        self.precision = precision_of(accelerator)
        self.loss = math.nan  # on the images of LOSS_SPLIT, where they are looked at, at the last evaluation
        self.rows = rows_of_rules(job, rules)
        self.images = {
            rule: EvaluationImages(images, rows, batch_size, accelerator, persistent=True)
            for rule, rows in self.rows.items()
        }

    def evaluate(self, inner: EndToEnd) -> dict[str, float] | None:
        """Selection rule → the metric on its split; None where logits are not finite."""
        inner.eval()
        head = inner.algorithm.head
        values = {}
        for rule, images in self.images.items():
            logits = images.logits(inner.encoder, head.weight, head.bias, self.precision)
            if not logits.isfinite().all():
                return None
            rows = self.rows[rule]
            values[rule] = metric_of(self.metric, logits, self.labels[rows], self.worst_of[rows])
            if rule == LOSS_SPLIT:
                self.loss = metric_of("nll", logits, self.labels[rows], self.worst_of[rows])
        inner.train()
        return values


class Course:
    """Means of the losses and of what the algorithm logs, since the last time they were asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, losses: StepLosses) -> None:
        for name, value in {"loss": losses.total, "auxiliary_loss": losses.auxiliary, **losses.logs}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means


def shut_down(accelerator: Accelerator) -> None:
    """At the end of a run, by every process. In another order a rank sometimes aborts at exit."""
    accelerator.free_memory()
    gc.collect()
    accelerator.wait_for_everyone()
    accelerator.end_training()
