"""Batches of cached features for the head bank."""

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
    samplers, own = _samplers(jobs, data)
    own = own.to(device)
    domain_of = torch.stack([job.split.domain_of for job in jobs]).to(device)  # [H, domains of the data]
    head = torch.arange(len(jobs), device=device)[:, None]  # [H,1]
    steps = jobs[0].setup.steps
    choose = _partner_choices(jobs, data)
    for first in range(begin, steps, BLOCK_STEPS):
        last = min(first + BLOCK_STEPS, steps)
        drawn = [sampler.indices(first, last) for sampler in samplers]
        rows = torch.stack(drawn, dim=1).index_select(1, own)  # [S,H,B]
        labels, domains = annotations.labels[rows], domain_of[head, annotations.domains[rows]]  # [S,H,B]
        place = torch.arange(rows.shape[-1], device=rows.device).expand_as(rows)
        partners, size = choose(Samples(rows, labels, domains), first), rows.shape[-1]
        read, placed = rows, place
        if partners is not None and bool((partners.place >= size).any()):  # from outside the batch: read them too
            read, placed = torch.cat([rows, partners.row], -1), torch.cat([place, partners.place], -1)  # [S,H,2B]
        elif len(samplers) == 1:
            read, placed = rows[:, :1], place[:, :1]  # [S,1,B]
        views = _drawn_views(jobs[: read.shape[1]], data.features, placed, first)
        for number, x in enumerate(_gathered(data.features, read, views)):
            x = x.expand(len(jobs), -1, -1)
            batch = Batch(x[:, :size], labels[number], domains[number], rows[number], place[number])
            if partners is not None:
                theirs = x[:, size:] if x.shape[1] > size else x.take_along_dim(partners.place[number][..., None], 1)
                y, found = annotations.labels[partners.row[number]], partners.found[number]
                batch = batch._replace(partner=theirs, partner_y=y, has_partner=found)
            yield batch


def _partner_choices(jobs: Sequence[Job], data: CachedData) -> Callable[[Samples, int], InputPartners | None]:
    """Returns a function: (batches of the steps from `first` on, fields [S,H,B]; `first`) → the partners of all heads.

    The function returns None if the method mixes no inputs.
    """
    first_one = jobs[0].make(jobs[0].setup)
    if not isinstance(first_one, Algorithm) or type(first_one).input_partners is Algorithm.input_partners:
        return lambda drawn, first: None
    annotations = data.annotations
    device = annotations.labels.device
    made = [job.make(job.setup) for job in jobs]
    algorithms = [algorithm.to(device) for algorithm in made if isinstance(algorithm, Algorithm)]
    pools = [torch.cat(list(job.split.train)).to(device) for job in jobs]
    domain_of = [job.split.domain_of.to(device) for job in jobs]

    def of_head(head: int, drawn: Samples, steps: Tensor) -> InputPartners | None:
        pool = pools[head]
        training = Samples(pool, annotations.labels[pool], domain_of[head][annotations.domains[pool]])
        return algorithms[head].input_partners(Samples(*(field[:, head] for field in drawn)), training, steps)

    def choose(drawn: Samples, first: int) -> InputPartners | None:
        steps = torch.arange(first, first + len(drawn.row), device=device)
        of_heads = [of_head(head, drawn, steps) for head in range(len(jobs))]
        chosen = [partners for partners in of_heads if partners is not None]
        return InputPartners(*(torch.stack(fields, 1) for fields in zip(*chosen, strict=True))) if chosen else None

    return choose


def _samplers(jobs: Sequence[Job], data: CachedData) -> tuple[list[BatchSampler], Tensor]:
    """Returns the distinct samplers, and the number of each job's own, int64 [H].

    Trials of one split and seed share one, which stores all training rows, and its draws.
    """
    known: dict[tuple[int, int], int] = {}
    samplers, own = list[BatchSampler](), list[int]()
    for job in jobs:
        key = id(job.split), job.seed
        if key not in known:
            known[key] = len(samplers)
            samplers.append(job.sampler(data.annotations.labels))
        own.append(known[key])
    return samplers, torch.tensor(own)


def _drawn_views(jobs: Sequence[Job], features: Features, place: Tensor, first: int) -> Tensor | None:
    """Draws the augmented view of each sample uniformly: int64 [S,H,B] in 1…views; None: only plain features exist.

    A function of seed, step and place in the batch: a row that is twice in a batch may have two different views.
    """
    if not features.views:
        return None
    seed = torch.tensor([job.seed for job in jobs], device=place.device)[:, None]  # [H,1]
    step = torch.arange(first, first + len(place), device=place.device)[:, None, None]  # [S,1,1]
    return 1 + integers(seed, step, Stream.VIEW, place, features.views)


def _gathered(features: Features, rows: Tensor, views: Tensor | None) -> Iterator[Tensor]:
    """Yields the features of each step, [H,B,K]; if they are in files, it reads several steps at once."""
    at_once = 1 if features.in_memory else max(1, READ_BYTES // (4 * features.width * rows[0].numel()))
    for first in range(0, len(rows), at_once):
        some = slice(first, first + at_once)
        yield from features[rows[some]] if views is None else features.of_views(rows[some], views[some])


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
