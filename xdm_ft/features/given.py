"""Features that the data set has already: they stand where an encoder and its cache stand otherwise."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xdm_ft.data.bags import Bags
from xdm_ft.data.features import FeatureTable
from xdm_ft.encoders import Encoder, Portable, TextEncoder
from xdm_ft.features.cache import Features
from xdm_ft.image_files.bags import BagPool, BagUnit
from xdm_ft.images import ImageDataset
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import digest

GIVEN = "features"  # name of what stands for an encoder in recipes and models
MAX_WIDTH = 1 << 20
ROWS = 4096  # images that are scored at a time
NO_IMAGES = "data has no images, only features computed elsewhere"


class GivenFeatures(Encoder):
    """What stands for the encoder of such features: their width and where they come from. Features pass as they are."""

    normalize = False
    stage_names = ()
    preprocessing = Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), size=1)  # nothing reads images
    component = FeatureTable.__name__
    checksum = pretraining = ""

    def __init__(
        self,
        *,
        model: Annotated[str, Field(description="name of the file or table of the features")],
        width: Annotated[int, Field(ge=1, le=MAX_WIDTH, description="K, numbers per row")],
        pool: Annotated[BagPool | None, Field(description="how bags were pooled; null: rows are no bags")] = None,
        unit: Annotated[BagUnit | None, Field(description="what a bag is")] = None,
    ) -> None:
        super().__init__()
        self.model, self.width, self.pool, self.unit = model, width, pool, unit

    @classmethod
    def of(cls, dataset: ImageDataset) -> Self:
        """Returns what stands for the encoder of a data set's features."""
        assert isinstance(dataset, FeatureTable), "of a recipe whose data are features"
        pool, unit = (dataset.pool, dataset.unit) if isinstance(dataset, Bags) else (None, None)
        given = cls(model=dataset.file_name, width=dataset.features.shape[1], pool=pool, unit=unit)
        given.component, given.checksum = type(dataset).__name__, digest(dataset.features, bits=128)
        given.pretraining = f"{dataset.source}, computed elsewhere (xxh3_128 {given.checksum})"
        return given

    def forward(self, images: Tensor) -> Tensor:
        return images

    @property
    def settings(self) -> dict[str, object]:
        """What builds it again, but the width."""
        bags = {} if self.pool is None else {"pool": self.pool, "unit": self.unit}
        return {"model": self.model, **bags}

    def identity(self) -> dict[str, object]:
        return {"component": self.component, **self.settings, "xxh3": self.checksum}

    def portable(self) -> Portable:
        return Portable(self.settings, {})


class GivenText(GivenFeatures, TextEncoder):
    """The same where the class embeddings were given too (`data.class_embeddings`)."""

    prompts = ()

    embeddings: Tensor

    @classmethod
    def of(cls, dataset: ImageDataset) -> Self:
        given = super().of(dataset)
        assert isinstance(dataset, FeatureTable) and dataset.class_embeddings is not None
        given.logit_scale = dataset.logit_scale
        given.pretraining += f"; {dataset.text_source}"
        given.register_buffer("embeddings", torch.from_numpy(dataset.class_embeddings))
        return given

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
