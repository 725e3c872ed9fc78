"""The logits or features of images by a model that is trained end to end, and the validation during its training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from xdm_ft.augmentations import NO_AUGMENTATION
from xdm_ft.core import Annotations, Criteria
from xdm_ft.encoders import Encoder
from xdm_ft.images import ImageDataset
from xdm_ft.images.loader import DTYPES
from xdm_ft.runtime.interrupt import Interrupted, stop_requested
from xdm_ft.runtime.machine import retain_freed_memory
from xdm_ft.runtime.progress import pulse
from xdm_ft.training import Job
from xdm_ft.training.end_to_end.inputs import CachedActivations, ComputedActivations, ImageInputs, Inputs
from xdm_ft.training.end_to_end.model import FULL_ENCODER, EncoderPart, EndToEnd
from xdm_ft.training.selection import LOSS_SPLIT, RuleImages, rows_of_rules, split_of

if TYPE_CHECKING:
    from accelerate import Accelerator


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
        rows_here = rows[begin : begin + self.rows_per_process].tolist()
        self.read = inputs.of_rows(rows_here, batch_size, persistent)

    @torch.no_grad()
    def outputs(self, model: EndToEnd, kind: Literal["logits", "features"] = "logits") -> Tensor:
        """Returns logits float32 [n,C] or features float32 [n,K] on the CPU, the same in every process.

        The model must be on the accelerator's device and in eval mode. The accelerator's precision is that of training.
        If one process has received a signal to stop, `Interrupted` is raised in all of them.
        """
        algorithm, device, precision = model.algorithm, self.accelerator.device, self.accelerator.mixed_precision
        width = algorithm.task.num_classes if kind == "logits" else model.encoder.width
        outputs = torch.zeros(self.rows_per_process, width, device=device)  # the last processes' shares may be smaller
        done = 0
        for x in self.read():
            if stop_requested():  # no exception yet: the other processes would wait in `reduce` for ever
                break
            with torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision != "no"):
                z = model.encode(x)  # [b,K]
            outputs[done : done + len(x)] = algorithm.logits(z.float()) if kind == "logits" else z.float()
            done += len(x)
            pulse.beat()
        if self.accelerator.reduce(torch.tensor(float(stop_requested()), device=device), "sum") > 0:
            raise Interrupted
        gathered: Tensor = self.accelerator.gather(outputs)
        return gathered[: self.n].cpu()


def inputs_of(model: EndToEnd, part: EncoderPart, images: ImageInputs, accelerator: Accelerator) -> Inputs:
    """Returns what the trained part of the model reads, in training and in evaluations."""
    if model.cut is None:
        return images
    if part.activations is None:
        return ComputedActivations(images, model.cut.below, accelerator)
    return CachedActivations(part.activations, model.cut.shape)


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
        self.loss = math.nan  # loss on LOSS_SPLIT at the last evaluation, if it is measured
        rows_of = rows_of_rules(job, [*criteria.rules, LOSS_SPLIT] if loss else criteria.rules)

        def measure(rule: str, metric: str) -> Callable[[Tensor], float]:
            return RuleImages(split_of(rule), rows_of[rule], annotations, metric).value

        self.values = {rule: measure(rule, criteria.metric) for rule in rows_of}
        self.loss_value = measure(LOSS_SPLIT, "nll") if loss else None
        self.images = {
            rule: EvaluationImages(inputs, rows, batch_size, accelerator, persistent=True)
            for rule, rows in rows_of.items()
        }

    def evaluate(self, inner: EndToEnd) -> dict[str, float] | None:
        """Returns {selection rule: value of the metric}; None if logits are not finite."""
        inner.eval()
        values = {}
        for rule, images in self.images.items():
            logits = images.outputs(inner)
            if not logits.isfinite().all():
                return None
            values[rule] = self.values[rule](logits)
            if rule == LOSS_SPLIT and self.loss_value is not None:
                self.loss = self.loss_value(logits)
        inner.train()
        return values


class EndToEndPredictor:
    """The `Predictor` of models that train their encoder. All processes call it together.

    Weights are those of a `Selected.state` that `train_model` returned for the same job and part. Raises `UserError`,
    which names the image, if an image does not decode.
    """

    def __init__(
        self,
        job: Job,
        encoder: Encoder,
        dataset: ImageDataset,
        accelerator: Accelerator,
        batch_size: int,
        part: EncoderPart = FULL_ENCODER,
    ) -> None:
        """`encoder`: before training; it has the weights that were not trained, and is not changed."""
        self.job, self.encoder, self.dataset, self.accelerator = job, encoder, dataset, accelerator
        self.batch_size, self.part = batch_size, part

    def logits(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return self._outputs(state, rows, "logits")

    def features(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return self._outputs(state, rows, "features")

    def _outputs(self, state: Mapping[str, Tensor], rows: Tensor, kind: Literal["logits", "features"]) -> Tensor:
        retain_freed_memory()
        encoder, algorithm, accelerator = copy.deepcopy(self.encoder), self.job.new_algorithm(), self.accelerator
        model = EndToEnd(encoder, algorithm, "frozen", self.part.trainable, merged=True, normalized=self.job.normalized)
        model = model.placed(accelerator.device).eval()
        model.load_weights(state)
        images = ImageInputs(self.dataset, self.encoder.preprocessing, NO_AUGMENTATION, accelerator)
        inputs = inputs_of(model, self.part, images, accelerator)
        return EvaluationImages(inputs, rows, self.batch_size, accelerator).outputs(model, kind)

    def starting_weights(self) -> dict[str, Tensor]:
        return EndToEnd(copy.deepcopy(self.encoder), self.job.new_algorithm(), "frozen").weights()
