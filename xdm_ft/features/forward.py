"""Images through the encoder, shard after shard."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from xdm_ft.encoders import Encoder
from xdm_ft.features import FeatureSettings, Precision
from xdm_ft.features.file_hashes import FileHashes
from xdm_ft.features.store import Store
from xdm_ft.features.views import View, ViewTransform
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.images.decode import UnreadableImage, memory_of, unreadable_message
from xdm_ft.images.loader import image_loader, loaded, own_cores
from xdm_ft.images.transforms import Preprocessing, normalized
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.memory import keep_freed_memory
from xdm_ft.runtime.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IMAGES_PER_SHARD = 256  # at least, and few, so that little is lost when an extraction is killed
MAX_SHARDS = 1024  # of one extraction; more images than fit in so many shards make the shards larger
SHARD_BYTES = 2**27  # at most, if a batch takes no more: a shard is in memory until it is written


class ImageBatch(NamedTuple):
    """One batch, as a DataLoader worker returns it."""

    rows: list[int]
    pixels: Tensor  # uint8 [features.batch_size,S,S,3]; black where the image does not decode, and after the last row
    unreadable: dict[int, str]  # row → why its image does not decode


class EncoderInputs(Dataset[ImageBatch]):
    """Item `rows` is a whole batch. An image that does not decode is black and reported; it does not raise.

    Every batch has `batch_size` images: the products of a shorter one round differently. `threads` of this process
    decode the images of a batch; 0: the process that asks for it does.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        digests: np.ndarray,
        transform: ViewTransform,
        preprocessing: Preprocessing,
        batch_size: int,
        threads: int = 0,
    ) -> None:
        self.dataset, self.digests, self.transform = dataset, digests, transform
        self.shape = (batch_size, preprocessing.size, preprocessing.size, 3)
        self.least_side = preprocessing.least_side
        self._map = ThreadPoolExecutor(threads, "decoder").map if threads else map

    def __getitem__(self, rows: list[int]) -> ImageBatch:
        pixels = np.zeros(self.shape, np.uint8)
        reasons = self._map(self._decode, rows, pixels)
        unreadable = {row: reason for row, reason in zip(rows, reasons, strict=True) if reason is not None}
        return ImageBatch(rows, torch.from_numpy(pixels), unreadable)

    def _decode(self, row: int, pixels: np.ndarray) -> str | None:
        """Fills `pixels` [S,S,3]. Returns why the image does not decode, or None."""
        try:
            with memory_of(self.dataset.name(row)):
                pixels[:] = self.transform(self.dataset.draft(row, self.least_side), self.digests[row])
        except UnreadableImage as error:
            return error.reason
        return None


def refuse_unreadable(unreadable: Mapping[int, str], dataset: ImageDataset, on_bad_image: str) -> None:
    """Raises `UserError` for images that do not decode, if `on_bad_image` is "error"."""
    if unreadable and on_bad_image == "error":
        raise UserError(unreadable_message(unreadable, dataset))


def worker_count(settings: FeatureSettings, hashes: FileHashes, device: torch.device) -> int:
    """Number of processes that decode images: `features.workers`, or by default this process's share of the cores.

    By default none if the encoder runs on the same cores: each core that a worker takes from it lets all of its threads
    wait. Threads of this process then decode a batch on all cores, between two passes of the encoder.
    """
    if settings.workers is not None:
        return settings.workers
    in_memory = not hashes.files.size and not hashes.unreadable and hashes.container is None
    return 0 if in_memory or device.type == "cpu" else own_cores()


def frozen_copy(encoder: Encoder, precision: Precision, device: torch.device) -> Encoder:
    """Returns a copy of the encoder in eval mode, on the device, in the precision. The encoder itself is unchanged.

    Its memory format is channels last: on a CPU that doubled the speed of convolutional encoders, in fp32 and in bf16,
    and made no difference for ViTs. It shares the memory of weights that need not change for that.
    """
    own: dict[int, Tensor] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in encoder.parameters()}
    own |= {id(buffer): buffer.detach() for buffer in encoder.buffers()}
    model = copy.deepcopy(encoder, own).eval()
    return model.to(device, DTYPES[precision]).to(memory_format=torch.channels_last)


