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
    """The whole batch of one step, without images, and this process's parts of it, with images."""

    parts: list[Batch]  # one per micro-batch of this process
    whole: Batch  # of all processes, in the order of the batch; x is empty [B,0]
    places: tuple[tuple[Tensor, ...], ...]  # [process][part]: the places of the part's samples in `whole`, int64
    process: int  # index of this process

    def share(self, part: int) -> float:
        """Returns the share of the step's images that is in one of this process's parts."""
        return len(self.parts[part].y) / len(self.whole.y)

    def block(self, number: int, blocks: int) -> StepBatch:
        """Returns the batch of one domain, for a batch of equal blocks of one domain each."""
        start = number * (len(self.whole.y) // blocks)

        def of_block(places: Tensor) -> Tensor:
            size = len(places) // blocks
            return places[number * size : (number + 1) * size] - start

        places_of = tuple(tuple(of_block(places) for places in of_parts) for of_parts in self.places)
        parts = [part.block(number, blocks) for part in self.parts]
        return StepBatch(parts, self.whole.block(number, blocks), places_of, self.process)

    def gathered(self, z: list[Tensor], targets: list[Tensor | None]) -> Batch:
        """Returns the whole batch with features as x [B,K]: those of this process's parts, `z`, and of all others.

        Every process computes the loss of the whole batch. It has therefore the whole gradient of the heads, but only
        its own features' part of the encoder's gradient. Gradients are then averaged over P processes, so the gradient
        by the features is multiplied by P here.
        """
        own = torch.cat(z)
        if own.requires_grad and len(self.places) > 1:
            own = own.view_as(own)
            own.register_hook(lambda gradient: gradient * len(self.places))
        soft = torch.cat([part for part in targets if part is not None]) if targets[0] is not None else None
        return self.whole._replace(x=self._ordered(own), targets=None if soft is None else self._ordered(soft))

    def _ordered(self, own: Tensor) -> Tensor:
        """Returns the rows [B,…] of all processes in the order of the whole batch; only `own` keep their graph."""
        if len(self.places) == len(self.places[0]) == 1:
            return own  # the one part is the batch
        places = [torch.cat(of_parts) for of_parts in self.places]
        pieces = [own]
        if len(places) > 1:
            pieces = _all_gathered(own.detach(), [len(of_process) for of_process in places])
            pieces[self.process] = own
        return torch.cat(pieces)[torch.cat(places).argsort().to(own.device, non_blocking=True)]


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

    def __init__(
        self,
        job: Job,
        inputs: Inputs,
        annotations: Annotations,
        accelerator: Accelerator,
    ) -> None:
        training = job.training
        self.device, self.seed, self.last = accelerator.device, job.seed, job.setup.steps
        pools = job.split.train
        self.labels = annotations.labels.cpu()
        self.whole = job.sampler(self.labels)
        self.domain = job.split.domain_of[annotations.domains].cpu()  # int64 [N], −1 outside the training domains
        self.training = self._samples(torch.cat(list(pools)))
        algorithm = job.make(job.setup)  # on the CPU, where batches are drawn; the trained one is on the device
        assert isinstance(algorithm, Algorithm)
        self.algorithm = algorithm
        self.blocks = 1 if training.sampler == "pooled" else len(pools)
        self.processes, self.accumulation = accelerator.num_processes, training.accumulation
        if self.processes * self.accumulation > training.batch_size:
            raise UserError(
                f"training.batch_size: {training.batch_size} is less than {self.processes} process(es) × "
                f"training.accumulation {self.accumulation}; raise batch_size or lower accumulation"
            )
        self.process = accelerator.process_index
        self.inputs = inputs
        # partners are drawn for blocks of steps; a block that is no longer cached is drawn again
        self._partner_block = lru_cache(maxsize=2)(self._draw_partners)

    def _samples(self, rows: Tensor) -> Samples:
        return Samples(rows, self.labels[rows], self.domain[rows])

    def rows(self, step: int) -> Tensor:
        """Returns the rows of the whole batch of `step`, int64 [B]."""
        return self.whole.indices(step, step + 1)[0]

    def places(self, rows: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """Returns for each process and part the places of its samples in the whole batch of `rows`."""
        parts = self.processes * self.accumulation
        pieces = split_batch(torch.arange(len(rows)), self.domain[rows], parts, self.blocks)
        starts = range(0, parts, self.accumulation)
        return tuple(tuple(pieces[first : first + self.accumulation]) for first in starts)

    @property
    def largest_part(self) -> int:
        """Number of samples in the largest part of this process."""
        return max(len(places) for places in self.places(self.rows(0))[self.process])

    def _draw_partners(self, number: int) -> InputPartners | None:
        """Draws the partners of a block of steps, fields [S,B]."""
        first = number * PARTNER_STEPS
        last = min(first + PARTNER_STEPS, self.last)
        drawn = self._samples(self.whole.indices(first, last))
        return self.algorithm.input_partners(drawn, self.training, torch.arange(first, last))

    def partners(self, step: int) -> InputPartners | None:
        """Returns the partners of the whole batch of `step`, fields [B]; None: the method mixes no inputs."""
        number, place = divmod(step, PARTNER_STEPS)
        block = self._partner_block(number)
        return None if block is None else InputPartners(*(field[place] for field in block))

    def rows_to_read(self, step: int) -> RowsToRead:
        """Returns the rows that this process reads for `step`."""
        rows, partners = self.rows(step), self.partners(step)
        own = torch.cat(self.places(rows)[self.process])
        if partners is None:
            return RowsToRead(rows[own], own, None)
        position = torch.full((2 * len(rows),), -1)  # index in `place` of each place; B and more: outside the batch
        position[own] = torch.arange(len(own))
        wanted = partners.place[own]
        missing = wanted[position[wanted] < 0].unique()
        position[missing] = len(own) + torch.arange(len(missing))
        place = torch.cat([own, missing])
        return RowsToRead(torch.cat([rows, partners.row])[place], place, position[wanted])

    def begin(self, first: int = 0) -> Generator[tuple[int, StepBatch], None, None]:
        steps = StepRows(self.rows_to_read, self.seed, first, self.last)
        for step, x in enumerate(self.inputs.of_steps(steps), start=first):
            yield step, self._step_batch(step, x)

    def _step_batch(self, step: int, x: Tensor) -> StepBatch:
        """`x` is what this process has read, in the order of `rows_to_read`."""
        samples, partners = self._samples(self.rows(step)), self.partners(step)
        place = torch.arange(len(samples.row))
        places_of = self.places(samples.row)
        mixed: dict[str, Tensor] = {}
        if partners is not None:
            mixed = {"partner_y": self.labels[partners.row], "has_partner": partners.found}
        annotations = {"y": samples.y, "domain": samples.domain, "index": samples.row, "place": place, **mixed}
        whole = Batch(x.new_empty(len(place), 0), **self._there(annotations))
        partner = self.rows_to_read(step).partner
        parts, begin = [], 0
        for places in places_of[self.process]:
            own = slice(begin, begin + len(places))
            begin = own.stop
            # indexed here: an index that lies on the host would make it wait for the device
            fields = self._there({name: value[places] for name, value in annotations.items()})
            of_partner = None if partner is None else x[self._there({"partner": partner[own]})["partner"]]
            parts.append(Batch(x[own], **fields, partner=of_partner))
        return StepBatch(parts, whole, places_of, self.process)

    def _there(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the fields on the device. The copies are queued; the host does not wait for the device."""
        return {name: value.to(self.device, non_blocking=True) for name, value in fields.items()}
