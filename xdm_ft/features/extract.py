"""Features of a data set: read from the cache, or computed and added to it.

`extract` reads from top to bottom: what the cache has, what is missing, who computes it. `Extraction` takes images
through the encoder, shard after shard.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from xdm_ft.augmentations import Augmentations
from xdm_ft.encoders import Encoder
from xdm_ft.features import FeatureSettings, Precision
from xdm_ft.features.cache import Features, Lookup, ShardFiles, Store, cache_folder, cache_path
from xdm_ft.features.hashes import DistinctImages, FileHashes
from xdm_ft.features.key import View, all_views, key_of, key_parts
from xdm_ft.features.maintenance import stores
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import memory_of, unreadable_message
from xdm_ft.images.loader import DTYPES, FORKS, PixelBatch, decoding_workers, pixel_batches
from xdm_ft.images.transforms import normalize
from xdm_ft.model_sources.source import first_few, not_finite
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.machine import own_cores, retain_freed_memory, warn_of_slow_bf16
from xdm_ft.runtime.progress import Progress, progress
from xdm_ft.runtime.watchdog import from_main, gather
from xdm_ft.storage.atomic import is_writable

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
IMAGES_PER_SHARD = 256  # at least, and few, so that little is lost when an extraction is killed
MAX_SHARDS = 1024  # of one extraction; more images than fit in so many shards make the shards larger
SHARD_BYTES = 2**27  # at most, if a batch takes no more: a shard is in memory until it is written


class RemoteExtraction(NamedTuple):
    """Where features are computed, if not in this process."""

    device: torch.device  # of that kind
    run: Callable[[Extraction, np.ndarray, int, Progress], int]
    """As `Extraction.run`; the encoder is not a `frozen_copy`. Called by a process that may lack the device."""


def extract(
    encoder: Encoder,
    dataset: ImageDataset,
    hashes: FileHashes,
    settings: FeatureSettings,
    *,
    on_bad_image: Literal["error", "skip"],
    device: torch.device | str,
    show: bool,
    augmentations: Sequence[Augmentations] = (),
    streamed: bool = False,
    elsewhere: RemoteExtraction | None = None,
    accelerator: Accelerator | None = None,
) -> Features:
    """Returns the features of every row, in the plain view and in `settings.views` views of each augmentation.

    `device`: where they will be, and where they are computed, unless `elsewhere`.
    `streamed`: they are read from their files each time, for features that are large (activations of a cut).
    `accelerator`: its processes divide the images, and all call this.

    Features that are missing in the cache are computed and added to it, once for equal images. Another run that needs
    the same features waits. Raises `UserError` for images that do not decode if `on_bad_image` is "error". Finished
    shards stay in the cache.
    """
    device = torch.device(device)
    refuse_unreadable(hashes.unreadable, dataset, on_bad_image)
    images = hashes.images
    computing = device if elsewhere is None else elsewhere.device
    views = cached_views(encoder, dataset, images, settings, augmentations, computing)
    # the main process's view of the disk for all: who skips `_fill` would miss its collective operations
    missing = from_main(accelerator, [len(store.missing()) for _, store in views])
    model = encoder
    if any(missing):
        _require_room([store for _, store in views], sum(missing))
        model = frozen_copy(encoder, settings.precision, device) if elsewhere is None else encoder
    extracted, unreadable = 0, dict[int, str]()  # a long strip may decode in augmented views, which see a part of it
    for (view, store), count in zip(views, missing, strict=True):
        if count:
            extraction = Extraction(model, view, dataset, hashes, store, images.rows, settings, computing, on_bad_image)
            run = extraction.run if elsewhere is None else partial(elsewhere.run, extraction)
            what = f"features, {view.augmentation}, view {view.number}" if view.number else "features"
            extracted += _fill(extraction, run, what, show, accelerator)
        # in all processes, also if the first lacks nothing: a network disk lists shards late, or the folder is another
        store.open(gather(accelerator, [shard.path.name for shard in store.shards]))
        if lacking := max(gather(accelerator, [len(store.missing())])):
            raise UserError(
                f"features.dir: {store.cache} lacks {store.what} of {plural(lacking, 'image')}, which another "
                "process wrote; share this folder between all processes, and delete nothing in it during the run"
            )
        unreadable |= hashes.unreadable_rows(store.unreadable())
        refuse_unreadable(unreadable, dataset, on_bad_image)

    paths, positions, rows = list[tuple[Path, str]](), [], 1  # row 0: of zeros, for images without features
    for _, store in views:
        first = rows + np.cumsum([0, *(len(shard.contents) for shard in store.shards)])
        positions.append(np.where(images.number_of < 0, 0, (first[store.shard_of] + store.row_of)[images.number_of]))
        paths += [(shard.path, store.key) for shard in store.shards]
        rows = int(first[-1])
    files = ShardFiles(tuple(paths), encoder.width, DTYPES[settings.precision], streamed)
    return Features(
        files.shards(shard.features for _, store in views for shard in store.shards),
        torch.from_numpy(np.stack(positions)),
        key=views[0][1].key,
        unreadable=unreadable,
        extracted=extracted,
        device=device,
        streamed=streamed,
        files=files,
    )


def _require_room(stores_of_views: Sequence[Store], missing: int) -> None:
    """Raises `UserError` if the missing features cannot be written, for lack of permission or of space.

    Logs, once for a new store, that the cache has features of another version: why all are computed again.
    """
    plain, *others = stores_of_views
    if not is_writable(plain.cache):
        raise UserError(
            f"features.dir: {plain.cache} cannot be written, and lacks {plain.what} of {plural(missing, 'image')}; "
            f"set features.dir to a folder of your own{plain.instead}"
        )
    plain.require_space(sum(store.bytes_needed for store in others))
    cached_stores = [] if plain.folder.exists() else stores(plain.cache)
    if outdated := [cached for cached in cached_stores if cached.is_outdated]:
        logger.info(
            "%s: %s of features are from another version of xdm_ft and cannot be read; list them with `xdm-ft cache "
            "ls`, delete them with `xdm-ft cache prune`", plain.cache, plural(len(outdated), "set"),
        )  # fmt: skip


def _fill(
    extraction: Extraction,
    run: Callable[[np.ndarray, int, Progress], int],
    what: str,
    show: bool,
    accelerator: Accelerator | None,
) -> int:
    """Computes what the store lacks, and returns the number of images that all processes computed.

    The main process holds the store's lock for all. Of W processes the one of rank r computes the shards r, r + W, ….
    """
    store = extraction.store
    rank, ranks = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    with store.filling() if rank == 0 else nullcontext():
        numbers = from_main(accelerator, store.missing() if rank == 0 else store.row_of[:0])
        size = extraction.images_per_shard(len(numbers))
        shards = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        mine = np.concatenate([numbers[:0], *shards[rank::ranks]])
        with progress(what, len(mine), "images", show) as bar:
            return sum(gather(accelerator, [run(mine, size, bar)]))


def cached_views(
    encoder: Encoder,
    dataset: ImageDataset,
    images: DistinctImages,
    settings: FeatureSettings,
    augmentations: Sequence[Augmentations],
    device: torch.device,
) -> list[tuple[View, Store]]:
    """Returns the plain view and `settings.views` ones of each augmentation, and the stores of their features."""
    cache, dtype = cache_folder(settings), DTYPES[settings.precision]
    parts = key_parts(encoder, dataset.decoder, settings.precision, device)
    views = []
    for view in all_views(augmentations, settings.views):
        of_view = {**parts, **view.key_parts(encoder.preprocessing)}
        views.append((view, Store(cache, of_view, images.contents, encoder.width, dtype)))
    return views


def cached_images(
    encoder: Encoder,
    decoder: str,
    settings: FeatureSettings,
    augmentations: Sequence[Augmentations],
    device: torch.device,
) -> list[int]:
    """Returns for each view how many images the cache holds under the key of these settings, of whatever data set."""
    folder, parts = cache_path(settings), key_parts(encoder, decoder, settings.precision, device)
    keys = [
        key_of({**parts, **view.key_parts(encoder.preprocessing)}) for view in all_views(augmentations, settings.views)
    ]
    return [len(Lookup(folder / key, key, encoder.width, DTYPES[settings.precision])) for key in keys]


def refuse_unreadable(unreadable: Mapping[int, str], dataset: ImageDataset, on_bad_image: str) -> None:
    """Raises `UserError` for images that do not decode, if `on_bad_image` is "error"."""
    if unreadable and on_bad_image == "error":
        raise UserError(unreadable_message(unreadable, dataset))


def frozen_copy(encoder: Encoder, precision: Precision, device: torch.device) -> Encoder:
    """Returns a copy of the encoder in eval mode, on the device, in the precision. The encoder itself is unchanged.

    Its memory format is channels last: on a CPU that doubled the speed of convolutional encoders, in fp32 and in bf16,
    and made no difference for ViTs. It shares the memory of weights that need not change for that. Raises `UserError`
    if weights are too large for the precision.
    """
    shared: dict[int, Tensor] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in encoder.parameters()}
    shared |= {id(buffer): buffer.detach() for buffer in encoder.buffers()}
    if precision == "bf16" and device.type == "cpu":
        warn_of_slow_bf16("precision", "fp32")
    model = copy.deepcopy(encoder, shared).eval().to(device, DTYPES[precision])
    if DTYPES[precision] == torch.float16 and (broken := not_finite(model.state_dict())):
        raise UserError(f"precision: fp16: weights are too large for it ({first_few(broken)}); use bf16 or fp32")
    return model.to(memory_format=torch.channels_last)


class UnfinishedShard(NamedTuple):
    """The images of a shard, and what is computed of them: batch after batch, in the order of `numbers`."""

    numbers: np.ndarray  # int64 [n], of the images
    parts: list[Tensor]  # [B,K] each, in the stored precision
    unreadable: dict[int, str]  # row of the shard → why its image does not decode


@dataclass(frozen=True)
class Extraction:
    """Computes features of a view, and adds them to its store."""

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
        """Returns the extraction of these of the store's images alone."""
        return replace(self, store=self.store.part(numbers), rows=self.rows[numbers])

    def images_per_shard(self, images: int) -> int:
        """Returns the size of shards if so many images are computed.

        It is a multiple of the batch size, so that only the last batch of all is padded.
        """
        batch = self.settings.batch_size
        batches = math.ceil(max(IMAGES_PER_SHARD, images / MAX_SHARDS) / batch)
        fit = SHARD_BYTES // (batch * self.store.width * self.store.dtype.itemsize)
        return batch * max(1, min(batches, fit))

    def run(self, images: np.ndarray, size: int, bar: Progress) -> int:
        """Computes these images (int64 [n], all missing in the store), `size` in a shard, and returns their number.

        Raises `UserError` for an image that does not decode (unless `on_bad_image` is "skip"), for features that are
        not finite, for a file that has changed since it was hashed, and if memory or disk is full. Finished shards are
        kept.
        """
        if not len(images):
            return 0  # no workers are started for nothing

        def write(shard: UnfinishedShard) -> Path:
            changed = self.hashes.changed_file(self.rows[shard.numbers].tolist())
            if changed is not None:
                raise UserError(
                    f"{changed}: this file was changed while features were computed; run the same command again"
                )
            return self.store.write(shard.numbers, torch.cat(shard.parts), shard.unreadable)

        retain_freed_memory()
        try:
            # a thread, so that the encoder computes the next shard while the disk is slow
            with ThreadPoolExecutor(1, "shard writer") as writer:  # at its end it waits for the shard that it writes
                writing: tuple[np.ndarray, Future[Path]] | None = None
                for shard in itertools.chain(self._computed_shards(images, size, bar), [None]):
                    if writing is not None:
                        self.store.add(writing[1].result(), writing[0])
                    if shard is not None:
                        writing = shard.numbers, writer.submit(write, shard)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"features.batch_size: a batch of {plural(self.settings.batch_size, 'image')} needs more memory than "
                f"{self.device} has; set a smaller one"
            ) from error
        return len(images)

    def _computed_shards(self, numbers: np.ndarray, size: int, bar: Progress) -> Iterator[UnfinishedShard]:
        """Yields the shards when they are complete. The bar advances with every batch.

        A GPU computes a batch while the features of the one before are copied and checked.
        """
        preprocessing, workers, hashes = self.encoder.preprocessing, self.settings.workers, self.hashes
        if workers is None:
            in_memory = not hashes.files.size and not hashes.unreadable and hashes.container is None
            workers = 0 if in_memory else decoding_workers(self.device, own_cores())
        workers = workers if FORKS else 0  # `read` cannot be pickled
        transform, side = self.view.transform(preprocessing), preprocessing.size
        requested = deque[UnfinishedShard]()  # the shard of each batch that was requested
        computed = deque[tuple[PixelBatch[int], Tensor, torch.cuda.Event | None]]()

        def read(row: int) -> Image.Image:
            with memory_of(self.dataset.name(row)):
                return transform(self.dataset.draft(row, preprocessing.least_side), hashes.digests[row])

        rows, shape = self._batches(numbers, size, workers, requested), (self.settings.batch_size, side, side, 3)
        smaller = f"set fewer (0: none), or a smaller features.batch_size (now {self.settings.batch_size})"
        batches = pixel_batches(rows, read, shape, self.device, workers, f"features.workers: {workers}", smaller)
        started, seconds_waited, is_last = time.perf_counter(), 0.0, False
        while not is_last:
            asked = time.perf_counter()
            batch = next(batches, None)
            seconds_waited += time.perf_counter() - asked  # for decoded images
            is_last = batch is None
            if batch is not None:
                computed.append((batch, *self._encode(batch)))
            while computed and (is_last or self.device.type != "cuda" or len(computed) > 1):
                done, z, event = computed.popleft()
                shard = requested.popleft()
                first = sum(map(len, shard.parts))
                shard.parts.append(self._checked(done, z, event))
                shard.unreadable.update({first + position: reason for position, reason in done.instead.items()})
                is_decoding = seconds_waited > (time.perf_counter() - started) / 2
                bar.advance(len(done.items), f"limited by {'decoding' if is_decoding else 'the encoder'}")
                if first + len(done.items) == len(shard.numbers):
                    yield shard

    def _batches(
        self, images: np.ndarray, size: int, workers: int, requested: deque[UnfinishedShard]
    ) -> Iterator[list[int]]:
        """Yields the rows of each batch, shard after shard, and appends its shard to `requested`.

        A loader gives its workers batches in turn. Shards of images that lie in pieces of large files are interleaved,
        as many as there are workers, so that each worker has the batches of one shard, and reads its pieces alone.
        """
        at_once = size if self.hashes.container is None else size * max(1, workers)
        for begin in range(0, len(images), at_once):
            numbers = images[begin : begin + at_once]
            batches = list[list[tuple[UnfinishedShard, list[int]]]]()
            for first in range(0, len(numbers), size):
                shard = UnfinishedShard(numbers[first : first + size], [], {})
                rows = self.rows[shard.numbers].tolist()
                starts = range(0, len(rows), self.settings.batch_size)
                batches.append([(shard, rows[start : start + self.settings.batch_size]) for start in starts])
            for turn in itertools.zip_longest(*batches):
                for shard, rows in filter(None, turn):
                    requested.append(shard)
                    yield rows

    def _encode(self, batch: PixelBatch[int]) -> tuple[Tensor, torch.cuda.Event | None]:
        """Returns the features of a batch, [B,K] in the stored precision, and the event after which they are on the
        CPU; None: they are there."""
        stored = DTYPES[self.settings.precision]
        pixels = batch.pixels.to(self.device, non_blocking=True)
        with torch.inference_mode():
            z = self.encoder(normalize(pixels, self.encoder.preprocessing).to(stored))[: len(batch.items)]
            z = z.to(stored).to("cpu", non_blocking=True)  # to pinned memory
        if self.device.type != "cuda":
            return z, None
        event = torch.cuda.Event()
        event.record()
        return z, event

    def _checked(self, batch: PixelBatch[int], z: Tensor, event: torch.cuda.Event | None) -> Tensor:
        """Returns the features of a batch when they are there; zeros for an image that does not decode."""
        unreadable = {batch.items[position]: reason for position, reason in batch.instead.items()}
        refuse_unreadable(unreadable, self.dataset, self.on_bad_image)
        if event is not None:
            event.synchronize()
        broken = ~z.isfinite().all(1)
        if broken.any():
            name = self.dataset.name(batch.items[int(broken.nonzero()[0])])
            remedy = " or set features.precision: fp32" if self.settings.precision != "fp32" else ""
            raise UserError(f"{name}: the encoder returns features that are not finite; check encoder.weights{remedy}")
        return z * torch.tensor([position not in batch.instead for position in range(len(z))])[:, None]
