"""The model that `xdm_ft.load` returns: images in, class names and probabilities out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xdm_ft.evaluation.distance import Reference
from xdm_ft.export.config import ModelPrecision
from xdm_ft.export.directory import CONFIG, read_directory
from xdm_ft.export.hub import download, is_hub_name
from xdm_ft.export.interchange import ClassEmbeddings, class_embeddings
from xdm_ft.export.parts import Classifier, Parts, probabilities
from xdm_ft.export.runs import Choice, read_parts
from xdm_ft.features import fast_batch_size
from xdm_ft.images.decode import UnreadableImage, decode, to_rgb
from xdm_ft.images.loader import own_cores
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.report.finished import is_run, read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.memory import keep_freed_memory

logger = logging.getLogger("xdm_ft")
OneImage = str | Path | Image.Image | np.ndarray
Images = OneImage | Iterable[OneImage]


class Model:
    """A trained model. An image is a path, a PIL image, or a uint8 array [H,W] or [H,W,3].

    `class_names`: in the order of the columns of probabilities. `module`: a plain torch module, preprocessed pixels
    float32 [B,3,H,W] → logits float32 [B,C]. `transform`: RGB PIL image → pixels [3,H,W]. `config`: how it was made.
    """

    def __init__(self, parts: Parts, device: torch.device | str | None = None, precision: ModelPrecision | None = None):
        """`device` None: a GPU if torch finds one. `precision` None: that of the run. Raises `UserError`."""
        self.config = parts.config
        self.class_names = parts.config.class_names
        self.device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.module = Classifier(parts, precision, self.device)
        self.reference = parts.reference
        self.training_images = parts.training_images
        self.transform = evaluation_transform(parts.config.preprocessing)

    def __repr__(self) -> str:
        encoder, method = self.config.encoder, self.config.method["label"]
        return f"Model({method}, {len(self.class_names)} classes, {encoder.settings['model']}, {self.device})"

    def predict(self, images: Images) -> list[str]:
        """Returns the most probable class of every image. Raises `UserError` for one that does not decode."""
        return [self.class_names[number] for number in self.predict_proba(images).argmax(1)]

    def predict_proba(self, images: Images) -> np.ndarray:
        """Returns probabilities float32 [n,C]."""
        found = [probabilities(self.module.logits(self.module.as_read(z))).cpu().numpy() for z in self._encoded(images)]
        return np.concatenate(found) if found else np.zeros((0, len(self.class_names)), np.float32)

    def encode(self, images: Images) -> np.ndarray:
        """Returns features float32 [n,K], as the head reads them."""
        found = [self.module.as_read(z).cpu().numpy() for z in self._encoded(images)]
        return np.concatenate(found) if found else np.zeros((0, self.config.encoder.width), np.float32)

    def distance(self, images: Images) -> np.ndarray:
        """Returns how far the encoder's features are from those of the training images: float32 [n], at least 0.

        It is the Mahalanobis distance to the nearest class (`evaluation/distance.py`). `distance_percentile`
        says what is far. Raises `UserError` if the model has no reference.
        """
        reference = self.reference_for("distance")
        found = [reference.distance(z.cpu().numpy()) for z in self._encoded(images)]
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def distance_percentile(self, distances: np.ndarray) -> np.ndarray:
        """Returns, for each distance, the percentage of unseen images of training domains that are nearer: float32 [n].

        Raises `UserError` if the model has no reference.
        """
        return self.reference_for("distance_percentile").percentile(distances)

    def reference_for(self, what: str) -> Reference:
        """Returns the reference. Raises `UserError`, which begins with `what`, if the model has none."""
        if self.reference is not None:
            return self.reference
        start = f"{what}: not known for this model, since its run has kept nothing of the training features"
        if self.config.encoder.trained:
            raise UserError(f"{start}: it is of an earlier version, or the model is a mean of others; leave it out")
        raise UserError(
            f"{start}: it is of an earlier version, or the file is damaged; run its recipe again, which trains nothing "
            "again, and export the model again"
        )

    def class_embeddings(self) -> ClassEmbeddings:
        """Returns the class head as class embeddings. Raises `UserError` if it has none."""
        return class_embeddings(self.module)

    @torch.no_grad()
    def _encoded(self, images: Images) -> Iterator[Tensor]:
        keep_freed_memory()
        rest, size = iter([images] if isinstance(images, OneImage) else images), 0
        with ThreadPoolExecutor(own_cores(), "decoder") as decoders:
            while batch := list(islice(rest, fast_batch_size(self.device.type))):
                pixels = torch.stack([*decoders.map(self.pixels, batch)])
                # a shorter last batch rounds differently, and is filled up; a few images alone are not worth it
                size = max(size, len(batch))
                filled = torch.cat([pixels, pixels.new_zeros(size - len(batch), *pixels.shape[1:])])
                yield self.module.encoded(filled.to(self.device))[: len(batch)]

    def pixels(self, image: OneImage) -> Tensor:
        """Returns the preprocessed pixels float32 [3,H,W]. Raises `UserError` for an image that does not decode."""
        try:
            if isinstance(image, str | Path):
                image = decode(Path(image).expanduser(), str(image), self.config.preprocessing.least_side)
            elif isinstance(image, np.ndarray):
                if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
                    raise UserError(
                        f"an image array must be uint8 [H,W] or [H,W,3], not {image.dtype} {list(image.shape)}"
                    )
                image = to_rgb(Image.fromarray(image))
            else:
                image = to_rgb(image)
            return self.transform(image)
        except UnreadableImage as error:
            raise UserError(f"{error.name or 'an image'}: does not decode: {error.reason}") from error
        except OSError as error:  # a PIL image that was opened, and is decoded only now
            raise UserError(f"an image does not decode: {error}") from error


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: no CUDA in this torch
        raise UserError(f"device: {name} can not be used ({str(error).splitlines()[0]}); use cpu or cuda") from error
    return device


def load(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    precision: str | None = None,
    encoder_weights: str | None = None,
    choice: Choice | None = None,
) -> Model:
    """See `xdm_ft.load`."""
    of_hub = is_hub_name(path)
    folder = download(os.fspath(path)) if of_hub else Path(path).expanduser()
    choice = choice or Choice()
    if precision not in (None, *get_args(ModelPrecision)):
        raise UserError(f"precision: {precision} is not known; use fp32, bf16 or fp16, or leave it out")
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder}: {problem}; name a model directory (xdm-ft export) or a run directory")
    if is_run(folder) and not of_hub:  # a run reads further files, which a hub repository could name
        parts = read_parts(read_run(folder), choice)
        logger.info("%s: %s", folder, parts.config.chosen)
    elif choice != Choice():
        raise UserError(f"{folder}: is no run directory, so method, held-out domain, seed and trial can not be chosen")
    elif not (folder / CONFIG).exists():
        raise UserError(f"{folder}: holds neither a model (config.json) nor a run (results.json)")
    else:
        parts = read_directory(folder, encoder_weights)
    return Model(parts, device, cast(ModelPrecision | None, precision))
