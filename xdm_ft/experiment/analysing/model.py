"""A trained model that is measured: its heads, and the features that it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Method
from xdm_ft.analysis.augmented import augmented_in_encoder
from xdm_ft.evaluation.records import Record
from xdm_ft.experiment.jobs import make_job
from xdm_ft.experiment.plan import Plan, PlannedModel
from xdm_ft.experiment.prepared import Prepared
from xdm_ft.images.image_rows import ImageRows
from xdm_ft.images.loader import image_loader, loaded
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.checksummed import Damaged
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training.end_to_end.inputs import WORKERS_DIED, worker_count
from xdm_ft.training.end_to_end.model import EndToEnd
from xdm_ft.training.end_to_end.prediction import DTYPES, precision_of

if TYPE_CHECKING:
    from accelerate import Accelerator

BATCH = 32  # images that an encoder sees at once
Features = Callable[[Tensor], Tensor]
"""rows int64 [n] → features float32 [n,K] on the CPU, as the class head reads them."""


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run, with the weights that the recipe's own rule picked."""

    record: Record
    method: Method  # on the CPU, in eval mode
    features: Features
    encoder: OwnEncoder | None  # None: it is frozen
    batch_size: int  # images of a training step, among which augmentations find partners

    @property
    def algorithm(self) -> Algorithm | None:
        """The method, if it is trained by steps; None for a solver."""
        return self.method if isinstance(self.method, Algorithm) else None

    @torch.no_grad()
    def logits(self, z: Tensor) -> Tensor:
        """Returns logits float32 [n,C] of features [n,K]."""
        return self.method.logits(z)


class OwnEncoder:
    """The encoder of a model that was trained end to end.

    It is in eval mode, in the training's precision, on the accelerator's device, and uses no other process.
    """

    def __init__(self, model: EndToEnd, images: ImageRows, accelerator: Accelerator) -> None:
        self.model, self.images, self.accelerator = model, images, accelerator

    @torch.no_grad()
    def features(self, rows: Tensor) -> Tensor:
        """As `Features`."""
        encoder, found = self.model.encoder, [torch.empty(0, self.model.encoder.width)]
        for x in self._batches(rows, BATCH):
            with self._precision():
                z = encoder(x)
            found.append(z.float().cpu())
        return torch.cat(found)

    def augmented(self, rows: Tensor, y: Tensor, domain: Tensor, batch_size: int) -> Tensor:
        """Returns features float32 [n,K] of images that are augmented as in training, batch by batch."""
        annotations = (values.to(self.accelerator.device).split(batch_size) for values in (y, domain))
        annotated = zip(self._batches(rows, batch_size), *annotations, strict=True)
        with self._precision():
            return augmented_in_encoder(self.model.algorithm, self.model.encoder, annotated)

    def _batches(self, rows: Tensor, size: int) -> Iterator[Tensor]:
        """Yields the images of the rows, [B,3,H,W] on the device."""
        device, split = self.accelerator.device, [some.tolist() for some in rows.split(size)]
        workers = min(worker_count(self.accelerator), len(split))
        loader = image_loader(self.images, workers, device, batch_sampler=split)
        for x, _ in loaded(loader, *WORKERS_DIED):
            yield x.to(device, non_blocking=True)
            pulse.beat()

    def _precision(self) -> torch.autocast:
        precision = precision_of(self.accelerator)
        device = self.accelerator.device.type
        return torch.autocast(device, dtype=DTYPES.get(precision), enabled=precision != "no")


def read_model(
    plan: Plan,
    prepared: Prepared,
    planned: PlannedModel,
    record: Record,
    directory: RunDirectory,
    accelerator: Accelerator,
) -> TrainedModel:
    """Returns the model of a record. Raises `UserError` if its weights are damaged."""
    file = record.selected[plan.recipe.protocol.selection].weights
    try:
        state, _ = directory.tensors(file)
    except (Damaged, FileNotFoundError) as error:
        problem = f"{directory.path / file}: is damaged ({error})"
        raise UserError(f"{problem}; run the run's recipe again to train this model again") from error
    job = make_job(plan, prepared, planned, {})
    method, batch = job.make(job.setup), job.training.images_per_step(len(job.split.train))
    own = prepared.of(planned.item)
    if is_frozen(planned):
        features = own.features_of(job)
        method.load_state_dict(state)
        return TrainedModel(record, method.eval(), lambda rows: features[rows.to(features.device)].cpu(), None, batch)
    assert isinstance(method, Algorithm)
    model = EndToEnd(copy.deepcopy(own.encoder), method, "frozen")
    model.load_weights(state)
    preprocessing = own.encoder.preprocessing
    images = ImageRows(plan.dataset, evaluation_transform(preprocessing), preprocessing.least_side)
    head = copy.deepcopy(method).cpu().eval()
    trained = OwnEncoder(model.to(accelerator.device).eval(), images, accelerator)
    return TrainedModel(record, head, trained.features, trained, batch)


def is_frozen(planned: PlannedModel) -> bool:
    """Returns whether a model reads cached features of the frozen encoder."""
    return planned.item.trainable is False
