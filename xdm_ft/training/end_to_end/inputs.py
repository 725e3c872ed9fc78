"""What the trained part of an encoder reads: images, or the activations below a cut; and the batches of a training.

A step's batch is a function of the step. It is split between processes and micro-batches.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import all_gather
from torch.utils.data import Sampler

from xdm_ft.augmentations import Augmentations, TrainingTransform
from xdm_ft.core import Annotations, Batch, InputPartners, Samples
from xdm_ft.features.cache import Features
from xdm_ft.images import ImageDataset
from xdm_ft.images.loader import DrawnRows, ImageRows, image_loader, iterate_batches
from xdm_ft.images.transforms import Preprocessing, evaluation_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.machine import cores
from xdm_ft.runtime.randomness import Stream, bits, integers
from xdm_ft.training import Job

if TYPE_CHECKING:
    from accelerate import Accelerator

MAX_WORKERS = 8  # per process; with more, they only wait for each other
WORKERS_DIED = ("training.batch_size", "lower it or raise training.accumulation, and run the same command to resume")
STEPS_AHEAD = 2  # of which the activations are read while a step is computed
PARTNER_STEPS = 64  # steps whose partners are drawn at once: with `partners: all` each draw sorts all training rows


@dataclass(frozen=True)
class RowsToRead:
    """The n images that this process reads for a step: those of its parts, then partners that are not among them."""

    row: Tensor  # int64 [n]
    position: Tensor  # int64 [n], in the full batch: key of the augmentation's random draws
    partner: Tensor | None  # int64: index in `row` of the partner of each sample of the parts


class StepRows(Sampler[list[tuple[int, int]]]):
    """Batch sampler of a DataLoader: yields the rows that this process reads at steps first…last−1.

    A row comes with the seed of its augmentation (`DrawnRows`), a function of the job's seed, the step and its position
    in the batch: a row that is in a batch twice has two different augmentations.
    """

    def __init__(self, rows_to_read: Callable[[int], RowsToRead], seed: int, first: int, last: int) -> None:
        self.rows_to_read, self.seed, self.first, self.last = rows_to_read, seed, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first, self.last):
            read = self.rows_to_read(step)
            seeds = bits(self.seed, step, Stream.AUGMENTATION, read.position)
            yield list(zip(read.row.tolist(), seeds.tolist(), strict=True))

    def with_views(self, views: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (rows, number of the cached view of each) of the same steps, int64 [n]; 0: the plain view.

        The view is drawn as the bank of heads draws it.
        """
        for step in range(self.first, self.last):
            read = self.rows_to_read(step)
            drawn = 1 + integers(self.seed, step, Stream.VIEW, read.position, views) if views else 0 * read.row
            yield read.row, drawn


class Inputs(ABC):
    """Reads what the trained part of the encoder sees, x float [n,…] on the process's device."""

    @abstractmethod
    def of_steps(self, steps: StepRows) -> Iterator[Tensor]:
        """Yields x of every step. Raises `UserError` for an image that does not decode."""

    @abstractmethod
    def of_rows(self, rows: Sequence[int], batch_size: int, persistent: bool = False) -> Callable[[], Iterator[Tensor]]:
        """Returns a function that reads the plain x of these rows, in batches, each time it is called.

        `persistent`: keep loader workers for the next call.
        """


