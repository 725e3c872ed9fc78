"""The rows of every batch, as a function of seed and step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, integers, permutation

SamplerName = Literal["per_domain", "class_balanced", "pooled"]


class BatchSampler(ABC):
    """The rows of every batch: a pure function of seed and step. It starts at any step and has no state to save.

    It draws on the device of its pools: the same rows on every kind of device.
    """

    def __init__(self, pools: Sequence[Tensor], batch: int, seed: int) -> None:
        if not pools or any(len(pool) == 0 for pool in pools):
            raise ValueError("a sampler needs at least one pool, and at least one row in each")
        self.batch, self.seed = batch, seed  # `batch`: rows per step
        self.rows = torch.cat(list(pools))  # all rows, int64

    @abstractmethod
    def indices(self, first: int, last: int) -> Tensor:
        """Returns the rows of the steps first…last−1: int64 [last − first, batch]."""

    def _keys(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Returns the keys of the draws: steps [last − first,1], and positions in the batch [1,batch]."""
        device = self.rows.device
        return torch.arange(first, last, device=device)[:, None], torch.arange(self.batch, device=device)[None]


class PerDomainSampler(BatchSampler):
    """`batch_size` rows from each of D pools at every step, domain after domain.

    Rows are drawn uniformly with replacement, as in DomainBed's infinite loaders (Gulrajani & Lopez-Paz 2021).
    """

    def __init__(self, pools: Sequence[Tensor], batch_size: int, seed: int) -> None:
        super().__init__(pools, batch_size * len(pools), seed)
        sizes = torch.tensor([len(pool) for pool in pools], device=self.rows.device)
        self.size = sizes.repeat_interleave(batch_size)  # [batch]: size of the pool that each position draws from
        # [batch]: where that pool begins in `rows`
        self.start = (sizes.cumsum(0) - sizes).repeat_interleave(batch_size)

    def indices(self, first: int, last: int) -> Tensor:
        steps, position = self._keys(first, last)
        return self.rows[self.start + integers(self.seed, steps, Stream.BATCH, position, self.size)]  # [S,batch]


class ClassBalancedSampler(BatchSampler):
    """`batch_size` rows from each of D pools at every step, domain after domain; classes are equally likely.

    A row is drawn in two steps, with replacement: first one of the classes in the pool, then one of its rows, both
    uniformly. `labels` int64 [N] are the labels of all rows of the data set.
    """

    def __init__(self, pools: Sequence[Tensor], batch_size: int, seed: int, labels: Tensor) -> None:
        by_class = [pool[labels[pool].argsort(stable=True)] for pool in pools]
        super().__init__(by_class, batch_size * len(pools), seed)
        sizes = [labels[rows].unique_consecutive(return_counts=True)[1] for rows in by_class]
        self.size = torch.cat(sizes)  # rows of every class of every pool, pool after pool
        self.start = self.size.cumsum(0) - self.size  # where that class begins in `rows`
        classes = torch.tensor([len(of_pool) for of_pool in sizes], device=self.rows.device)
        self.classes = classes.repeat_interleave(batch_size)  # [batch]: number of classes that each position draws from
        # [batch]: index of its first class in `size`
        self.first = (classes.cumsum(0) - classes).repeat_interleave(batch_size)

    def indices(self, first: int, last: int) -> Tensor:
        steps, position = self._keys(first, last)
        drawn = self.first + integers(self.seed, steps, Stream.BATCH_CLASS, position, self.classes)  # [S,batch]
        return self.rows[self.start[drawn] + integers(self.seed, steps, Stream.BATCH, position, self.size[drawn])]


class PooledSampler(BatchSampler):
    """`batch_size` rows from all pools together, by successive seeded permutations.

    Every row appears once per epoch. A batch may contain rows of two epochs, so that no row is dropped.
    """

    def __init__(self, pools: Sequence[Tensor], batch_size: int, seed: int) -> None:
        super().__init__(pools, batch_size, seed)

        @lru_cache(maxsize=2)  # not state: neighbouring steps share an epoch, and a batch may contain rows of two
        def order(epoch: int) -> Tensor:
            rows = self.rows[permutation(seed, epoch, Stream.PERMUTATION, len(self.rows), self.rows.device)]
            return rows.int() if int(rows.max()) < 1 << 31 else rows  # half the memory

        self._order = order

    def indices(self, first: int, last: int) -> Tensor:
        n, begin, end = len(self.rows), first * self.batch, last * self.batch
        epochs = range(begin // n, -(-end // n))
        pieces = [self._order(epoch)[max(begin - epoch * n, 0) : end - epoch * n].long() for epoch in epochs]
        return torch.cat([self.rows[:0], *pieces]).view(last - first, self.batch)  # [S,batch]


def sampler(name: SamplerName, pools: Sequence[Tensor], batch_size: int, seed: int, labels: Tensor) -> BatchSampler:
    """Returns the sampler with the name `training.sampler`, over one pool of rows (int64) per training domain.

    `labels` int64 [N] are the labels of all rows of the data set, on the device of the pools.
    """
    if name == "class_balanced":
        return ClassBalancedSampler(pools, batch_size, seed, labels)
    return (PerDomainSampler if name == "per_domain" else PooledSampler)(pools, batch_size, seed)


MAX_STEPS = 1_000_000_000  # a training keeps a number of every step in memory


def steps_of(steps: int | None, epochs: float | None, rows: int, batch: int) -> int:
    """Returns the number of training steps: `steps`, or what `epochs` passes over `rows` rows need, rounded up."""
    if (steps is None) == (epochs is None):
        raise UserError("training: give either steps or epochs")
    if steps is not None:
        return steps
    # as a decimal fraction: in floating point 2.2 · 25 rows are 55.00000000000001, one batch more than 55
    number = math.ceil(Fraction(str(epochs)) * rows / batch)
    if number > MAX_STEPS:
        raise UserError(f"training.epochs: {epochs:g} are {number} steps; at most {MAX_STEPS} are allowed, lower it")
    return number
