"""The batches of a training end to end: whole ones as a function of the step, cut up between processes and passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import all_gather
from torch.utils.data import DataLoader, Sampler

from xdm_ft.algorithms import Algorithm
from xdm_ft.data._image_rows import DrawnRows, ImageRows
from xdm_ft.errors import UserError
from xdm_ft.randomness import Stream, bits
from xdm_ft.tensors import Annotations, Batch, InputPartners, Samples
from xdm_ft.training import Job

if TYPE_CHECKING:
    from accelerate import Accelerator

MOST_WORKERS = 8  # per process; more only wait for each other
PARTNER_STEPS = 64  # steps whose partners are drawn at once: with `partners: all` each draw sorts all training rows


def split_batch(rows: Tensor, domain: Tensor, parts: int, blocks: int) -> list[Tensor]:
    """Cuts a batch into `parts` that each get their share of every domain.

    `rows` int64 [B] are the batch's rows and `domain` int64 [B] their domains. `blocks` is the number of equal blocks
    of one domain that the batch consists of: D for a per-domain batch, whose parts then hold equally many rows of each
    domain. 1 for a pooled batch: its counts per domain differ by one at most between parts, and so do their sizes.
    """
    if parts == 1:
        return [rows]
    if blocks == 1:
        rows = rows[domain.argsort(stable=True)]
    table = rows.view(blocks, -1)
    return [table[:, part::parts].reshape(-1) for part in range(parts)]


@dataclass(frozen=True)
class StepBatch:
    """The whole batch of one step, of which this process has some parts with their images."""

    parts: list[Batch]  # this process's, one per micro-batch
    whole: Batch  # of all processes, in the order of the batch; without images: x is empty [B,0]
    places: tuple[tuple[Tensor, ...], ...]  # of each process: the places of its parts' samples in `whole`, int64
    process: int  # which of them this one is

    def weight(self, part: int) -> float:
        """The part of the step's images that are in one of this process's parts."""
        return len(self.parts[part].y) / len(self.whole.y)

    def block(self, number: int, blocks: int) -> StepBatch:
        """That of one domain, where a batch consists of equal blocks of one domain."""
        start = number * (len(self.whole.y) // blocks)

        def of_block(places: Tensor) -> Tensor:
            size = len(places) // blocks
            return places[number * size : (number + 1) * size] - start

        places_of = tuple(tuple(of_block(places) for places in of_parts) for of_parts in self.places)
        parts = [part.block(number, blocks) for part in self.parts]
        return StepBatch(parts, self.whole.block(number, blocks), places_of, self.process)

    def gathered(self, z: list[Tensor], targets: list[Tensor | None]) -> Batch:
        """The whole batch of features, x [B,K], from those of this process's parts and of all others.

        Every process computes the loss of all of it, so it has the whole gradient of the heads, and by its own features
        that of its part of the encoder. Gradients are averaged over P processes, so the latter is multiplied by P here.
        """
        own = torch.cat(z)
        if own.requires_grad and len(self.places) > 1:
            own = own.view_as(own)
            own.register_hook(lambda gradient: gradient * len(self.places))
        soft = torch.cat([part for part in targets if part is not None]) if targets[0] is not None else None
        return self.whole._replace(x=self._ordered(own), targets=None if soft is None else self._ordered(soft))

    def _ordered(self, own: Tensor) -> Tensor:
        """Rows [B,…] of all processes in the order of the whole batch, of which `own` keep their graph."""
        if len(self.places) == len(self.places[0]) == 1:
            return own  # the one part is the batch
        places = [torch.cat(of_parts) for of_parts in self.places]
        pieces = [own]
        if len(places) > 1:
            pieces = _all_gathered(own.detach(), [len(of_process) for of_process in places])
            pieces[self.process] = own
        return torch.cat(pieces)[torch.cat(places).argsort().to(own.device)]


def _all_gathered(own: Tensor, sizes: list[int]) -> list[Tensor]:
    """What each process has, of which every one knows the number of rows."""
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in sizes]
    all_gather(everyone, padded)
    return [rows[:size] for rows, size in zip(everyone, sizes, strict=True)]


@dataclass(frozen=True)
class RowsToRead:
    """What this process reads for a step: the images of its parts, then those partners that are not among them."""

    row: Tensor  # int64 [n]
    place: Tensor  # int64 [n]: what the augmentation of each is drawn by
    partner: Tensor | None  # int64: where the partner of each of the parts' samples is among them


class StepRows(Sampler[list[tuple[int, int]]]):
    """Batch sampler of a DataLoader: what this process reads at steps first…last−1.

    A row comes with the seed of its augmentation (`DrawnRows`), a function of the job's seed, the step and its place in
    the batch: a row that is in a batch twice is augmented in two ways.
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


