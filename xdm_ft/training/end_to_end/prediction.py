"""Computes the logits or features of images with a model that was trained end to end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.data import ImageDataset
from xdm_ft.data._image_rows import ImageRows
from xdm_ft.data._loading import image_loader, loaded
from xdm_ft.data._transforms import evaluation_transform
from xdm_ft.encoders import Encoder
from xdm_ft.interrupt import Interrupted, stop_requested
from xdm_ft.progress import pulse
from xdm_ft.training import Job, Precision
from xdm_ft.training.end_to_end.batches import WORKERS_DIED, worker_count
from xdm_ft.training.end_to_end.gradients import EndToEnd

if TYPE_CHECKING:
    from accelerate import Accelerator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class EvaluationImages:
    """The images of some rows, in the encoder's own preprocessing, split between the processes.

    Each process has consecutive rows, so that the concatenated results of all processes are in order.
    """

    def __init__(
        self, images: ImageRows, rows: Tensor, batch_size: int, accelerator: Accelerator, persistent: bool = False
    ) -> None:
        """`persistent`: keep the loader's workers for the next call of `logits`."""
        self.accelerator, self.n = accelerator, len(rows)
        self.rows_per_process = -(-self.n // accelerator.num_processes)
        begin = self.rows_per_process * accelerator.process_index
        own = rows[begin : begin + self.rows_per_process].tolist()
        workers = min(worker_count(accelerator), -(-len(own) // batch_size))
        self.loader = image_loader(
            images,
            workers,
            accelerator.device,
            batch_size=batch_size,
            sampler=own,
            persistent_workers=persistent and workers > 0,
        )

    def logits(self, encoder: Encoder, algorithm: Algorithm, precision: Precision) -> Tensor:
        """Returns logits float32 [n,C] on the CPU, the same in every process.

        Both modules must be on the accelerator's device and in eval mode. If one process has received a signal to stop,
        `Interrupted` is raised in all of them.
        """
        return self._outputs(encoder, algorithm.logits, algorithm.task.num_classes, precision)

    def features(self, encoder: Encoder, precision: Precision) -> Tensor:
        """Returns features float32 [n,K], as `logits` does."""
        return self._outputs(encoder, lambda z: z, encoder.width, precision)

    @torch.no_grad()
    def _outputs(self, encoder: Encoder, head: Callable[[Tensor], Tensor], width: int, precision: Precision) -> Tensor:
        device = self.accelerator.device
        outputs = torch.zeros(self.rows_per_process, width, device=device)  # the last processes' shares may be smaller
        done = 0
        for x, _ in loaded(self.loader, *WORKERS_DIED):
            if stop_requested():
                break
            with torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision != "no"):
                z = encoder(x.to(device, non_blocking=True))  # [b,K]
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
) -> Tensor:
    """Returns logits float32 [n,C] for the images `rows` (int64 [n]), on the CPU, the same in every process.

    `of` "features": those of the trained encoder, float32 [n,K], instead.

    `state` is a `Selected.state` that `train_model` returned for the `job`. `encoder` provides architecture and
    preprocessing and is not changed. `precision` None: the accelerator's mixed precision, as in training. Raises
    `UserError`, which names the image, if an image does not decode.
    """
    algorithm = job.make(job.setup)
    assert isinstance(algorithm, Algorithm)
    model = EndToEnd(copy.deepcopy(encoder), algorithm, "frozen").to(accelerator.device).eval()
    model.load_weights(state)
    images = ImageRows(dataset, evaluation_transform(encoder.preprocessing))
    evaluation = EvaluationImages(images, rows, batch_size, accelerator)
    precision = precision or precision_of(accelerator)
    if of == "features":
        return evaluation.features(model.encoder, precision)
    return evaluation.logits(model.encoder, algorithm, precision)


def precision_of(accelerator: Accelerator) -> Precision:
    precision: Precision = accelerator.mixed_precision
    return precision