class UnfinishedShard(NamedTuple):
    """The images of a shard, and what is computed of them: batch after batch, in the order of `numbers`."""

    numbers: np.ndarray  # int64 [n], of the images
    parts: list[Tensor]  # [B,K] each
    unreadable: dict[int, str]  # row of the shard → why its image does not decode


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

    def part(self, numbers: np.ndarray) -> Extraction:
        """Returns the extraction of these of the store's images, which the caller's process has claimed."""
        return replace(self, store=self.store.part(numbers), rows=self.rows[numbers])

    def run(self, bar: Progress, size: int | None = None) -> int:
        """Computes the missing features that no other process computes, and returns the number of their images.

        `size`: images of a shard; None: as `images_per_shard` returns.

        Raises `UserError` for an image that does not decode (unless `on_bad_image` is "skip"), for features that are
        not finite, for a file that has changed since it was hashed, and if memory or disk is full. Finished shards are
        kept.
        """
        free = len(self.store.unclaimed())
        if not free:
            return 0  # no workers are started for nothing
        keep_freed_memory()
        computed = 0
        try:
            with ThreadPoolExecutor(1, "shard writer") as writer:  # at its end it waits for the shard that it writes
                writing = deque[tuple[np.ndarray, Future[Path]]]()
                for numbers, features, unreadable in self._computed_shards(size or self.images_per_shard(free), bar):
                    computed += self._add(writing)
                    writing.append((numbers, writer.submit(self._write, numbers, features, unreadable)))
                computed += self._add(writing)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"features.batch_size: a batch of {plural(self.settings.batch_size, 'image')} needs more memory than "
                f"{self.device} has; set a smaller one"
            ) from error
        finally:
            self.store.release()
        return computed

    def _write(self, numbers: np.ndarray, features: Tensor, unreadable: dict[int, str]) -> Path:
        """Writes a shard, in the writer's thread."""
        changed = self.hashes.changed_file(self.rows[numbers].tolist())
        if changed is not None:
            raise UserError(
                f"{changed}: this file was changed while features were computed; run the same command again"
            )
        return self.store.write(numbers, features, unreadable)

    def _add(self, writing: deque[tuple[np.ndarray, Future[Path]]]) -> int:
        """Adds the written shards to the store. Returns the number of their images, and raises what writing raised."""
        added = 0
        while writing:
            numbers, path = writing.popleft()
            self.store.add(path.result(), numbers)
            added += len(numbers)
        return added

    def images_per_shard(self, images: int) -> int:
        """Returns the size of shards if so many images are computed.

        It is a multiple of the batch size, so that only the last batch of all is padded.
        """
        batch = self.settings.batch_size
        batches = math.ceil(max(IMAGES_PER_SHARD, images / MAX_SHARDS) / batch)
        fit = SHARD_BYTES // (batch * self.store.width * self.store.dtype.itemsize)
        return batch * max(1, min(batches, fit))

    def _computed_shards(self, size: int, bar: Progress) -> Iterator[tuple[np.ndarray, Tensor, dict[int, str]]]:
        """Yields shards: (numbers of the images, features [n,K] in the stored precision, row of the shard → why its
        image does not decode). The bar advances with every batch."""
        requested = deque[UnfinishedShard]()  # the shard of each batch that was requested
        waits = Waits()
        for images, z in self._encoded(waits.of(self._load_images(self._batches(size, requested)))):
            shard = requested.popleft()
            first = sum(map(len, shard.parts))
            shard.parts.append(z)
            bar.advance(len(images.rows), waits.bound)
            shard.unreadable.update({first + images.rows.index(row): why for row, why in images.unreadable.items()})
            if first + len(images.rows) == len(shard.numbers):
                yield shard.numbers, torch.cat(shard.parts), shard.unreadable
                shard.parts.clear()

    def _batches(self, size: int, requested: deque[UnfinishedShard]) -> Iterator[list[int]]:
        """Claims `size` images after `size` images, and yields the rows of each batch.

        A loader gives its workers batches in turn. Images that lie in pieces of large files are claimed for all workers
        at once, so that each worker has the batches of one shard, and reads its pieces alone.
        """
        in_pieces = self.hashes.container is not None
        shards = max(1, worker_count(self.settings, self.hashes, self.device)) if in_pieces else 1
        while len(numbers := self.store.claim(shards * size)):
            batches = list[list[tuple[UnfinishedShard, list[int]]]]()
            for first in range(0, len(numbers), size):
                shard = UnfinishedShard(numbers[first : first + size], [], {})
                rows = self.rows[shard.numbers].tolist()
                starts = range(0, len(rows), self.settings.batch_size)
                batches.append([(shard, rows[start : start + self.settings.batch_size]) for start in starts])
            for turn in itertools.zip_longest(*batches):
                for batch in turn:
                    if batch is not None:
                        requested.append(batch[0])
                        yield batch[1]

    def _load_images(self, batches: Iterator[list[int]]) -> Iterator[ImageBatch]:
        """Yields the decoded and transformed images of each batch."""
        preprocessing = self.encoder.preprocessing
        workers = worker_count(self.settings, self.hashes, self.device)
        inputs = EncoderInputs(
            self.dataset,
            self.hashes.digests,
            self.view.transform(preprocessing),
            preprocessing,
            self.settings.batch_size,
            threads=0 if workers else own_cores(),
        )
        loader = image_loader(inputs, workers, self.device, batch_size=None, sampler=batches)  # it yields whole batches
        smaller = f"set fewer (0: none), or a smaller features.batch_size (now {self.settings.batch_size})"
        yield from loaded(loader, f"features.workers: {workers}", smaller)

    def _encoded(self, batches: Iterator[ImageBatch]) -> Iterator[tuple[ImageBatch, Tensor]]:
        """Yields batches with their features, float [B,K] in the stored precision, on the CPU.

        A GPU computes a batch while the features of the one before are copied and checked.
        """
        ahead = 0 if self.device.type == "cpu" else 1
        computed = deque[tuple[ImageBatch, Tensor, torch.cuda.Event | None]]()
        for images in batches:
            computed.append((images, *self._begun(images)))
            if len(computed) > ahead:
                yield self._finished(*computed.popleft())
        while computed:
            yield self._finished(*computed.popleft())

    def _begun(self, images: ImageBatch) -> tuple[Tensor, torch.cuda.Event | None]:
        """Returns float [B,K] on the CPU, which is filled when the event has happened; None: it is filled."""
        stored, n = DTYPES[self.settings.precision], len(images.rows)
        pixels = images.pixels.to(self.device, non_blocking=True)
        with torch.inference_mode():
            z = self.encoder(normalized(pixels, self.encoder.preprocessing).to(stored))[:n].to(stored)
        if self.device.type != "cuda":
            return z.cpu(), None
        on_host = torch.empty(z.shape, dtype=stored, pin_memory=True)
        on_host.copy_(z, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return on_host, event

    def _finished(self, images: ImageBatch, z: Tensor, event: torch.cuda.Event | None) -> tuple[ImageBatch, Tensor]:
        """Returns the batch with its checked features; a row of zeros for an image that does not decode."""
        refuse_unreadable(images.unreadable, self.dataset, self.on_bad_image)
        if event is not None:
            event.synchronize()
        broken = ~z.isfinite().all(1)
        if broken.any():
            name = self.dataset.name(images.rows[int(broken.nonzero()[0])])
            remedy = " or set features.precision: fp32" if self.settings.precision != "fp32" else ""
            raise UserError(f"{name}: the encoder returns features that are not finite; check encoder.weights{remedy}")
        readable = torch.tensor([row not in images.unreadable for row in images.rows])
        return images, z * readable[:, None]


class Elsewhere(NamedTuple):
    """Where features are computed, if not in this process."""

    device: torch.device  # of that kind
    run: Callable[[Extraction, Progress], int]
    """As `Extraction.run`; the encoder is not a `frozen_copy`. Called by a process that may lack the device."""


class Waits:
    """The time that an extraction waits for decoded images, and all of its time."""

    def __init__(self) -> None:
        self.started, self.waited = time.perf_counter(), 0.0

    def of(self, batches: Iterator[ImageBatch]) -> Iterator[ImageBatch]:
        """Yields the same batches."""
        while True:
            asked = time.perf_counter()
            images = next(batches, None)
            self.waited += time.perf_counter() - asked
            if images is None:
                return
            yield images

    @property
    def bound(self) -> str:
        """What limits the speed, for the bar."""
        decoding = self.waited > (time.perf_counter() - self.started) / 2
        return "limited by decoding" if decoding else "limited by the encoder"
