"""Batches of images, decoded by threads of this process or by worker processes.

The workers end with this process, and their death is one line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import wait
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import FaultInLoader, UnreadableImage, memory_of, unreadable_message
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import end_with_parent, stop_requested
from xdm_ft.runtime.machine import own_cores

T = TypeVar("T")
# a forked process cannot use the libraries of a Mac
FORKS = hasattr(os, "fork") and sys.platform != "darwin"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of the precisions in recipes
SECONDS_TO_END = 1.0  # for the end of a worker to be reported
SECONDS_TO_DIE = 10.0  # the same where its connection broke: that happens first, and writing a core file takes a while


class ImageRows(Dataset[tuple[Tensor, int]]):
    """Item `row` is (transformed image float [3,H,W], row). A sampler or a batch sampler supplies the rows.

    Raises `UserError` that names an image that does not decode, or for which memory is full, from DataLoader workers
    too.
    """

    def __init__(self, dataset: ImageDataset, transform: Callable[..., Tensor], least_side: int | None = None) -> None:
        """`least_side`: as for `ImageDataset.draft`."""
        self.dataset, self.transform, self.least_side = dataset, transform, least_side

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.read(int(row))

    def read(self, row: int, *seed: int) -> tuple[Tensor, int]:
        try:
            with memory_of(self.dataset.name(row)):
                return self.transform(self.dataset.draft(row, self.least_side), *seed), row
        except UnreadableImage as error:
            raise FaultInLoader(unreadable_message({row: error.reason}, self.dataset)) from error


class DrawnRows(ImageRows):
    """Item (row, seed) is item `row` of the images, with a transform that takes (image, seed).

    An image thus depends on its key alone: neither on the worker that reads it nor on the images read before.
    """

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:  # type: ignore[override]
        return self.read(*key)


def decoding_workers(device: torch.device, most: int) -> int:
    """Returns how many processes decode images by default: none if the encoder runs on the same cores.

    Each core that a worker takes from it lets all of its threads wait. Threads of this process then decode a batch on
    all cores, between two passes of the encoder. None too where workers are spawned: each would import torch.
    """
    return 0 if device.type == "cpu" or not FORKS else min(most, own_cores())


class PixelBatch(NamedTuple, Generic[T]):
    """One batch, as a worker returns it."""

    items: list[T]
    pixels: Tensor  # uint8 [batch_size,S,S,3]; black after the last item, and where there are no pixels
    instead: dict[int, Any]  # position → what was read instead of pixels: a text says why an image does not decode


def pixel_batches(
    batches: Iterable[list[T]],
    read: Callable[[T], Any],
    shape: tuple[int, int, int, int],
    device: torch.device,
    workers: int,
    activity: str,
    remedy: str,
) -> Iterator[PixelBatch[T]]:
    """Yields each batch, decoded by `workers` processes; 0: by threads of this one. Raises `UserError`.

    `read` returns the pixels of an item, an RGB image of the shape's size, or another value to keep instead of them.
    Every batch has as many images, `shape[0]`: the products of a shorter one round differently.
    """
    with nullcontext() if workers else ThreadPoolExecutor(own_cores(), "decoder") as threads:
        dataset = _PixelBatches(read, shape, threads.map if threads else map)
        # it yields whole batches; torch's own `collate_fn` would make tensors of arrays among the items
        loader = image_loader(dataset, workers, device, batch_size=None, sampler=batches, collate_fn=_whole)
        yield from iterate_batches(loader, activity, remedy)


@dataclass(frozen=True)
class _PixelBatches(Dataset[PixelBatch[T]]):
    """Item `items` is a whole batch."""

    read: Callable[[T], Any]
    shape: tuple[int, int, int, int]
    map: Callable[..., Iterable[Any]]

    def __getitem__(self, items: list[T]) -> PixelBatch[T]:
        pixels = np.zeros(self.shape, np.uint8)

        def fill(item: T, target: np.ndarray) -> Any:
            """Fills `target` [S,S,3] and returns None, or returns what is kept instead."""
            try:
                value = self.read(item)
            except UnreadableImage as error:
                return error.reason
            if not isinstance(value, Image.Image):
                return value
            target[:] = value
            return None

        values = enumerate(self.map(fill, items, pixels))
        return PixelBatch(items, torch.from_numpy(pixels), {at: value for at, value in values if value is not None})


def _whole(batch: T) -> T:
    return batch


def _end_with(parent: int, number: int) -> None:
    end_with_parent(parent)


def image_loader(dataset: Dataset[T], workers: int, device: torch.device, **options: Any) -> DataLoader[T]:
    """Returns a DataLoader of batches for the device; `options` say which batches. See `iterate_batches`."""
    parent = os.getpid()
    return DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # otherwise the loader draws a seed from the global one
        # fork: it starts at once, and workers share the memory of data sets and features
        multiprocessing_context=("fork" if FORKS else "spawn") if workers else None,
        worker_init_fn=partial(_end_with, parent),
        **options,
    )


def iterate_batches(loader: DataLoader[Any], activity: str, remedy: str) -> Iterator[Any]:
    """Yields the batches of an `image_loader`. After a stop request, an error ends them instead of being raised.

    The signal that requests the stop may have ended the workers too. Raises `UserError`, a line from `activity` to
    `remedy`, if a worker has died.
    """
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    iterator = iter(loader)  # starts the workers
    if before is not None and threading.current_thread() is threading.main_thread():
        # torch's handler would raise the death of a worker anywhere in the main thread, in the middle of a step;
        # without it the iterator raises it, some seconds later
        signal.signal(signal.SIGCHLD, before)
    workers = active_children() if loader.num_workers else []
    try:
        yield from iterator
    except UserError:
        if not stop_requested():
            raise
    except Exception as error:  # its type depends on where the worker died: RuntimeError, OSError, EOFError, …
        if stop_requested():
            return
        if workers:
            broken = isinstance(error, ConnectionError | EOFError)
            ended = wait([worker.sentinel for worker in workers], SECONDS_TO_DIE if broken else SECONDS_TO_END)
            for worker in workers:
                if worker.sentinel in ended:
                    worker.join()  # the sentinel, a pipe, closes a moment before the exit code is there
        if not any(worker.exitcode for worker in workers):
            raise
        raise UserError(
            f"{activity}: a process that reads images died, most likely because memory or /dev/shm is full; {remedy}"
        ) from error