class ImageInputs(Inputs):
    """Images [n,3,H,W] in the encoder's own preprocessing, in training with the augmentations."""

    def __init__(
        self,
        dataset: ImageDataset,
        preprocessing: Preprocessing,
        augmentations: Augmentations,
        accelerator: Accelerator,
    ) -> None:
        least_side = preprocessing.least_side
        self.plain = ImageRows(dataset, evaluation_transform(preprocessing), least_side)
        self.augmented = DrawnRows(dataset, TrainingTransform(preprocessing, augmentations).tensor, least_side)
        self.device, self.workers = accelerator.device, worker_count(accelerator)

    def of_steps(self, steps: StepRows) -> Iterator[Tensor]:
        loader = image_loader(self.augmented, self.workers, self.device, batch_sampler=steps)
        for x, _ in iterate_batches(loader, *WORKERS_DIED):
            yield x.to(self.device, non_blocking=True)

    def of_rows(self, rows: Sequence[int], batch_size: int, persistent: bool = False) -> Callable[[], Iterator[Tensor]]:
        # a worker without a batch would start for nothing
        workers = min(self.workers, -(-len(rows) // batch_size))
        persistent = persistent and workers > 0
        loader = image_loader(
            self.plain, workers, self.device, batch_size=batch_size, sampler=rows, persistent_workers=persistent
        )
        return lambda: (x.to(self.device, non_blocking=True) for x, _ in iterate_batches(loader, *WORKERS_DIED))


class CachedActivations(Inputs):
    """Activations [n,*shape] at a cut, read from the cache while the step before is computed."""

    def __init__(self, features: Features, shape: tuple[int, ...]) -> None:
        self.features, self.shape = features, shape

    def of_steps(self, steps: StepRows) -> Iterator[Tensor]:
        return self._read_ahead(steps.with_views(self.features.views))

    def of_rows(self, rows: Sequence[int], batch_size: int, persistent: bool = False) -> Callable[[], Iterator[Tensor]]:
        batches = torch.as_tensor(rows, dtype=torch.int64).split(batch_size) if len(rows) else ()
        return lambda: self._read_ahead((batch, torch.zeros_like(batch)) for batch in batches)

    def _read_ahead(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yields the activations of every batch (rows, views). A thread reads the next ones meanwhile.

        The thread ends with the generator, also if that is closed early.
        """

        def read(rows: Tensor, views: Tensor) -> Tensor:
            return self.features.of_views(rows, views).view(len(rows), *self.shape)

        waiting, thread = deque[Future[Tensor]](), ThreadPoolExecutor(1, "activations")
        try:
            for rows, views in batches:
                waiting.append(thread.submit(read, rows, views))
                if len(waiting) > STEPS_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


class ComputedActivations(Inputs):
    """Activations at a cut, computed from images each time they are read."""

    def __init__(self, images: ImageInputs, below: Callable[[Tensor], Tensor], accelerator: Accelerator) -> None:
        """`below`: images → activations, by modules that do not train, on the accelerator's device."""
        self.images, self.below, self.accelerator = images, below, accelerator

    def of_steps(self, steps: StepRows) -> Iterator[Tensor]:
        return map(self._compute, self.images.of_steps(steps))

    def of_rows(self, rows: Sequence[int], batch_size: int, persistent: bool = False) -> Callable[[], Iterator[Tensor]]:
        read_images = self.images.of_rows(rows, batch_size, persistent)
        return lambda: map(self._compute, read_images())

    @torch.no_grad()
    def _compute(self, x: Tensor) -> Tensor:
        with self.accelerator.autocast():
            return self.below(x).float()


def worker_count(accelerator: Accelerator) -> int:
    """Returns the number of loader workers of this process: cores of the machine / processes on it, at most 8."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    return min(MAX_WORKERS, max(1, cores() // processes))


def split_batch(rows: Tensor, domain: Tensor, parts: int, blocks: int) -> list[Tensor]:
    """Splits a batch into `parts`, each with about the same number of rows of every domain.

    `rows` int64 [B] are the batch's rows and `domain` int64 [B] their domains. A per-domain batch consists of D equal
    `blocks`, one per domain, and its parts have equally many rows of each domain. For a pooled batch `blocks` is 1;
    the numbers of rows per domain, and the sizes of the parts, then differ by at most one.
    """
    if parts == 1:
        return [rows]
    if blocks == 1:
        rows = rows[domain.argsort(stable=True)]
    table = rows.view(blocks, -1)
    return [table[:, part::parts].reshape(-1) for part in range(parts)]


@dataclass(frozen=True)
class StepBatch:
    """The full batch of one step, without images, and this process's parts of it, with images."""

    parts: list[Batch]  # one per micro-batch of this process
    full_batch: Batch  # of all processes, in the order of the batch; x is empty [B,0]
    positions: tuple[tuple[Tensor, ...], ...]  # [process][part]: of the part's samples in `full_batch`, int64
    process: int  # index of this process

    def share(self, part: int) -> float:
        """Returns the share of the step's images that is in one of this process's parts."""
        return len(self.parts[part].y) / len(self.full_batch.y)

    def block(self, number: int, blocks: int) -> StepBatch:
        """Returns the batch of one domain, for a batch of equal blocks of one domain each."""
        start = number * (len(self.full_batch.y) // blocks)
        positions = tuple(
            tuple(part.view(blocks, -1)[number] - start for part in of_process) for of_process in self.positions
        )
        parts = [part.block(number, blocks) for part in self.parts]
        return StepBatch(parts, self.full_batch.block(number, blocks), positions, self.process)

    def gathered(self, z: list[Tensor]) -> Batch:
        """Returns the full batch with features as x [B,K]: those of this process's parts, `z`, and of all others.

        Every process computes the loss of the full batch. It has therefore the complete gradient of the heads, but only
        its own features' part of the encoder's gradient. Gradients are then averaged over P processes, so the gradient
        by the features is multiplied by P here.
        """
        features = torch.cat(z)
        if features.requires_grad and len(self.positions) > 1:
            features = features.view_as(features)
            features.register_hook(lambda gradient: gradient * len(self.positions))
        soft_labels = [part.targets for part in self.parts if part.targets is not None]
        targets = self._in_order(torch.cat(soft_labels)) if soft_labels else None
        return self.full_batch._replace(x=self._in_order(features), targets=targets)

    def _in_order(self, features: Tensor) -> Tensor:
        """Returns the rows [B,…] of all processes in the order of the full batch; only `features` keep their graph."""
        if len(self.positions) == len(self.positions[0]) == 1:
            return features  # the one part is the batch
        positions = [torch.cat(of_process) for of_process in self.positions]
        pieces = [features]
        if len(positions) > 1:
            # processes exchange equally many rows, and every process knows how many are another's
            padded = features.new_zeros(max(map(len, positions)), *features.shape[1:])
            padded[: len(features)] = features.detach()
            everyone = [torch.empty_like(padded) for _ in positions]
            all_gather(everyone, padded)
            pieces = [rows[: len(of_process)] for rows, of_process in zip(everyone, positions, strict=True)]
            pieces[self.process] = features
        return torch.cat(pieces)[torch.cat(positions).argsort().to(features.device, non_blocking=True)]


class TrainingBatches:
    """`begin(first)` yields (step, `StepBatch` on this process's device) for steps first…steps−1.

    The content of a step's batch, augmentation included, depends on the job's seed and the step only. The batch is
    split into processes × accumulation parts.
    """

    def __init__(self, job: Job, inputs: Inputs, annotations: Annotations, accelerator: Accelerator) -> None:
        training, pools = job.training, job.split.train
        self.inputs, self.device, self.seed, self.steps = inputs, accelerator.device, job.seed, job.setup.steps
        self.labels = annotations.labels.cpu()
        self.domain = job.split.domain_of[annotations.domains].cpu()  # int64 [N], −1 outside the training domains
        self.sampler = job.sampler(self.labels)
        self.training = self._samples(torch.cat(list(pools)))
        self.algorithm = job.new_algorithm()  # on the CPU, where batches are drawn; the trained one is on the device
        soft_labels = annotations.soft_labels if self.algorithm.reads_soft_labels else None
        self.soft_labels = None if soft_labels is None else soft_labels.cpu()
        self.blocks = 1 if training.sampler == "pooled" else len(pools)
        self.process, self.processes = accelerator.process_index, accelerator.num_processes
        self.accumulation = training.accumulation
        if self.processes * self.accumulation > training.batch_size:
            raise UserError(
                f"training.batch_size: {training.batch_size} is less than {self.processes} process(es) × "
                f"training.accumulation {self.accumulation}; raise batch_size or lower accumulation"
            )
        # partners are drawn for blocks of steps; a block that is no longer cached is drawn again
        self._partner_block = lru_cache(maxsize=2)(self._draw_partners)  # 2: workers read ahead into the next block

    def _samples(self, rows: Tensor) -> Samples:
        return Samples(rows, self.labels[rows], self.domain[rows])

    def rows(self, step: int) -> Tensor:
        """Returns the rows of the full batch of `step`, int64 [B]."""
        return self.sampler.indices(step, step + 1)[0]

    def positions(self, rows: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """Returns for each process and part the positions of its samples in the full batch of `rows`."""
        parts = self.processes * self.accumulation
        pieces = split_batch(torch.arange(len(rows)), self.domain[rows], parts, self.blocks)
        starts = range(0, parts, self.accumulation)
        return tuple(tuple(pieces[first : first + self.accumulation]) for first in starts)

    def _draw_partners(self, number: int) -> InputPartners | None:
        """Draws the partners of a block of steps, fields [S,B]."""
        first = number * PARTNER_STEPS
        last = min(first + PARTNER_STEPS, self.steps)
        drawn = self._samples(self.sampler.indices(first, last))
        return self.algorithm.input_partners(drawn, self.training, torch.arange(first, last))

    def partners(self, step: int) -> InputPartners | None:
        """Returns the partners of the full batch of `step`, fields [B]; None: the method mixes no inputs."""
        number, index = divmod(step, PARTNER_STEPS)
        block = self._partner_block(number)
        return None if block is None else InputPartners(*(field[index] for field in block))

    def rows_to_read(self, step: int) -> RowsToRead:
        """Returns the rows that this process reads for `step`."""
        rows, partners = self.rows(step), self.partners(step)
        read_here = torch.cat(self.positions(rows)[self.process])
        if partners is None:
            return RowsToRead(rows[read_here], read_here, None)
        index_of = torch.full((2 * len(rows),), -1)  # index in `read` of each position; B and more: outside the batch
        index_of[read_here] = torch.arange(len(read_here))
        wanted = partners.position[read_here]
        # samples that share a partner get one image of it, decoded and augmented once
        missing = wanted[index_of[wanted] < 0].unique()
        index_of[missing] = len(read_here) + torch.arange(len(missing))
        read = torch.cat([read_here, missing])
        return RowsToRead(torch.cat([rows, partners.row])[read], read, index_of[wanted])

    def begin(self, first: int = 0) -> Generator[tuple[int, StepBatch], None, None]:
        for step, x in enumerate(
            self.inputs.of_steps(StepRows(self.rows_to_read, self.seed, first, self.steps)), first
        ):
            yield step, self._step_batch(step, x)

    def _step_batch(self, step: int, x: Tensor) -> StepBatch:
        """`x` is what this process has read, in the order of `rows_to_read`."""
        samples, partners = self._samples(self.rows(step)), self.partners(step)
        position = torch.arange(len(samples.row))
        annotations = {"y": samples.y, "domain": samples.domain, "row": samples.row, "position": position}
        if partners is not None:
            annotations |= {"partner_y": self.labels[partners.row], "has_partner": partners.exists}
        if self.soft_labels is not None:
            annotations["targets"] = self.soft_labels[samples.row]
            if partners is not None:
                annotations["partner_targets"] = self.soft_labels[partners.row]

        def to_device(value: Tensor) -> Tensor:
            return value.to(self.device, non_blocking=True)  # queued: the host does not wait for the device

        full_batch = Batch(x.new_empty(len(position), 0), **{name: to_device(v) for name, v in annotations.items()})
        partner, positions = self.rows_to_read(step).partner, self.positions(samples.row)
        parts, begin = [], 0
        for of_part in positions[self.process]:
            of_read = slice(begin, begin + len(of_part))
            begin = of_read.stop
            # indexed here: an index that lies on the host would make it wait for the device
            fields = {name: to_device(value[of_part]) for name, value in annotations.items()}
            partner_x = None if partner is None else x[to_device(partner[of_read])]
            parts.append(Batch(x[of_read], **fields, partner=partner_x))
        return StepBatch(parts, full_batch, positions, self.process)
