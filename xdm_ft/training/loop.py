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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from xdm_ft.algorithms import Algorithm
from xdm_ft.data import ImageDataset
from xdm_ft.data.loading.samplers import ImageRows
from xdm_ft.data.loading.transforms import evaluation_transform
from xdm_ft.encoders import Encoder
from xdm_ft.errors import UserError
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.progress import progress
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.batches import MicroBatch, TrainingBatches, block
from xdm_ft.training.passes import BatchNorm, EndToEnd, Passes, Roles, StepLosses
from xdm_ft.training.prediction import EvaluationImages, precision_of, predict
from xdm_ft.training.schedule import learning_rate_factor
from xdm_ft.training.selection import Selector, evaluation_steps, rows_of_rules

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["predict", "shut_down", "train_model"]

Record = Callable[[Job, int, dict[str, float]], None]


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
) -> Trained:
    """Trains a copy of `encoder`, from the weights it has now, with the job's method for `job.setup.steps` steps.

    `labels` and `domains` are int64 [N], domains numbered as in the data set. Images come in the encoder's own
    preprocessing. At each evaluation the main process calls `record(job, number of steps taken, values)` with the means
    since the last one of `loss`, `auxiliary_loss` and what the algorithm logs, the heads' learning rate `lr`, and
    `<rule>/<metric>` for each selection rule.

    A model whose loss or logits are not finite, or for which a rule could select nothing, comes with `failure` and
    without weights. Raises `UserError` for an image that does not decode, for fp16 with sharpness or without a GPU, for
    more micro-batches than a domain has images in a batch, and for what of Accelerate is not supported.
    """
    started = time.perf_counter()
    _refuse_unsupported(job, accelerator)
    algorithm = job.make(job.setup)
    assert isinstance(algorithm, Algorithm), f"{job.method} trains no encoder"
    inner = EndToEnd(copy.deepcopy(encoder), algorithm, batch_norm).to(accelerator.device).train()
    images = ImageRows(dataset, evaluation_transform(encoder.preprocessing))
    batches = TrainingBatches(job, training, images, labels, domains, accelerator)
    validation = Validation(job, images, labels, domains, rules, metric, max(batches.sizes), accelerator)
    selector = Selector(rules, metric, algorithm.first_selectable_step)
    with _prepared(inner, make_optimizer(inner.roles(), job, training), accelerator) as (model, optimizer):
        passes = Passes(model, inner, accelerator, job.sharpness, job.seed)
        failure = _train(job, training, batches, passes, optimizer, validation, selector, record, show)
    failure = failure or selector.nothing_selected()
    return Trained(
        job=job,
        selected={} if failure else selector.selected,
        mixed_steps=algorithm.mixed_steps(job.setup.steps),
        seconds=time.perf_counter() - started,
        failure=failure,
    )


def _train(
    job: Job,
    training: Training,
    batches: TrainingBatches,
    passes: Passes,
    optimizer: Optimizer,
    validation: Validation,
    selector: Selector,
    record: Record,
    show: bool,
) -> str | None:
    """All steps. Returns why the training broke off, None where it did not."""
    accelerator, steps = passes.accelerator, job.setup.steps
    evaluate_after = set(evaluation_steps(steps, training.evaluate_every))
    base_rates = [group["lr"] for group in optimizer.param_groups]
    course = Course()
    name = f"{job.method}, {', '.join(job.test_domains)} held out, seed {job.seed}"
    with progress(name, steps, "steps", show) as bar:
        for step, micro_batches in batches:
            factor = learning_rate_factor(step, steps, training.schedule)
            for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * factor

            losses = _step(passes, micro_batches, optimizer, training.clip_norm, step)
            if not math.isfinite(loss := float(losses.total + losses.second + losses.auxiliary)):
                return _failure(f"the loss is {loss}", step, steps, batches)
            course.add(losses)
            if step + 1 in evaluate_after:
                values = validation.evaluate(passes.inner)
                if values is None:
                    return _failure("logits on validation images are not finite", step, steps, batches)
                selector.offer(step + 1, values, passes.inner.weights)
                if accelerator.is_main_process:
                    scores = {f"{rule}/{validation.metric}": value for rule, value in values.items()}
                    record(job, step + 1, {**course.means(), "lr": job.lr * factor, **scores})
            bar.advance(1, f"loss {float(losses.total):.3f}")
    return None


def _step(
    passes: Passes, micro_batches: list[MicroBatch], optimizer: Optimizer, clip_norm: float | None, step: int
) -> StepLosses:
    """One step of the algorithm; its losses, the mean over the steps of the optimizer that it takes."""
    algorithm, taken = passes.inner.algorithm, list[StepLosses]()

    def inner_step(domain: int | None) -> None:
        parts = micro_batches
        if domain is not None:
            domains = algorithm.task.num_domains
            parts = [MicroBatch(block(batch, domain, domains), weight) for batch, weight in micro_batches]
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
    """Encoder at `training.encoder_lr`; class head and auxiliary modules at the job's learning rate."""
    rates = (training.encoder_lr, job.lr, job.lr)
    groups = [
        {"params": list(parameters.values()), "lr": lr, "weight_decay": job.weight_decay}
        for parameters, lr in zip(roles, rates, strict=True)
        if parameters
    ]
    if training.optimizer == "sgd":
        return SGD(groups, momentum=training.momentum)
    return {"adam": Adam, "adamw": AdamW}[training.optimizer](groups)


@contextmanager
def _prepared(inner: EndToEnd, optimizer: Optimizer, accelerator: Accelerator) -> Iterator[tuple[nn.Module, Optimizer]]:
    try:
        yield accelerator.prepare(inner, optimizer)
    finally:
        accelerator.free_memory()


class Validation:
    """What the selection rules look at, evaluated while training, in the precision of the training."""

    def __init__(
        self,
        job: Job,
        images: ImageRows,
        labels: Tensor,
        domains: Tensor,
        rules: Sequence[str],
        metric: str,
        batch_size: int,
        accelerator: Accelerator,
    ) -> None:
        self.labels, self.domains, self.metric = labels, domains, metric
        self.precision = precision_of(accelerator)
        self.rows = rows_of_rules(job.split, rules)
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
            values[rule] = metric_of(self.metric, logits, self.labels[rows], self.domains[rows])
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
