"""Images → features and logits, batch after batch, in memory that does not grow with the number of images."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from xdm_ft.data._images import OF_THE_MACHINE, EncodedImages, UnreadableImage, decode, memory_of
from xdm_ft.data._loading import image_loader, loaded
from xdm_ft.errors import UserError, plural, printable
from xdm_ft.export.model import Model
from xdm_ft.export.sources import Item
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache_key import key_of, key_parts_of
from xdm_ft.features.forward import DTYPES
from xdm_ft.features.lookup import Lookup
from xdm_ft.features.store import cache_path
from xdm_ft.report.finished import is_run, read_run

MAX_WORKERS = 4  # by default
READ_AT_MOST = 1 << 30  # bytes of a file that are read at once; a larger one is decoded from the disk
DECODER = f"{EncodedImages.image.__module__}.{EncodedImages.image.__qualname__}"
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
    pixels: Tensor | None  # float32 [B,3,H,W], black where nothing is to be computed; None: nothing at all
    cached: dict[int, Tensor]  # position → features [K]
    unreadable: dict[int, str]


class Inputs(Dataset[_Loaded]):
    """Item `items` is a whole batch. It is always as large: the products of a shorter one round differently."""

    def __init__(self, model: Model, batch_size: int, lookup: Lookup | None) -> None:
        size, self.least_side = model.config.preprocessing.size, model.config.preprocessing.least_side
        self.transform, self.shape, self.lookup = model.transform, (batch_size, 3, size, size), lookup

    def __getitem__(self, items: list[Item]) -> _Loaded:
        pixels: Tensor | None = None
        cached, unreadable = dict[int, Tensor](), dict[int, str]()
        for position, item in enumerate(items):
            try:
                with memory_of(printable(item.path)):
                    content = _content(item, self.lookup is not None)
                    found = None if self.lookup is None or isinstance(content, Path) else self.lookup.find(content)
                    if isinstance(found, Tensor):
                        cached[position] = found
                    elif isinstance(found, str):
                        unreadable[position] = found
                    else:
                        image = self.transform(decode(content, printable(item.path), self.least_side))
                        pixels = torch.zeros(self.shape) if pixels is None else pixels
                        pixels[position] = image
            except UnreadableImage as error:
                unreadable[position] = error.reason
        return _Loaded(items, pixels, cached, unreadable)


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
    model: Model, items: Iterable[Item], *, batch_size: int, cache: Path | None = None, workers: int | None = None
) -> Iterator[Batch]:
    """Yields the images in batches of `batch_size` with the model's features and logits. Holds a few batches at once.

    Images that do not decode are reported, not raised. Each position of a batch is computed alike whatever the others
    hold, so that a stream that starts again after any batch yields the same bits. `cache`: folder of the feature cache,
    whose features are used if the encoder is frozen; it may be missing. `workers`: processes that decode; None: see
    `worker_count`. Raises `UserError` if memory is full.
    """
    lookup = None if cache is None else cached_features(model, cache)
    count = worker_count(model.device) if workers is None else workers
    rest = iter(items)
    batches = iter(lambda: list(islice(rest, batch_size)), [])
    loader = image_loader(Inputs(model, batch_size, lookup), count, model.device, batch_size=None, sampler=batches)
    smaller = f"give a smaller --batch-size (now {batch_size})"
    for one in loaded(loader, "predict", smaller):
        try:
            yield _computed(model, one, batch_size)
        except torch.OutOfMemoryError as error:
            images = plural(batch_size, "image")
            raise UserError(f"a batch of {images} needs more memory than {model.device} has; {smaller}") from error


def worker_count(device: torch.device) -> int:
    """Returns the number of processes that decode images by default."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_WORKERS, cores if device.type == "cuda" else cores // 2))


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
        pixels = one.pixels.to(model.device, non_blocking=True)
        encoded = module.encoded(pixels.contiguous(memory_format=torch.channels_last))  # [B,K]
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
