"""What the trained part of an encoder reads: images, or the activations below a cut, cached or computed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Sampler

from xdm_ft.features.cache import Features
from xdm_ft.images.dataset import Augmentation, ImageDataset
from xdm_ft.images.loader import DrawnRows, ImageRows, image_loader, loaded
from xdm_ft.images.transforms import Preprocessing, evaluation_transform, training_transform
from xdm_ft.runtime.randomness import Stream, bits, integers

if TYPE_CHECKING:
    from accelerate import Accelerator

MAX_WORKERS = 8  # per process; with more, they only wait for each other
WORKERS_DIED = ("training.batch_size", "lower it or raise training.accumulation, and run the same command to resume")
STEPS_AHEAD = 2  # of which the activations are read while a step is computed


@dataclass(frozen=True)
class RowsToRead:
    """The n images that this process reads for a step: those of its parts, then partners that are not among them."""

    row: Tensor  # int64 [n]
    place: Tensor  # int64 [n]: key of the augmentation's random draws
    partner: Tensor | None  # int64: index in `row` of the partner of each sample of the parts


class StepRows(Sampler[list[tuple[int, int]]]):
    """Batch sampler of a DataLoader: yields the rows that this process reads at steps first…last−1.

    A row comes with the seed of its augmentation (`DrawnRows`), a function of the job's seed, the step and its place in
    the batch: a row that is in a batch twice has two different augmentations.
    """

    def __init__(self, rows_to_read: Callable[[int], RowsToRead], seed: int, first: int, last: int) -> None:
        self.rows_to_read, self.seed, self.first, self.last = rows_to_read, seed, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first, self.last):
            read = self.rows_to_read(step)
            seeds = bits(self.seed, step, Stream.AUGMENTATION, read.place)
            yield list(zip(read.row.tolist(), seeds.tolist(), strict=True))

    def with_views(self, views: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (rows, number of the cached view of each) of the same steps, int64 [n]; 0: the plain view.

        The view is drawn as the bank of heads draws it.
        """
        for step in range(self.first, self.last):
            read = self.rows_to_read(step)
            yield read.row, 1 + integers(self.seed, step, Stream.VIEW, read.place, views) if views else 0 * read.row


class Inputs(ABC):
    """Reads what the trained part of the encoder sees, x float [n,…] on the process's device."""

    @abstractmethod
    def of_steps(self, steps: StepRows) -> Iterator[Tensor]:
        """Yields x of every step. Raises `UserError` for an image that does not decode."""

    @abstractmethod
    def of_rows(self, rows: Sequence[int], batch_size: int, persistent: bool = False) -> Iterable[Tensor]:
        """Returns the plain x of these rows, in batches, which can be read several times.

        `persistent`: keep loader workers for the next time.
        """


class Images(Inputs):
    """Images [n,3,H,W] in the encoder's own preprocessing, in training with the augmentation."""

    def __init__(
        self, dataset: ImageDataset, preprocessing: Preprocessing, augmentation: Augmentation, accelerator: Accelerator
    ) -> None:
        least_side = preprocessing.least_side
        self.plain = ImageRows(dataset, evaluation_transform(preprocessing), least_side)
        self.augmented = ImageRows(dataset, training_transform(preprocessing, augmentation), least_side)
        self.device, self.workers = accelerator.device, worker_count(accelerator)

    def of_steps(self, steps: StepRows) -> Iterator[Tensor]:
        loader = image_loader(DrawnRows(self.augmented), self.workers, self.device, batch_sampler=steps)
        for x, _ in loaded(loader, *WORKERS_DIED):
            yield x.to(self.device, non_blocking=True)

    def of_rows(self, rows: Sequence[int], batch_size: int, persistent: bool = False) -> Iterable[Tensor]:
        workers = min(self.workers, -(-len(rows) // batch_size))
        loader = image_loader(
            self.plain,
            workers,
            self.device,
            batch_size=batch_size,
            sampler=rows,
            persistent_workers=persistent and workers > 0,
        )
        return _Repeated(lambda: (x.to(self.device, non_blocking=True) for x, _ in loaded(loader, *WORKERS_DIED)))


class CachedActivations(Inputs):
    """Activations [n,*shape] at a cut, read from the cache while the step before is computed."""

    def __init__(self, features: Features, shape: tuple[int, ...]) -> None:
        self.features, self.shape = features, shape

    def of_steps(self, steps: StepRows) -> Iterator[Tensor]:
        return _ahead(partial(self._read, *drawn) for drawn in steps.with_views(self.features.views))

    def of_rows(self, rows: Sequence[int], batch_size: int, persistent: bool = False) -> Iterable[Tensor]:
        batches = torch.as_tensor(rows, dtype=torch.int64).split(batch_size) if len(rows) else ()
        return _Repeated(lambda: _ahead(partial(self._read, some, torch.zeros_like(some)) for some in batches))

    def _read(self, rows: Tensor, views: Tensor) -> Tensor:
        return self.features.of_views(rows, views).view(len(rows), *self.shape)


class ComputedActivations(Inputs):
    """Activations at a cut, computed from images each time they are read."""

    def __init__(self, images: Images, below: Callable[[Tensor], Tensor], accelerator: Accelerator) -> None:
        """`below`: images → activations, by modules that do not train, on the accelerator's device."""
        self.images, self.below, self.accelerator = images, below, accelerator

    def of_steps(self, steps: StepRows) -> Iterator[Tensor]:
        return map(self._computed, self.images.of_steps(steps))

    def of_rows(self, rows: Sequence[int], batch_size: int, persistent: bool = False) -> Iterable[Tensor]:
        images = self.images.of_rows(rows, batch_size, persistent)
        return _Repeated(lambda: map(self._computed, images))

    @torch.no_grad()
    def _computed(self, x: Tensor) -> Tensor:
        with self.accelerator.autocast():
            return self.below(x).float()


class _Repeated(Iterable[Tensor]):
    """Begins anew each time it is iterated over."""

    def __init__(self, begin: Callable[[], Iterator[Tensor]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Tensor]:
        return self.begin()


def _ahead(reads: Iterable[Callable[[], Tensor]]) -> Iterator[Tensor]:
    """Yields what the functions return, and raises what they raise. A thread calls the next ones meanwhile.

    The thread ends with the generator, also if that is closed early.
    """
    waiting, thread = deque[Future[Tensor]](), ThreadPoolExecutor(1, "activations")
    try:
        for read in reads:
            waiting.append(thread.submit(read))
            if len(waiting) > STEPS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)


def worker_count(accelerator: Accelerator) -> int:
    """Returns the number of loader workers of this process: cores of the machine / processes on it, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    return min(MAX_WORKERS, max(1, cores // processes))
