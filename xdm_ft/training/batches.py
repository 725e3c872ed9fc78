"""The batches of a training end to end: whole ones as a function of the step, cut up between processes and passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from xdm_ft.data.loading.samplers import DrawnRows, ImageRows, sampler
from xdm_ft.errors import UserError
from xdm_ft.randomness import Stream, bits
from xdm_ft.tensors import Batch
from xdm_ft.training import Job, Training
from xdm_ft.training.together import Together

if TYPE_CHECKING:
    from accelerate import Accelerator

MOST_WORKERS = 8  # per process; more only wait for each other


class MicroBatch(NamedTuple):
    batch: Batch
    weight: float  # its part of the step's images; those of all micro-batches of all processes sum to 1
    together: Together | None = None  # with those of the other processes, where the method asks for it


def deal(rows: Tensor, domain: Tensor, parts: int, blocks: int) -> list[Tensor]:
    """Cuts a batch into `parts` micro-batches that each get their share of every domain.

    `rows` int64 [B] are the batch's rows and `domain` int64 [B] their domains. `blocks` is the number of equal blocks
    of one domain that the batch consists of: D for a per-domain batch, whose micro-batches then hold equally many rows
    of each domain. 1 for a pooled batch: its counts per domain differ by one at most between micro-batches, and so do
    their sizes.
    """
    if parts == 1:
        return [rows]
    if blocks == 1:
        rows = rows[domain.argsort(stable=True)]
    table = rows.view(blocks, -1)
    return [table[:, part::parts].reshape(-1) for part in range(parts)]


def block(batch: Batch, number: int, blocks: int, axis: int = 0) -> Batch:
    """One of the equal blocks, a domain each, that a per-domain batch and its micro-batches consist of.

    `axis` is that of the samples: 1 in a bank, where that of the heads comes before it.
    """
    size = batch.y.shape[axis] // blocks
    fields = {name: value for name, value in batch._asdict().items() if value is not None}
    return Batch(**{name: value.narrow(axis, number * size, size) for name, value in fields.items()})


class StepRows(Sampler[list[tuple[int, int]]]):
    """Batch sampler of a DataLoader: this process's rows of steps first…last−1, one micro-batch after the other.

    A row comes with the seed of its augmentation (`DrawnRows`), a function of the job's seed, the step and the row.
    """

    def __init__(self, micro_batches: Callable[[int], list[Tensor]], seed: int, first: int, last: int) -> None:
        self.micro_batches, self.seed, self.first, self.last = micro_batches, seed, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first, self.last):
            rows = torch.cat(self.micro_batches(step))
            seeds = bits(self.seed, step, Stream.AUGMENTATION, rows)
            yield list(zip(rows.tolist(), seeds.tolist(), strict=True))


class TrainingBatches:
    """`begin(first)` iterates over (step, this process's micro-batches of it, on its device), steps first…steps−1.

    What a step's batch holds, augmentation included, depends on the job's seed and the step only. It is cut into
    processes × accumulation micro-batches. The mean of their losses weighted by their sizes is exactly the batch's,
    with three exceptions: a pooled batch under `loss_average: domain`, where a micro-batch's mean over its own domains
    takes the place of the whole batch's; `class_weights`, which are normalised in each micro-batch; and methods that
    compare samples or domains (partners, penalties, domain weights), which see those of a micro-batch, or `together` of
    those that all processes have at a time.
    """

    def __init__(
        self,
        job: Job,
        training: Training,
        images: ImageRows,
        labels: Tensor,
        domains: Tensor,
        accelerator: Accelerator,
        together: bool = False,
    ) -> None:
        """`images` in the training's transform; `labels` and `domains` int64 [N], domains numbered as in the data set.

        `together`: losses are computed over the micro-batches that all processes have at a time.
        """
        self.device, self.seed, self.last = accelerator.device, job.seed, job.setup.steps
        pools = job.split.train
        self.whole = sampler(training.sampler, pools, training.batch_size, job.seed, labels)
        self.domain = job.split.domain_of[domains]  # int64 [N], −1 outside the training domains
        self.labels_there, self.domain_there = labels.to(self.device), self.domain.to(self.device)
        self.blocks = 1 if training.sampler == "pooled" else len(pools)
        self.parts = accelerator.num_processes * training.accumulation
        if self.parts > training.batch_size:
            raise UserError(
                f"training.batch_size: {training.batch_size} is less than {accelerator.num_processes} process(es) × "
                f"accumulation {training.accumulation}; raise batch_size or lower accumulation"
            )
        self.process, self.accumulation = accelerator.process_index, training.accumulation
        begin = self.process * self.accumulation
        self.own = slice(begin, begin + self.accumulation)
        self.together = together and accelerator.num_processes > 1
        self.sizes = [len(rows) for rows in self._micro_batches(0)]
        self.images, self.workers = images, worker_count(accelerator)

    def rows(self, step: int) -> Tensor:
        """int64 [B]: the rows of the whole batch of `step`."""
        return self.whole.indices(step, step + 1)[0]

    def _micro_batches(self, step: int) -> list[Tensor]:
        rows = self.rows(step)
        return deal(rows, self.domain[rows], self.parts, self.blocks)[self.own]

    def begin(self, first: int = 0) -> Iterator[tuple[int, list[MicroBatch]]]:
        loader: DataLoader[Any] = DataLoader(
            DrawnRows(self.images),
            batch_sampler=StepRows(self._micro_batches, self.seed, first, self.last),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # the loader would otherwise draw from the global one
        )
        for step, (x, rows) in enumerate(loader, start=first):
            x, rows = x.to(self.device, non_blocking=True), rows.to(self.device, non_blocking=True)
            together = self._together(step) if self.together else [None] * self.accumulation
            pieces = zip(x.split(self.sizes), rows.split(self.sizes), together, strict=True)
            yield step, [self._micro_batch(*piece) for piece in pieces]

    def _micro_batch(self, x: Tensor, index: Tensor, together: Together | None) -> MicroBatch:
        batch = Batch(x, self.labels_there[index], self.domain_there[index], index)
        return MicroBatch(batch, len(index) / self.whole.batch, together)

    def _together(self, step: int) -> list[Together]:
        """For each of this process's micro-batches: it and those of the other processes, in the whole batch's order."""
        rows = self.rows(step)
        places = deal(torch.arange(len(rows)), self.domain[rows], self.parts, self.blocks)
        found = []
        for number in range(self.accumulation):
            pieces = places[number :: self.accumulation]  # one of each process
            joined = torch.cat(pieces)
            order = joined.argsort()
            index = rows[joined[order]].to(self.device)
            found.append(
                Together(
                    y=self.labels_there[index],
                    domain=self.domain_there[index],
                    index=index,
                    order=order.to(self.device),
                    sizes=tuple(len(piece) for piece in pieces),
                    process=self.process,
                    weight=len(index) / self.whole.batch,
                )
            )
        return found


def worker_count(accelerator: Accelerator) -> int:
    """Loader workers of this process: the machine's cores shared between the processes on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    return min(MOST_WORKERS, max(1, cores // processes))
