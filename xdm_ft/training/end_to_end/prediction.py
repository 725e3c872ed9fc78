"""The logits or features of images by a model that is trained end to end, and the validation during its training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.encoders import Encoder
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.runtime.interrupt import Interrupted, stop_requested
from xdm_ft.runtime.machine import keep_freed_memory
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.tensors import Annotations, Criteria
from xdm_ft.training import Job, Precision
from xdm_ft.training.averages import LOSS_SPLIT
from xdm_ft.training.end_to_end.inputs import CachedActivations, ComputedActivations, Images, Inputs
from xdm_ft.training.end_to_end.model import FULL_ENCODER, EncoderPart, EndToEnd
from xdm_ft.training.selection import RuleImages, rows_of_rules, rule_images, split_of

if TYPE_CHECKING:
    from accelerate import Accelerator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class EvaluationImages:
    """The images of some rows, or their activations at a cut, split between the processes.

    Each process has consecutive rows, so that the concatenated results of all processes are in order.
    """

    def __init__(
        self, inputs: Inputs, rows: Tensor, batch_size: int, accelerator: Accelerator, persistent: bool = False
    ) -> None:
        """`persistent`: keep the loader's workers for the next call of `logits`."""
        self.accelerator, self.n = accelerator, len(rows)
        self.rows_per_process = -(-self.n // accelerator.num_processes)
        begin = self.rows_per_process * accelerator.process_index
        own = rows[begin : begin + self.rows_per_process].tolist()
        self.batches = inputs.of_rows(own, batch_size, persistent)

    def logits(self, model: EndToEnd, precision: Precision) -> Tensor:
        """Returns logits float32 [n,C] on the CPU, the same in every process.

        The model must be on the accelerator's device and in eval mode. If one process has received a signal to stop,
        `Interrupted` is raised in all of them.
        """
        algorithm = model.algorithm
        return self._outputs(model, algorithm.logits, algorithm.task.num_classes, precision)

    def features(self, model: EndToEnd, precision: Precision) -> Tensor:
        """Returns features float32 [n,K], as `logits` does."""
        return self._outputs(model, lambda z: z, model.encoder.width, precision)

    @torch.no_grad()
    def _outputs(self, model: EndToEnd, head: Callable[[Tensor], Tensor], width: int, precision: Precision) -> Tensor:
        device = self.accelerator.device
        outputs = torch.zeros(self.rows_per_process, width, device=device)  # the last processes' shares may be smaller
        done = 0
        for x in self.batches:
            if stop_requested():
                break
            with torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision != "no"):
                z = model.encode(x)  # [b,K]
            outputs[done : done + len(x)] = head(z.float())
            done += len(x)
            pulse.beat()
        if self.accelerator.reduce(torch.tensor(float(stop_requested()), device=device), "sum") > 0:
            raise Interrupted
        gathered: Tensor = self.accelerator.gather(outputs)
        return gathered[: self.n].cpu()


def predict(
    job: Job,
    encoder: Encoder,
    state: Mapping[str, Tensor],
    dataset: ImageDataset,
    rows: Tensor,
    accelerator: Accelerator,
    batch_size: int,
    precision: Precision | None = None,
    of: Literal["logits", "features"] = "logits",
    part: EncoderPart = FULL_ENCODER,
) -> Tensor:
    """Returns logits float32 [n,C] for the images `rows` (int64 [n]), on the CPU, the same in every process.

    `of` "features": those of the trained encoder, float32 [n,K], instead.

    `state` is a `Selected.state` that `train_model` returned for the `job` and `part`. `encoder` provides architecture,
    preprocessing and the weights that were not trained, and is not changed. `precision` None: the accelerator's mixed
    precision, as in training. Raises `UserError`, which names the image, if an image does not decode.
    """
    keep_freed_memory()
    algorithm = job.make(job.setup)
    assert isinstance(algorithm, Algorithm)
    model = EndToEnd(copy.deepcopy(encoder), algorithm, "frozen", part.trainable, merged=True)
    model = model.placed(accelerator.device).eval()
    model.load_weights(state)
    inputs = inputs_of(model, part, Images(dataset, encoder.preprocessing, "none", accelerator), accelerator)
    evaluation = EvaluationImages(inputs, rows, batch_size, accelerator)
    precision = precision or precision_of(accelerator)
    return evaluation.features(model, precision) if of == "features" else evaluation.logits(model, precision)


