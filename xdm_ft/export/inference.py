"""Images → features and logits, batch after batch, in memory that does not grow with the number of images."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from xdm_ft.export.model import Model
from xdm_ft.export.sources import Item
from xdm_ft.features import FeatureSettings, fast_batch_size
from xdm_ft.features.cache import DTYPES, Lookup, cache_path
from xdm_ft.features.key import key_of, key_parts_of
from xdm_ft.images.decode import DECODER, OF_THE_MACHINE, UnreadableImage, decode, memory_of
from xdm_ft.images.loader import image_loader, loaded, own_cores
from xdm_ft.images.transforms import normalized, resizing_transform
from xdm_ft.report.finished import is_run, read_run
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.memory import keep_freed_memory

MAX_WORKERS = 4  # by default
READ_AT_MOST = 1 << 30  # bytes of a file that are read at once; a larger one is decoded from the disk
NOT_FINITE = "the model returns values that are not finite"


class Batch(NamedTuple):
    """Images [n] in the order in which they came. The rows of images that are `unreadable` are of no use."""

    items: list[Item]
    encoded: Tensor  # float32 [n,K], features of the encoder, on the CPU
    z: Tensor  # float32 [n,K], features as the head reads them
    logits: Tensor  # float32 [n,C]
    members: Tensor | None  # float32 [S,n,C], the logits of an ensemble's heads
    unreadable: dict[int, str]  # position → why there is no prediction
    computed: int  # number of images that passed through the encoder; the others' features were cached


class _Loaded(NamedTuple):
    """A batch as a worker returns it."""

    items: list[Item]
    pixels: Tensor | None  # uint8 [B,S,S,3], black where nothing is to be computed; None: nothing at all
    cached: dict[int, Tensor]  # position → features [K]
    unreadable: dict[int, str]


class Inputs(Dataset[_Loaded]):
    """Item `items` is a whole batch. It is always as large: the products of a shorter one round differently."""

    def __init__(self, model: Model, batch_size: int, lookup: Lookup | None, threads: int = 0) -> None:
        """`threads` of this process decode a batch."""
        size, self.least_side = model.config.preprocessing.size, model.config.preprocessing.least_side
        self.transform, self.lookup = resizing_transform(model.config.preprocessing), lookup
        self.shape = (batch_size, size, size, 3)
        self._map = ThreadPoolExecutor(threads, "decoder").map if threads else map

    def __getitem__(self, items: list[Item]) -> _Loaded:
        pixels = np.zeros(self.shape, np.uint8)
        found = dict(enumerate(self._map(self._of, items, pixels)))
        cached = {position: one for position, one in found.items() if isinstance(one, Tensor)}
        unreadable = {position: one for position, one in found.items() if isinstance(one, str)}
        nothing = len(cached) + len(unreadable) == len(items)
        return _Loaded(items, None if nothing else torch.from_numpy(pixels), cached, unreadable)

    def _of(self, item: Item, pixels: np.ndarray) -> Tensor | str | None:
        """Returns the cached features [K], why the image does not decode, or None: `pixels` [S,S,3] are filled."""
        try:
            with memory_of(printable(item.path)):
                content = _content(item, self.lookup is not None)
                found = None if self.lookup is None or isinstance(content, Path) else self.lookup.find(content)
                if found is None:
                    pixels[:] = self.transform(decode(content, printable(item.path), self.least_side))
                return found
        except UnreadableImage as error:
            return error.reason


def _content(item: Item, whole: bool) -> bytes | Path:
    """Returns the bytes of an image if they are wanted `whole`, else its path. Raises `UnreadableImage`."""
    if isinstance(item.content, bytes):
        return item.content
    try:
        status = os.stat(item.content)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block for ever
            raise UnreadableImage(item.path, "not a regular file")
        path = Path(item.content)
        return path.read_bytes() if whole and status.st_size <= READ_AT_MOST else path
    except ValueError as error:  # a null byte in the path
        raise UnreadableImage(item.path, str(error)) from error
    except OSError as error:
        if error.errno in OF_THE_MACHINE:
            raise
        raise UnreadableImage(item.path, error.strerror or str(error)) from error


def stream(
    model: Model,
    items: Iterable[Item],
    *,
    batch_size: int | None = None,
    cache: Path | None = None,
    workers: int | None = None,
) -> Iterator[Batch]:
    """Yields the images in batches with the model's features and logits. Holds a few batches at once.

    Images that do not decode are reported, not raised. Each position of a batch is computed alike whatever the others
    hold, so that a stream that starts again after any batch yields the same bits. `batch_size` None: a fast one on the
    model's device. `cache`: folder of the feature cache, whose features are used if the encoder is frozen; it may be
    missing. `workers`: processes that decode; 0: threads decode a batch on all cores between two passes of the encoder;
    None: see `worker_count`. Raises `UserError` if memory is full.
    """
    keep_freed_memory()
    lookup = None if cache is None else cached_features(model, cache)
    size = fast_batch_size(model.device.type) if batch_size is None else batch_size
    workers = worker_count(model.device) if workers is None else workers
    rest = iter(items)
    batches = iter(lambda: list(islice(rest, size)), [])
    inputs = Inputs(model, size, lookup, threads=0 if workers else own_cores())
    loader = image_loader(inputs, workers, model.device, batch_size=None, sampler=batches)
    smaller = f"give a smaller --batch-size (now {size})"
    for one in loaded(loader, "predict", smaller):
        try:
            yield _computed(model, one, size)
        except torch.OutOfMemoryError as error:
            images = plural(size, "image")
            raise UserError(f"a batch of {images} needs more memory than {model.device} has; {smaller}") from error


def worker_count(device: torch.device) -> int:
    """Returns the number of processes that decode images by default: none on a CPU, as in an extraction."""
    return 0 if device.type == "cpu" else min(MAX_WORKERS, own_cores())


def cache_of(folder: str) -> Path:
    """Returns the feature cache of a run, or the default one."""
    path = Path(folder).expanduser()
    settings = read_run(path).results["recipe"]["features"] if is_run(path) else {}
    return cache_path(FeatureSettings(dir=settings.get("dir")))


def cached_features(model: Model, cache: Path) -> Lookup | None:
    """Returns the cached features of the model's encoder; None if there are none, or if it was trained."""
    encoder, precision = model.config.encoder, model.module.precision
    if encoder.trained or encoder.identity is None:
        return None
    # of the libraries that are installed here: an encoder from a file would also report another name than in the run
    identity = {**encoder.identity, "versions": model.module.encoder.identity()["versions"]}
    parts = key_parts_of(identity, encoder.xxh3, model.config.preprocessing, DECODER, precision, model.device)
    key = key_of(parts)
    found = Lookup(cache / key, key, encoder.width, DTYPES[precision])
    return found if len(found) else None


@torch.inference_mode()
def _computed(model: Model, one: _Loaded, batch_size: int) -> Batch:
    n, module = len(one.items), model.module
    if one.pixels is None:
        encoded = torch.zeros(batch_size, model.config.encoder.width, device=model.device)
    else:
        pixels = normalized(one.pixels.to(model.device, non_blocking=True), model.config.preprocessing)
        encoded = module.encoded(pixels)  # [B,K]
    if one.cached:
        places = torch.tensor(list(one.cached), device=model.device)
        encoded[places] = torch.stack(list(one.cached.values())).float().to(model.device)
    z = module.as_read(encoded)
    logits = module.logits(z)
    members = module.member_logits(z)[:, :n].cpu() if len(module.members) else None
    encoded, z, logits = encoded[:n].cpu(), z[:n].cpu(), logits[:n].cpu()
    broken = (~(z.isfinite().all(1) & logits.isfinite().all(1))).nonzero()[:, 0].tolist()
    unreadable = {position: NOT_FINITE for position in broken} | one.unreadable
    computed = 0 if one.pixels is None else n - len(one.cached) - len(one.unreadable)
    return Batch(one.items, encoded, z, logits, members, unreadable, computed)
