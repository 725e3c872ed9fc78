"""Images through the encoder, shard after shard."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from xdm_ft.data import ImageDataset
from xdm_ft.data._images import UnreadableImage, unreadable_message
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
    """A batch as a DataLoader worker hands it over."""

    rows: list[int]
    pixels: Tensor  # float32 [B,3,H,W], black where the image does not decode
    unreadable: dict[int, str]


class EncoderInputs(Dataset[ImageBatch]):
    """Item `rows` is the whole batch. An image that does not decode is part of it, instead of the end of it."""

    def __init__(self, dataset: ImageDataset, transform: ViewTransform, size: int, known_bad: dict[int, str]) -> None:
        self.dataset, self.transform, self.size, self.known_bad = dataset, transform, size, known_bad

    def __getitem__(self, rows: list[int]) -> ImageBatch:
        pixels = torch.zeros(len(rows), 3, self.size, self.size)
        unreadable = {row: self.known_bad[row] for row in rows if row in self.known_bad}
        for place, row in enumerate(rows):
            if row in unreadable:
                continue  # not opened: it may be a pipe, which would wait for ever
            try:
                pixels[place] = self.transform(self.dataset.image(row), row)
            except UnreadableImage as error:
                unreadable[row] = error.reason
        return ImageBatch(rows, pixels, unreadable)


def worker_count(settings: FeatureSettings, hashes: FileHashes) -> int:
    """`features.workers`, or its default. Processes on one machine share its cores."""
    if settings.workers is not None:
        return settings.workers
    if not hashes.files and not hashes.unreadable:
        return 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // processes))


def frozen_copy(encoder: Encoder, precision: Precision, device: torch.device) -> Encoder:
    """The encoder in eval mode on the device and in the precision, channels last; the caller's stays as it is.

    Channels last doubled the speed of convolutional encoders on a CPU, in fp32 and in bf16, and did nothing to ViTs.
    """
    model = copy.deepcopy(encoder).eval().requires_grad_(False)
    return model.to(device, DTYPES[precision]).to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Extraction:
    """Computes the shards of an entry that are missing and that no other process is computing."""

    encoder: Encoder  # as `frozen_copy` gives it
    view: View
    dataset: ImageDataset
    hashes: FileHashes
    entry: Entry
    settings: FeatureSettings
    device: torch.device
    on_bad_image: Literal["error", "skip"]

    def run(self, missing: list[int], bar: Progress) -> int:
        """One pass over `missing`; the number of images computed.

        Raises `UserError` for images that do not decode (unless they are to be skipped), features that are not finite,
        files that change meanwhile, and want of memory or disk. Shards finished by then stay.
        """
        if not any(self._is_free(number) for number in missing):
            return 0  # before workers are started, and before they inherit a lock
        claims: dict[int, FileLock] = {}
        computed = 0
        try:
            for number, features, unreadable in self._shards(self._batches(missing, claims)):
                rows = self.entry.layout.span(number)
                changed = self.hashes.changed_file(rows)
                if changed is not None:
                    raise UserError(f"{changed}: changed while features were computed; run the same command again")
                self.entry.write(number, features, unreadable)
                claims.pop(number).release()
                computed += len(rows)
                bar.advance(len(rows))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"features.batch_size: {self.settings.batch_size} images do not fit the memory of {self.device}; "
                "lower it"
            ) from error
        finally:
            for lock in claims.values():
                lock.release()
        return computed

    def _is_free(self, number: int) -> bool:
        lock = self.entry.claim(number)
        if lock is not None:
            lock.release()
        return lock is not None

    def _batches(self, missing: list[int], claims: dict[int, FileLock]) -> Iterator[list[int]]:
        """Rows of every batch; a shard is claimed when its first batch is asked for. No batch crosses a shard."""
        for number in missing:
            lock = self.entry.claim(number)
            if lock is not None:
                claims[number] = lock
                rows = self.entry.layout.span(number)
                for first in range(0, len(rows), self.settings.batch_size):
                    yield list(rows[first : first + self.settings.batch_size])

    def _shards(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, Tensor, dict[int, str]]]:
        """Number, features [rows, K] in the stored precision, and the images that do not decode, shard by shard."""
        parts: list[Tensor] = []
        unreadable: dict[int, str] = {}
        for images in self._loaded(batches):
            parts.append(self._features(images))
            unreadable.update(images.unreadable)
            number = images.rows[0] // self.entry.layout.rows_per_shard
            if images.rows[-1] == self.entry.layout.span(number)[-1]:
                yield number, torch.cat(parts), unreadable
                parts, unreadable = [], {}

    def _loaded(self, batches: Iterator[list[int]]) -> Iterator[ImageBatch]:
        preprocessing = self.encoder.preprocessing
        transform = self.view.transform(preprocessing)
        inputs = EncoderInputs(self.dataset, transform, preprocessing.size, self.hashes.unreadable)
        workers = worker_count(self.settings, self.hashes)
        loader = DataLoader(
            inputs,
            batch_size=None,
            sampler=batches,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # the loader would otherwise draw from the global one
        )
        try:
            yield from loader
        except RuntimeError as error:
            if re.search("DataLoader worker.*(killed by signal|exited unexpectedly)", str(error)) is None:
                raise
            raise UserError(
                f"features.workers: a decoding process died, most likely for want of memory or of room in /dev/shm "
                f"({workers} processes, {self.settings.batch_size} images at once); lower features.workers, 0 uses none"
            ) from error

    def _features(self, images: ImageBatch) -> Tensor:
        """[B,K] in the stored precision, on the CPU; zero for an image that does not decode."""
        if images.unreadable and self.on_bad_image == "error":
            raise UserError(unreadable_message(images.unreadable, self.dataset))
        stored = DTYPES[self.settings.precision]
        pixels = images.pixels.to(self.device, stored, non_blocking=True).contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            z = self.encoder(pixels).to("cpu", stored)
        wrong = ~z.isfinite().all(1)
        if wrong.any():
            name = self.dataset.name(images.rows[int(wrong.nonzero()[0])])
            remedy = " or set features.precision: fp32" if self.settings.precision == "bf16" else ""
            raise UserError(f"{name}: the encoder gives features that are not finite; check encoder.weights{remedy}")
        readable = torch.tensor([row not in images.unreadable for row in images.rows])
        return z * readable[:, None]
