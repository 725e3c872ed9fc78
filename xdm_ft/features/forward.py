"""Images through the encoder, shard after shard."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from xdm_ft.data import ImageDataset
from xdm_ft.data._images import UnreadableImage, memory_of, unreadable_message
from xdm_ft.encoders import Encoder
from xdm_ft.errors import UserError
from xdm_ft.features import FeatureSettings, Precision
from xdm_ft.features.file_hashes import FileHashes
from xdm_ft.features.store import Entry
from xdm_ft.features.views import View, ViewTransform
from xdm_ft.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_WORKERS = 4


class ImageBatch(NamedTuple):
    """One batch, as a DataLoader worker returns it."""

    rows: list[int]
    pixels: Tensor  # float32 [B,3,H,W], black where the image does not decode
    unreadable: dict[int, str]  # row → why its image does not decode


class EncoderInputs(Dataset[ImageBatch]):
    """Item `rows` is a whole batch. An image that does not decode is black and reported; it does not raise."""

    def __init__(self, dataset: ImageDataset, transform: ViewTransform, size: int, unreadable: dict[int, str]) -> None:
        """`unreadable`: the rows whose files are known not to be readable, with the reason."""
        self.dataset, self.transform, self.size, self.unreadable = dataset, transform, size, unreadable

    def __getitem__(self, rows: list[int]) -> ImageBatch:
        pixels = torch.zeros(len(rows), 3, self.size, self.size)
        unreadable = {row: self.unreadable[row] for row in rows if row in self.unreadable}
        for position, row in enumerate(rows):
            if row in unreadable:
                continue  # not opened: it may be a pipe, which would block for ever
            try:
                with memory_of(self.dataset, row):
                    pixels[position] = self.transform(self.dataset.image(row), row)
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
    """Computes the missing shards of an entry, except those that another process is computing."""

    encoder: Encoder  # made by `frozen_copy`
    view: View
    dataset: ImageDataset
    hashes: FileHashes
    entry: Entry
    settings: FeatureSettings
    device: torch.device
    on_bad_image: Literal["error", "skip"]

    def run(self, missing: list[int], bar: Progress) -> int:
        """Computes those of the `missing` shards that are free, and returns the number of their images.

        Raises `UserError` for an image that does not decode (unless `on_bad_image` is "skip"), for features that are
        not finite, for a file that has changed since it was hashed, and if memory or disk is full. Finished shards are
        kept.
        """
        if not any(self._is_free(number) for number in missing):
            return 0  # no workers are started for nothing, and none is forked while this check has a lock
        claims: dict[int, FileLock] = {}
        computed = 0
        try:
            for number, features, unreadable in self._computed_shards(self._batches(missing, claims)):
                rows = self.entry.layout.span(number)
                changed = self.hashes.changed_file(rows)
                if changed is not None:
                    raise UserError(
                        f"{changed}: this file was changed while features were computed; run the same command again"
                    )
                self.entry.write(number, features, unreadable)
                claims.pop(number).release()
                computed += len(rows)
                bar.advance(len(rows))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"features.batch_size: {self.settings.batch_size} images do not fit the memory of {self.device}; "
                "set a smaller one"
            ) from error
        finally:
            for lock in claims.values():
                lock.release()
        return computed

    def _is_free(self, number: int) -> bool:
        """Whether no process is computing the shard, nor has computed it."""
        lock = self.entry.claim(number)
        if lock is not None:
            lock.release()
        return lock is not None

    def _batches(self, missing: list[int], claims: dict[int, FileLock]) -> Iterator[list[int]]:
        """Yields the rows of each batch, all of one shard, whose lock is in `claims` from its first batch on."""
        for number in missing:
            lock = self.entry.claim(number)
            if lock is not None:
                claims[number] = lock
                rows = self.entry.layout.span(number)
                for first in range(0, len(rows), self.settings.batch_size):
                    yield list(rows[first : first + self.settings.batch_size])

    def _computed_shards(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, Tensor, dict[int, str]]]:
        """Yields (number, features [rows, K] in the stored precision, row → why it does not decode) of each shard."""
        parts: list[Tensor] = []
        unreadable: dict[int, str] = {}
        for images in self._load_images(batches):
            parts.append(self._features(images))
            unreadable.update(images.unreadable)
            number = images.rows[0] // self.entry.layout.rows_per_shard
            if images.rows[-1] == self.entry.layout.span(number)[-1]:
                yield number, torch.cat(parts), unreadable
                parts, unreadable = [], {}

    def _load_images(self, batches: Iterator[list[int]]) -> Iterator[ImageBatch]:
        """Yields the decoded and transformed images of each batch."""
        preprocessing = self.encoder.preprocessing
        transform = self.view.transform(preprocessing)
        inputs = EncoderInputs(self.dataset, transform, preprocessing.size, self.hashes.unreadable)
        workers = worker_count(self.settings, self.hashes)
        loader = DataLoader(
            inputs,
            batch_size=None,  # the sampler yields whole batches
            sampler=batches,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else the loader draws a seed from the global one
        )
        try:
            yield from loader
        except RuntimeError as error:
            if re.search("DataLoader worker.*(killed by signal|exited unexpectedly)", str(error)) is None:
                raise
            raise UserError(
                f"features.workers: {workers}: a process that decodes images died, most likely because memory or "
                "/dev/shm is full; set fewer (0: none), or a smaller features.batch_size "
                f"(now {self.settings.batch_size})"
            ) from error

    def _features(self, images: ImageBatch) -> Tensor:
        """float [B,K] in the stored precision, on the CPU; a row of zeros for an image that does not decode."""
        refuse_unreadable(images.unreadable, self.dataset, self.on_bad_image)
        stored = DTYPES[self.settings.precision]
        pixels = images.pixels.to(self.device, stored, non_blocking=True).contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            z = self.encoder(pixels).to("cpu", stored)
        broken = ~z.isfinite().all(1)
        if broken.any():
            name = self.dataset.name(images.rows[int(broken.nonzero()[0])])
            remedy = " or set features.precision: fp32" if self.settings.precision == "bf16" else ""
            raise UserError(f"{name}: the encoder returns features that are not finite; check encoder.weights{remedy}")
        readable = torch.tensor([row not in images.unreadable for row in images.rows])
        return z * readable[:, None]
