"""Batches of cached features for the head bank, and the logits of cached features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Method
from xdm_ft.protocol.samplers import BatchSampler
from xdm_ft.runtime.randomness import Stream, integers
from xdm_ft.runtime.tensors import Annotations, Batch, InputPartners, Samples
from xdm_ft.training import Job

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features

BLOCK_STEPS = 256  # steps whose rows are drawn at once
# Memory limits in bytes. They are constants, never the machine's free memory: products of blocks of another size may
# round differently, so that results would depend on the machine.
KEEP_IN_MEMORY_BYTES = 1 << 30  # validation features up to this size stay in memory; else each evaluation reads them
READ_BYTES = 1 << 27  # features that are read from files at once


@dataclass(frozen=True)
class CachedData:
    """Features and annotations of N images, on one device, which all heads read."""

    features: Features
    annotations: Annotations


def batches(jobs: Sequence[Job], data: CachedData, begin: int = 0) -> Iterator[Batch]:
    """Yields the batches of all steps from `begin` on: x [H,B,K]; y, domain, index, place [H,B].

    Each head has its own rows. If the method mixes inputs, the batches have `partner`, `partner_y` and `has_partner`.
    If all heads have the same rows, x is a view of one [B,K]: a step reads it from the cache, not from memory.
    """
    annotations = data.annotations
    device = annotations.labels.device
    samplers, sampler_of = _samplers(jobs, annotations.labels)
    domain_of = torch.stack([job.split.domain_of for job in jobs]).to(device)  # [H, domains of the data]
    head = torch.arange(len(jobs), device=device)[:, None]  # [H,1]
    steps = jobs[0].setup.steps
    draw_partners = _partner_choices(jobs, annotations)
    for first in range(begin, steps, BLOCK_STEPS):
        last = min(first + BLOCK_STEPS, steps)
        drawn = [sampler.indices(first, last) for sampler in samplers]
        rows = torch.stack(drawn, dim=1).index_select(1, sampler_of)  # [S,H,B]
        labels, domains = annotations.labels[rows], domain_of[head, annotations.domains[rows]]  # [S,H,B]
        size = rows.shape[-1]
        position = torch.arange(size, device=device).expand_as(rows)
        partners = draw_partners(Samples(rows, labels, domains), first)
        read, read_position = rows, position
        if partners is not None and bool((partners.place >= size).any()):  # from outside the batch: read them too
            read, read_position = torch.cat([rows, partners.row], -1), torch.cat([position, partners.place], -1)
        elif len(samplers) == 1:
            read, read_position = rows[:, :1], position[:, :1]  # [S,1,B]
        views = _drawn_views(jobs[: read.shape[1]], data.features, read_position, first)
        for number, x in enumerate(_gathered(data.features, read, views)):
            x = x.expand(len(jobs), -1, -1)
            batch = Batch(x[:, :size], labels[number], domains[number], rows[number], position[number])
            if partners is not None:
                partner = x[:, size:] if x.shape[1] > size else x.take_along_dim(partners.place[number][..., None], 1)
                partner_y = annotations.labels[partners.row[number]]
                batch = batch._replace(partner=partner, partner_y=partner_y, has_partner=partners.found[number])
            yield batch


def _partner_choices(jobs: Sequence[Job], annotations: Annotations) -> Callable[[Samples, int], InputPartners | None]:
    """Returns a function: (batches of the steps from `first` on, fields [S,H,B]; `first`) → the partners of all heads.

    The function returns None if the method mixes no inputs.
    """
    device, algorithms = annotations.labels.device, list[Algorithm]()
    for job in jobs:
        algorithm = job.make(job.setup)
        if not isinstance(algorithm, Algorithm) or type(algorithm).input_partners is Algorithm.input_partners:
            return lambda drawn, first: None
        algorithms.append(algorithm.to(device))
    pools = [torch.cat(list(job.split.train)).to(device) for job in jobs]
    domain_of = [job.split.domain_of.to(device) for job in jobs]

    def partners_of(head: int, drawn: Samples, steps: Tensor) -> InputPartners | None:
        pool = pools[head]
        training = Samples(pool, annotations.labels[pool], domain_of[head][annotations.domains[pool]])
        return algorithms[head].input_partners(Samples(*(field[:, head] for field in drawn)), training, steps)

    def draw(drawn: Samples, first: int) -> InputPartners | None:
        steps = torch.arange(first, first + len(drawn.row), device=device)
        chosen = [p for head in range(len(jobs)) if (p := partners_of(head, drawn, steps)) is not None]
        return InputPartners(*(torch.stack(fields, 1) for fields in zip(*chosen, strict=True))) if chosen else None

    return draw


def _samplers(jobs: Sequence[Job], labels: Tensor) -> tuple[list[BatchSampler], Tensor]:
    """Returns the distinct samplers, and the number of each job's sampler, int64 [H].

    Trials of one split and seed share one, which stores all training rows, and its draws.
    """
    numbers: dict[tuple[int, int], int] = {}
    samplers = list[BatchSampler]()
    for job in jobs:
        if (id(job.split), job.seed) not in numbers:
            numbers[id(job.split), job.seed] = len(samplers)
            samplers.append(job.sampler(labels))
    return samplers, torch.tensor([numbers[id(job.split), job.seed] for job in jobs], device=labels.device)


def _drawn_views(jobs: Sequence[Job], features: Features, position: Tensor, first: int) -> Tensor | None:
    """Draws the augmented view of each sample uniformly: int64 [S,H,B] in 1…views; None: only plain features exist.

    A function of seed, step and position in the batch: a row that is twice in a batch may have two different views.
    """
    if not features.views:
        return None
    seed = torch.tensor([job.seed for job in jobs], device=position.device)[:, None]  # [H,1]
    step = torch.arange(first, first + len(position), device=position.device)[:, None, None]  # [S,1,1]
    return 1 + integers(seed, step, Stream.VIEW, position, features.views)


def _gathered(features: Features, rows: Tensor, views: Tensor | None) -> Iterator[Tensor]:
    """Yields the features of each step, [H,B,K]; if they are in files, it reads several steps at once."""
    at_once = 1 if features.in_memory else max(1, READ_BYTES // (4 * features.width * rows[0].numel()))
    for first in range(0, len(rows), at_once):
        steps = slice(first, first + at_once)
        yield from features[rows[steps]] if views is None else features.of_views(rows[steps], views[steps])


@torch.no_grad()
def cached_logits(features: Features, rows: Tensor, model: Method) -> Tensor:
    """Returns logits [n,C] for the images `rows` (int64 [n]); `model` is in eval mode, on the features' device."""
    blocks = [rows] if fits_in_memory(features, len(rows)) else rows.split(rows_at_once(features))
    return torch.cat([model.logits(features[block.to(features.device)]) for block in blocks])


def fits_in_memory(features: Features, rows: int) -> bool:
    """Returns whether the features of this number of validation rows stay in memory."""
    return 4 * rows * features.width <= KEEP_IN_MEMORY_BYTES


def rows_at_once(features: Features) -> int:
    return max(1, READ_BYTES // (4 * features.width))
