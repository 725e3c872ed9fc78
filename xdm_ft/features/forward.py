"""Images through the encoder, shard after shard."""

from __future__ import annotations

import copy
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from xdm_ft.data import ImageDataset
from xdm_ft.data._images import UnreadableImage, memory_of, unreadable_message
from xdm_ft.data._loading import image_loader, loaded
from xdm_ft.encoders import Encoder
from xdm_ft.errors import UserError, plural
from xdm_ft.features import FeatureSettings, Precision
from xdm_ft.features.file_hashes import FileHashes
from xdm_ft.features.store import Store
from xdm_ft.features.views import View, ViewTransform
from xdm_ft.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_WORKERS = 4
IMAGES_PER_SHARD = 256  # at least, and few, so that little is lost when an extraction is killed
MAX_SHARDS = 1024  # of one extraction; more images than fit in so many shards make the shards larger
SHARD_BYTES = 2**27  # at most, if a batch takes no more: a shard is in memory until it is written


class ImageBatch(NamedTuple):
    """One batch, as a DataLoader worker returns it."""

    rows: list[int]
    pixels: Tensor  # float32 [features.batch_size,3,H,W]; black where the image does not decode, and after the last row
    unreadable: dict[int, str]  # row → why its image does not decode


class EncoderInputs(Dataset[ImageBatch]):
    """Item `rows` is a whole batch. An image that does not decode is black and reported; it does not raise.

    Every batch has `batch_size` images: the products of a shorter one round differently.
    """

    def __init__(
        self, dataset: ImageDataset, digests: np.ndarray, transform: ViewTransform, size: int, batch_size: int
    ) -> None:
        self.dataset, self.digests, self.transform = dataset, digests, transform
        self.shape = (batch_size, 3, size, size)

    def __getitem__(self, rows: list[int]) -> ImageBatch:
        pixels = torch.zeros(self.shape)
        unreadable = {}
        for position, row in enumerate(rows):
            try:
                with memory_of(self.dataset.name(row)):
                    pixels[position] = self.transform(self.dataset.image(row), self.digests[row])
            except UnreadableImage as error:
                unreadable[row] = error.reason
        return ImageBatch(rows, pixels, unreadable)


def refuse_unreadable(unreadable: Mapping[int, str], dataset: ImageDataset, on_bad_image: str) -> None:
    """Raises `UserError` for images that do not decode, if `on_bad_image` is "error"."""
    if unreadable and on_bad_image == "error":
        raise UserError(unreadable_message(unreadable, dataset))


def worker_count(settings: FeatureSettings, hashes: FileHashes) -> int:
    """Number of processes that decode images: `features.workers`, or by default this process's share of the cores."""
    if settings.workers is not None:
        return settings.workers
    if not hashes.files and not hashes.unreadable:
        return 0  # all images are in memory
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // processes))


