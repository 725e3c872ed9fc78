"""Batches of an end-to-end training: a function of the step, split between processes and micro-batches."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import all_gather

from xdm_ft.algorithms import Algorithm
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Annotations, Batch, InputPartners, Samples
from xdm_ft.training import Job
from xdm_ft.training.end_to_end.inputs import Inputs, RowsToRead, StepRows

if TYPE_CHECKING:
    from accelerate import Accelerator

PARTNER_STEPS = 64  # steps whose partners are drawn at once: with `partners: all` each draw sorts all training rows


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

        def in_block(positions: Tensor) -> Tensor:
            size = len(positions) // blocks
            return positions[number * size : (number + 1) * size] - start

        positions = tuple(tuple(map(in_block, of_process)) for of_process in self.positions)
        parts = [part.block(number, blocks) for part in self.parts]
        return StepBatch(parts, self.full_batch.block(number, blocks), positions, self.process)

    def gathered(self, z: list[Tensor]) -> Batch:
        """Returns the full batch with features as x [B,K]: those of this process's parts, `z`, and of all others.

        Every process computes the loss of the full batch. It has therefore the complete gradient of the heads, but only
        its own features' part of the encoder's gradient. Gradients are then averaged over P processes, so the gradient
        by the features is multiplied by P here.
        """
        own = torch.cat(z)
        if own.requires_grad and len(self.positions) > 1:
            own = own.view_as(own)
            own.register_hook(lambda gradient: gradient * len(self.positions))
        soft_labels = [part.targets for part in self.parts if part.targets is not None]
        targets = self._in_order(torch.cat(soft_labels)) if soft_labels else None
        return self.full_batch._replace(x=self._in_order(own), targets=targets)

    def _in_order(self, own: Tensor) -> Tensor:
        """Returns the rows [B,…] of all processes in the order of the full batch; only `own` keep their graph."""
        if len(self.positions) == len(self.positions[0]) == 1:
            return own  # the one part is the batch
        positions = [torch.cat(of_process) for of_process in self.positions]
        pieces = [own]
        if len(positions) > 1:
            pieces = _all_gathered(own.detach(), [len(of_process) for of_process in positions])
            pieces[self.process] = own
        return torch.cat(pieces)[torch.cat(positions).argsort().to(own.device, non_blocking=True)]


def _all_gathered(own: Tensor, sizes: list[int]) -> list[Tensor]:
    """Returns the rows of each process; `sizes` are their numbers, which every process knows."""
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in sizes]
    all_gather(everyone, padded)
    return [rows[:size] for rows, size in zip(everyone, sizes, strict=True)]


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
        algorithm = job.make(job.setup)  # on the CPU, where batches are drawn; the trained one is on the device
        assert isinstance(algorithm, Algorithm)
        self.algorithm = algorithm
        self.blocks = 1 if training.sampler == "pooled" else len(pools)
        self.process, self.processes = accelerator.process_index, accelerator.num_processes
        self.accumulation = training.accumulation
        if self.processes * self.accumulation > training.batch_size:
            raise UserError(
                f"training.batch_size: {training.batch_size} is less than {self.processes} process(es) × "
                f"training.accumulation {self.accumulation}; raise batch_size or lower accumulation"
            )
        # partners are drawn for blocks of steps; a block that is no longer cached is drawn again
        self._partner_block = lru_cache(maxsize=2)(self._draw_partners)

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

    @property
    def largest_part(self) -> int:
        """Number of samples in the largest part of this process."""
        return max(map(len, self.positions(self.rows(0))[self.process]))

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
        own = torch.cat(self.positions(rows)[self.process])
        if partners is None:
            return RowsToRead(rows[own], own, None)
        index_of = torch.full((2 * len(rows),), -1)  # index in `read` of each position; B and more: outside the batch
        index_of[own] = torch.arange(len(own))
        wanted = partners.place[own]
        missing = wanted[index_of[wanted] < 0].unique()
        index_of[missing] = len(own) + torch.arange(len(missing))
        read = torch.cat([own, missing])
        return RowsToRead(torch.cat([rows, partners.row])[read], read, index_of[wanted])

    def begin(self, first: int = 0) -> Generator[tuple[int, StepBatch], None, None]:
        steps = StepRows(self.rows_to_read, self.seed, first, self.steps)
        for step, x in enumerate(self.inputs.of_steps(steps), start=first):
            yield step, self._step_batch(step, x)

    def _step_batch(self, step: int, x: Tensor) -> StepBatch:
        """`x` is what this process has read, in the order of `rows_to_read`."""
        samples, partners = self._samples(self.rows(step)), self.partners(step)
        position = torch.arange(len(samples.row))
        annotations = {"y": samples.y, "domain": samples.domain, "index": samples.row, "place": position}
        if partners is not None:
            annotations |= {"partner_y": self.labels[partners.row], "has_partner": partners.found}
        full_batch = Batch(x.new_empty(len(position), 0), **self._to_device(annotations))
        partner, positions = self.rows_to_read(step).partner, self.positions(samples.row)
        parts, begin = [], 0
        for of_part in positions[self.process]:
            own = slice(begin, begin + len(of_part))
            begin = own.stop
            # indexed here: an index that lies on the host would make it wait for the device
            fields = self._to_device({name: value[of_part] for name, value in annotations.items()})
            partner_x = None if partner is None else x[partner[own].to(self.device, non_blocking=True)]
            parts.append(Batch(x[own], **fields, partner=partner_x))
        return StepBatch(parts, full_batch, positions, self.process)

    def _to_device(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the fields on the device. The copies are queued; the host does not wait for the device."""
        return {name: value.to(self.device, non_blocking=True) for name, value in fields.items()}
