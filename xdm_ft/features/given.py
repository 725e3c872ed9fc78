"""Features that the data set has already: they stand where an encoder and its cache stand otherwise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from xdm_ft.data.features import FeatureTable
from xdm_ft.encoders import Encoder, Portable, TextEncoder
from xdm_ft.features.cache import Features
from xdm_ft.images import ImageDataset
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import digest

ROWS = 4096  # images that are scored at a time
NO_IMAGES = "data has no images, only features computed elsewhere"


class GivenFeatures(Encoder):
    """What stands for the encoder of such features: their width and where they come from. It encodes nothing."""

    normalize = False
    stage_names = ()
    preprocessing = Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), size=1)  # nothing reads images

    def __init__(self, dataset: ImageDataset) -> None:
        super().__init__()
        assert isinstance(dataset, FeatureTable), "of a recipe whose data are features"
        self.width = dataset.features.shape[1]
        self.file, self.checksum = dataset.file_name, digest(dataset.features, bits=128)
        self.pretraining = f"{dataset.source}, computed elsewhere (xxh3_128 {self.checksum})"

    def forward(self, images: Tensor) -> Tensor:
        raise UserError(f"{NO_IMAGES}; use data with images and an encoder for this")

    def identity(self) -> dict[str, object]:
        return {"component": FeatureTable.__name__, "model": self.file, "xxh3": self.checksum}

    def portable(self) -> Portable:
        raise UserError(f"{NO_IMAGES}; there is no encoder to export")


class GivenText(GivenFeatures, TextEncoder):
    """The same where the class embeddings were given too (`data.class_embeddings`)."""

    prompts = ()

    def __init__(self, dataset: FeatureTable) -> None:
        super().__init__(dataset)
        assert dataset.class_embeddings is not None
        self.logit_scale = dataset.logit_scale
        self.pretraining += f"; {dataset.text_source}"
        self.embeddings: Tensor
        self.register_buffer("embeddings", torch.from_numpy(dataset.class_embeddings))

    def text_embeddings(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> Tensor:
        return self.embeddings

    def as_read(self, texts: list[str]) -> list[tuple[str, tuple[int, ...]]]:
        raise UserError(f"{NO_IMAGES}; there is no text encoder to read prompts")

    def read_prompts(self, class_names: tuple[str, ...], prompts: tuple[str, ...] | None = None) -> list[str]:
        return []

    exact_prompts = read_prompts


def zero_shot_accuracies(dataset: FeatureTable) -> dict[str, float]:
    """Returns {domain: accuracy of the given class embeddings}; a wrong pair of image and text model shows there."""
    assert dataset.class_embeddings is not None
    blocks = np.array_split(dataset.features, 1 + len(dataset) // ROWS)
    right = np.concatenate([(rows @ dataset.class_embeddings.T).argmax(1) for rows in blocks]) == dataset.labels
    return {name: float(right[dataset.domains == number].mean()) for number, name in enumerate(dataset.domain_names)}


def given_features(dataset: ImageDataset, device: torch.device) -> Features:
    """Returns the features of every row, as `extract` does for images."""
    assert isinstance(dataset, FeatureTable), "of a recipe whose data are features"
    return Features([torch.from_numpy(dataset.features)], device=device)