def frozen_copy(encoder: Encoder, precision: Precision, device: torch.device) -> Encoder:
    """Returns a copy of the encoder in eval mode, on the device, in the precision. The encoder itself is unchanged.

    Its memory format is channels last: on a CPU that doubled the speed of convolutional encoders, in fp32 and in bf16,
    and made no difference for ViTs.
    """
    model = copy.deepcopy(encoder).eval().requires_grad_(False)
    return model.to(device, DTYPES[precision]).to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Extraction:
    """Computes the missing features of a store, except those that another process is computing."""

    encoder: Encoder  # made by `frozen_copy`
    view: View
    dataset: ImageDataset
    hashes: FileHashes
    store: Store
    rows: np.ndarray  # int64 [M], the row of each of the store's images
    settings: FeatureSettings
    device: torch.device
    on_bad_image: Literal["error", "skip"]

    def run(self, bar: Progress) -> int:
        """Computes the missing features that no other process computes, and returns the number of their images.

        Raises `UserError` for an image that does not decode (unless `on_bad_image` is "skip"), for features that are
        not finite, for a file that has changed since it was hashed, and if memory or disk is full. Finished shards are
        kept.
        """
        free = len(self.store.unclaimed())
        if not free:
            return 0  # no workers are started for nothing
        computed = 0
        try:
            for numbers, features, unreadable in self._computed_shards(self._images_per_shard(free), bar):
                changed = self.hashes.changed_file(self.rows[numbers].tolist())
                if changed is not None:
                    raise UserError(
                        f"{changed}: this file was changed while features were computed; run the same command again"
                    )
                self.store.write(numbers, features, unreadable)
                computed += len(numbers)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"features.batch_size: a batch of {plural(self.settings.batch_size, 'image')} needs more memory than "
                f"{self.device} has; set a smaller one"
            ) from error
        finally:
            self.store.release()
        return computed

    def _images_per_shard(self, images: int) -> int:
        """A multiple of the batch size, so that only the last batch of all is padded."""
        batch = self.settings.batch_size
        batches = math.ceil(max(IMAGES_PER_SHARD, images / MAX_SHARDS) / batch)
        fit = SHARD_BYTES // (batch * self.store.width * self.store.dtype.itemsize)
        return batch * max(1, min(batches, fit))

    def _computed_shards(self, size: int, bar: Progress) -> Iterator[tuple[np.ndarray, Tensor, dict[int, str]]]:
        """Yields shards: (numbers of the images, features [n,K] in the stored precision, row of the shard → why its
        image does not decode). The bar advances with every batch."""
        claimed = deque[np.ndarray]()  # the shards of the batches that were requested
        parts: list[Tensor] = []
        unreadable: dict[int, str] = {}
        for images in self._load_images(self._batches(size, claimed)):
            first = sum(map(len, parts))
            parts.append(self._features(images))
            bar.advance(len(images.rows))
            unreadable |= {first + images.rows.index(row): reason for row, reason in images.unreadable.items()}
            if first + len(images.rows) == len(claimed[0]):
                yield claimed.popleft(), torch.cat(parts), unreadable
                parts, unreadable = [], {}

    def _batches(self, size: int, claimed: deque[np.ndarray]) -> Iterator[list[int]]:
        """Claims `size` images after `size` images, and yields the rows of each batch."""
        while len(numbers := self.store.claim(size)):
            claimed.append(numbers)
            rows = self.rows[numbers].tolist()
            for first in range(0, len(rows), self.settings.batch_size):
                yield rows[first : first + self.settings.batch_size]

    def _load_images(self, batches: Iterator[list[int]]) -> Iterator[ImageBatch]:
        """Yields the decoded and transformed images of each batch."""
        preprocessing = self.encoder.preprocessing
        transform = self.view.transform(preprocessing)
        inputs = EncoderInputs(
            self.dataset, self.hashes.digests, transform, preprocessing.size, self.settings.batch_size
        )
        workers = worker_count(self.settings, self.hashes)
        loader = image_loader(inputs, workers, self.device, batch_size=None, sampler=batches)  # it yields whole batches
        smaller = f"set fewer (0: none), or a smaller features.batch_size (now {self.settings.batch_size})"
        yield from loaded(loader, f"features.workers: {workers}", smaller)

    def _features(self, images: ImageBatch) -> Tensor:
        """float [B,K] in the stored precision, on the CPU; a row of zeros for an image that does not decode."""
        refuse_unreadable(images.unreadable, self.dataset, self.on_bad_image)
        stored = DTYPES[self.settings.precision]
        pixels = images.pixels.to(self.device, stored, non_blocking=True).contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            z = self.encoder(pixels)[: len(images.rows)].to("cpu", stored)
        broken = ~z.isfinite().all(1)
        if broken.any():
            name = self.dataset.name(images.rows[int(broken.nonzero()[0])])
            remedy = " or set features.precision: fp32" if self.settings.precision != "fp32" else ""
            raise UserError(f"{name}: the encoder returns features that are not finite; check encoder.weights{remedy}")
        readable = torch.tensor([row not in images.unreadable for row in images.rows])
        return z * readable[:, None]