def inputs_of(model: EndToEnd, part: EncoderPart, images: Images, accelerator: Accelerator) -> Inputs:
    """Returns what the trained part of the model reads, in training and in evaluations."""
    if model.cut is None:
        return images
    if part.activations is None:
        return ComputedActivations(images, model.cut.below, accelerator)
    return CachedActivations(part.activations, model.cut.shape)


def precision_of(accelerator: Accelerator) -> Precision:
    precision: Precision = accelerator.mixed_precision
    return precision


class EndToEndValidation:
    """The validation images of the selection rules, evaluated in the precision of the training."""

    def __init__(
        self,
        job: Job,
        inputs: Inputs,
        annotations: Annotations,
        criteria: Criteria,
        batch_size: int,
        accelerator: Accelerator,
        *,
        loss: bool,
    ) -> None:
        """`loss`: also measure the loss on the images of LOSS_SPLIT, as `self.loss`."""
        self.metric = criteria.metric
        self.precision = precision_of(accelerator)
        self.loss = math.nan  # loss on LOSS_SPLIT at the last evaluation, if it is measured
        rows_of = rows_of_rules(job, [*criteria.rules, LOSS_SPLIT] if loss else criteria.rules)

        def measured(rule: str, metric: str) -> RuleImages:
            classes = job.setup.task.num_classes
            return rule_images(split_of(rule), rows_of[rule], annotations, metric, classes)

        self.measured = {rule: measured(rule, criteria.metric) for rule in rows_of}
        self.measured_loss = measured(LOSS_SPLIT, "nll") if loss else None
        self.images = {
            rule: EvaluationImages(inputs, rows, batch_size, accelerator, persistent=True)
            for rule, rows in rows_of.items()
        }

    def evaluate(self, inner: EndToEnd) -> dict[str, float] | None:
        """Returns {selection rule: value of the metric}; None if logits are not finite."""
        inner.eval()
        values = {}
        for rule, images in self.images.items():
            logits = images.logits(inner, self.precision)
            if not logits.isfinite().all():
                return None
            values[rule] = self.measured[rule].value(logits)
            if rule == LOSS_SPLIT and self.measured_loss is not None:
                self.loss = self.measured_loss.value(logits)
        inner.train()
        return values


class EndToEndPredictor:
    """The `Predictor` of models that train their encoder. All processes call it together."""

    def __init__(
        self,
        job: Job,
        encoder: Encoder,
        dataset: ImageDataset,
        accelerator: Accelerator,
        batch_size: int,
        part: EncoderPart = FULL_ENCODER,
    ) -> None:
        """`encoder`: before training."""
        self.job, self.encoder, self.dataset, self.accelerator = job, encoder, dataset, accelerator
        self.batch_size, self.part = batch_size, part

    def logits(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return self._predict(state, rows, "logits")

    def features(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return self._predict(state, rows, "features")

    def _predict(self, state: Mapping[str, Tensor], rows: Tensor, of: Literal["logits", "features"]) -> Tensor:
        images, accelerator = self.dataset, self.accelerator
        return predict(self.job, self.encoder, state, images, rows, accelerator, self.batch_size, of=of, part=self.part)

    def starting_weights(self) -> dict[str, Tensor]:
        algorithm = self.job.new_method()
        assert isinstance(algorithm, Algorithm)
        return EndToEnd(copy.deepcopy(self.encoder), algorithm, "frozen").weights()
