"""Features that the data set has already: they stand where an encoder and its cache stand otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from xdm_ft.data.features import FeatureTable
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.features.cache import Features
from xdm_ft.images import ImageDataset
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import digest

NO_IMAGES = "data.name: features has no images, only features computed elsewhere"


class GivenFeatures(Encoder):
    """What stands for the encoder of such features: their width and where they come from. It encodes nothing."""

    normalize = False
    stage_names = ()
    preprocessing = Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), size=1)  # nothing reads images

    def __init__(self, dataset: ImageDataset) -> None:
        super().__init__()
        assert isinstance(dataset, FeatureTable), "of a recipe with data.name: features"
        self.width = dataset.features.shape[1]
        self.file, self.checksum = dataset.file_name, digest(dataset.features, bits=128)
        self.pretraining = f"features of {self.file}, computed elsewhere (xxh3_128 {self.checksum})"

    def forward(self, images: Tensor) -> Tensor:
        raise UserError(f"{NO_IMAGES}; use data with images and an encoder for this")

    def identity(self) -> dict[str, object]:
        return {"component": FeatureTable.__name__, "model": self.file, "xxh3": self.checksum}

    def portable(self) -> Portable:
        raise UserError(f"{NO_IMAGES}; there is no encoder to export")


def given_features(dataset: ImageDataset, device: torch.device) -> Features:
    """Returns the features of every row, as `extract` does for images."""
    assert isinstance(dataset, FeatureTable), "of a recipe with data.name: features"
    return Features([torch.from_numpy(dataset.features)], device=device)
