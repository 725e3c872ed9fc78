"""DataLoaders of images, whose worker processes end with this one, and whose death is one line."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import end_with_parent, stop_requested

T = TypeVar("T")
SECONDS_TO_END = 1.0  # for the end of a worker to be reported
SECONDS_TO_DIE = 10.0  # the same where its connection broke: that happens first, and writing a core file takes a while


def own_cores() -> int:
    """Returns this process's share of the machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def image_loader(dataset: Dataset[T], workers: int, device: torch.device, **how: Any) -> DataLoader[T]:
    """Returns a DataLoader of batches for the device; `how` says which batches. Iterate over it by `loaded`."""
    return DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # otherwise the loader draws a seed from the global one
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        **how,
    )


def loaded(loader: DataLoader[Any], what: str, remedy: str) -> Iterator[Any]:
    """Yields the batches of an `image_loader`. After a stop request, an error ends them instead of being raised.

    The signal that requests the stop may have ended the workers too. Raises `UserError`, a line from `what` to
    `remedy`, if a worker has died.
    """
    iterator = _started(loader)
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
            f"{what}: a process that reads images died, most likely because memory or /dev/shm is full; {remedy}"
        ) from error


def _started(loader: DataLoader[T]) -> Iterator[T]:
    """Starts the workers, and returns the loader's iterator.

    It leaves the handler of SIGCHLD as it was: torch's would raise the death of a worker anywhere in the main thread,
    in the middle of a step. Without it the iterator raises it, some seconds later.
    """
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before)
    return iterator


def _begin_worker(parent: int, number: int) -> None:
    end_with_parent(parent)
