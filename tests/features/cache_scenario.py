"""A tiny data set and encoder for the tests of the cache; as a script, a process that extracts features.

`python cache_scenario.py CACHE IMAGES SECONDS_PER_BATCH VIEWS` prints the number of images that it computed, and a hash
of the features of all views.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
import xxhash
from PIL import Image
from torch import Tensor, nn

from xdm_ft.augmentations import Augmentations
from xdm_ft.augmentations.domainbed import DomainBed
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.features import FeatureSettings
from xdm_ft.features import extract as extraction
from xdm_ft.features.cache import Features, cache_folder
from xdm_ft.features.extract import extract
from xdm_ft.features.hashes import hash_files
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import decode
from xdm_ft.images.transforms import Preprocessing

SIZE, WIDTH = 8, 5
SHARD = 32  # images per shard, instead of hundreds


class Pixels(ImageDataset):
    """Images in memory, row i filled with noise of seed i."""

    def __init__(self, rows: int, first_seed: int = 0) -> None:
        self.class_names, self.domain_names = ("cat", "dog"), ("photo", "sketch")
        self.labels, self.domains = np.arange(rows) % 2, np.arange(rows) // 2 % 2
        self.pixels = [_noise(first_seed + row) for row in range(rows)]

    def image(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row])

    def name(self, row: int) -> str:
        return f"pixels {row}"

    def content(self, row: int) -> bytes:
        return self.pixels[row].tobytes()


class Files(ImageDataset):
    """The image files of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.class_names, self.domain_names = ("cat", "dog"), ("photo", "sketch")
        self.paths = sorted(folder.iterdir())
        self.labels, self.domains = np.arange(len(self.paths)) % 2, np.arange(len(self.paths)) // 2 % 2

    def image(self, row: int) -> Image.Image:
        return decode(self.paths[row], self.name(row))

    def name(self, row: int) -> str:
        return str(self.paths[row])

    def content(self, row: int) -> str:
        return str(self.paths[row])


def _noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def write_images(folder: Path, rows: int) -> Path:
    folder.mkdir()
    for row in range(rows):
        Image.fromarray(_noise(row)).save(folder / f"{row:05d}.png")
    return folder


class Tiny(Encoder):
    """A convolution and a linear layer. Each batch takes `seconds` longer; `seen` counts the images."""

    def __init__(self, seed: int = 0, seconds: float = 0.0, size: int = SIZE, argument: str = "a") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.convolution, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, WIDTH)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.width = WIDTH
        self.preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=size)
        self.stage_names, self.pretraining, self.normalize = (), "none", False
        self.seconds, self.argument, self.seen = seconds, argument, [0]
        self.eval()

    def __deepcopy__(self, memo: dict[int, object]) -> Tiny:
        copy = Tiny(0, self.seconds, self.preprocessing.size, self.argument)
        copy.load_state_dict(self.state_dict())
        copy.seen = self.seen  # one count for the encoder and its copies
        return copy

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.seconds)
        self.seen[0] += len(images)
        images = images.to(self.linear.weight.dtype)
        return self.linear(self.convolution(images).relu().mean((2, 3))).float()

    def identity(self) -> dict[str, object]:
        return {"component": "tiny", "argument": self.argument}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


def features_of(dataset: ImageDataset, cache: Path, encoder: Encoder | None = None, **settings: object) -> Features:
    """`extract` with defaults for the tests. `settings` are keys of `FeatureSettings`, or arguments of `extract`."""
    arguments = {"on_bad_image": settings.pop("on_bad_image", "error"), "device": "cpu", "show": False}
    arguments["augmentations"] = [Augmentations([DomainBed()])] if settings.get("views") else []
    arguments["elsewhere"] = settings.pop("elsewhere", None)
    block = FeatureSettings.model_validate({"dir": cache, "batch_size": 16, "workers": 0, **settings})
    hashes = hash_files(dataset, cache_folder(block), show=False)
    return extract(encoder or Tiny(), dataset, hashes, block, **arguments)


def digest(features: Features) -> str:
    rows, numbers = torch.arange(len(features)), torch.arange(1 + features.views)[:, None]
    return xxhash.xxh3_64_hexdigest(features.of_views(rows, numbers).numpy().tobytes())


def main(cache: Path, images: Path, seconds_per_batch: float, views: int) -> None:
    torch.set_num_threads(1)
    extraction.IMAGES_PER_SHARD = SHARD
    features = features_of(Files(images), cache, Tiny(seconds=seconds_per_batch), workers=1, views=views)
    print(features.extracted, digest(features), flush=True)


if __name__ == "__main__":
    import cache_scenario  # under the name that its classes have in the tests: a reader's name is part of the key

    cache_scenario.main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