class TrainingBatches:
    """`begin(first)` iterates over (step, `StepBatch` on this process's device), steps first…steps−1.

    What a step's batch holds, augmentation included, depends on the job's seed and the step only. It is cut into
    processes × accumulation parts.
    """

    def __init__(
        self,
        job: Job,
        images: ImageRows,
        annotations: Annotations,
        accelerator: Accelerator,
    ) -> None:
        """`images` in the training's transform."""
        training = job.training
        self.device, self.seed, self.last = accelerator.device, job.seed, job.setup.steps
        pools = job.split.train
        self.whole = job.sampler(annotations.labels)
        self.labels = annotations.labels.cpu()
        self.domain = job.split.domain_of[annotations.domains].cpu()  # int64 [N], −1 outside the training domains
        self.training = self._samples(torch.cat(list(pools)))
        algorithm = job.make(job.setup)  # another one is on the device
        assert isinstance(algorithm, Algorithm)
        self.algorithm = algorithm
        self.blocks = 1 if training.sampler == "pooled" else len(pools)
        self.processes, self.accumulation = accelerator.num_processes, training.accumulation
        if self.processes * self.accumulation > training.batch_size:
            raise UserError(
                f"training.batch_size: {training.batch_size} is less than {self.processes} process(es) × "
                f"accumulation {self.accumulation}; raise batch_size or lower accumulation"
            )
        self.process = accelerator.process_index
        self.images, self.workers = images, worker_count(accelerator)
        # only a memory of what is recomputed at will: the steps of a block share their draws
        self._partner_block = lru_cache(maxsize=2)(self._draw_partners)

    def _samples(self, rows: Tensor) -> Samples:
        return Samples(rows, self.labels[rows], self.domain[rows])

    def rows(self, step: int) -> Tensor:
        """int64 [B]: the rows of the whole batch of `step`."""
        return self.whole.indices(step, step + 1)[0]

    def places(self, rows: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """For each process the places of its parts' samples in the whole batch of `rows`."""
        parts = self.processes * self.accumulation
        pieces = split_batch(torch.arange(len(rows)), self.domain[rows], parts, self.blocks)
        starts = range(0, parts, self.accumulation)
        return tuple(tuple(pieces[first : first + self.accumulation]) for first in starts)

    @property
    def largest_part(self) -> int:
        """Samples in the largest part of this process."""
        return max(len(places) for places in self.places(self.rows(0))[self.process])

    def _draw_partners(self, number: int) -> InputPartners | None:
        """Of the steps of a block, fields [S,B]."""
        first = number * PARTNER_STEPS
        last = min(first + PARTNER_STEPS, self.last)
        drawn = self._samples(self.whole.indices(first, last))
        return self.algorithm.input_partners(drawn, self.training, torch.arange(first, last))

    def partners(self, step: int) -> InputPartners | None:
        """Of the whole batch of `step`, fields [B]; None where no inputs are mixed."""
        number, place = divmod(step, PARTNER_STEPS)
        block = self._partner_block(number)
        return None if block is None else InputPartners(*(field[place] for field in block))

    def rows_to_read(self, step: int) -> RowsToRead:
        """What this process reads for `step`."""
        rows, partners = self.rows(step), self.partners(step)
        own = torch.cat(self.places(rows)[self.process])
        if partners is None:
            return RowsToRead(rows[own], own, None)
        position = torch.full((2 * len(rows),), -1)  # of each place, those outside the batch included
        position[own] = torch.arange(len(own))
        wanted = partners.place[own]
        missing = wanted[position[wanted] < 0].unique()
        position[missing] = len(own) + torch.arange(len(missing))
        place = torch.cat([own, missing])
        return RowsToRead(torch.cat([rows, partners.row])[place], place, position[wanted])

    def begin(self, first: int = 0) -> Iterator[tuple[int, StepBatch]]:
        loader: DataLoader[Any] = DataLoader(
            DrawnRows(self.images),
            batch_sampler=StepRows(self.rows_to_read, self.seed, first, self.last),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # the loader would otherwise draw from the global one
        )
        for step, (x, _) in enumerate(loader, start=first):
            yield step, self._step_batch(step, x.to(self.device, non_blocking=True))

    def _step_batch(self, step: int, x: Tensor) -> StepBatch:
        """`x` is what this process has read."""
        samples, partners = self._samples(self.rows(step)), self.partners(step)
        place = torch.arange(len(samples.row))
        places_of = self.places(samples.row)
        mixed: dict[str, Tensor] = {}
        if partners is not None:
            mixed = {"partner_y": self.labels[partners.row], "has_partner": partners.found}
        annotations = {"y": samples.y, "domain": samples.domain, "index": samples.row, "place": place, **mixed}
        there = {name: value.to(self.device, non_blocking=True) for name, value in annotations.items()}
        whole = Batch(x.new_empty(len(place), 0), **there)
        partner = self.rows_to_read(step).partner
        parts, begin = [], 0
        for places in places_of[self.process]:
            own = slice(begin, begin + len(places))
            begin = own.stop
            fields = {name: value[places.to(self.device)] for name, value in there.items()}
            parts.append(Batch(x[own], **fields, partner=None if partner is None else x[partner[own].to(self.device)]))
        return StepBatch(parts, whole, places_of, self.process)


def worker_count(accelerator: Accelerator) -> int:
    """Loader workers of this process: the machine's cores shared between the processes on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    return min(MOST_WORKERS, max(1, cores // processes))
