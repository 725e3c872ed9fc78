"""Nearest neighbours of images by the cosine of their features, exact and in blocks, and the robustness index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from xdm_ft.features.cache import ROWS_AT_ONCE
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.randomness import sample

NEAREST = 10  # neighbours of each image
COSINES_AT_ONCE = 1 << 25  # in memory, 128 MiB in float32
SAMPLED = 5000  # images at most, where a sample will do


class Rows(Protocol):
    """Features of images: `features[rows]` is float [n,K] for int64 rows [n], such as `features.cache.Features`."""

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Neighbours:
    """The nearest other images of n images, by cosine. They are numbered 0…n−1, in the order of `rows`."""

    rows: np.ndarray  # int64 [n], of the data set
    nearest: np.ndarray  # int64 [n,k], nearest first, k = min(10, n − 1); −1: there is none
    cosines: np.ndarray  # float32 [n,k]; NaN where there is none
    foreign: np.ndarray  # int64 [n], the nearest image of another domain; −1: there is none


def directions(features: Rows, rows: Tensor, name: Callable[[int], str]) -> Tensor:
    """Returns the features of some images divided by their length, float32 [n,K]; zero features stay zero.

    Raises `UserError` with the `name` of the first image whose features are not finite.
    """
    unit: Tensor | None = None
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        z = features[some].float()
        finite = z.isfinite().all(1)
        if not finite.all():
            row = int(some[int((~finite).nonzero()[0])])
            raise UserError(f"{name(row)}: its features hold NaN or infinite numbers; repair them or leave it out")
        # by the largest entry first: squares of very large and very small features leave float32
        z = z / z.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        unit = z.new_empty(len(rows), z.shape[1]) if unit is None else unit
        unit[start : start + len(some)] = z / z.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return torch.zeros(0, 1) if unit is None else unit


def neighbours(unit: Tensor, rows: Tensor, domains: np.ndarray, k: int = NEAREST) -> Neighbours:
    """Returns the nearest neighbours of n images in one pass over blocks of their cosines.

    An image whose features are zero has no direction: it has no neighbours and is none. Time: 2 n² K operations, and
    a selection among n² cosines; memory: `unit` and some 300 MB.

    Args:
        unit: float32 [n,K], as `directions` returns them.
        rows: int64 [n], their rows in the data set.
        domains: int64 [n].
    """
    n, device = len(unit), unit.device
    k = max(0, min(k, n - 1))
    nearest, cosines = torch.full((n, k), -1), torch.full((n, k), torch.nan)
    foreign = torch.full((n,), -1)
    domain = torch.from_numpy(np.ascontiguousarray(domains)).to(device)
    without = ~unit.any(1)  # [n]
    size = max(1, COSINES_AT_ONCE // max(1, n))
    for start in range(0, n, size):
        block = slice(start, min(n, start + size))
        of_block = unit[block] @ unit.T  # [b,n]
        of_block[:, without] = -torch.inf
        of_block[without[block]] = -torch.inf
        of_block.diagonal(start).fill_(-torch.inf)
        values, indices = (tensor.cpu() for tensor in of_block.topk(k, dim=1))
        exists = values > -torch.inf  # −inf is not an image
        nearest[block][exists], cosines[block][exists] = indices[exists], values[exists]
        of_block.masked_fill_(domain[block, None] == domain, -torch.inf)
        values, indices = (tensor.cpu() for tensor in of_block.max(1))
        foreign[block] = torch.where(values > -torch.inf, indices, -1)
        pulse.beat()
    arrays = (table.numpy() for table in (rows.cpu(), nearest, cosines, foreign))
    return Neighbours(*arrays)


@dataclass(frozen=True)
class Robustness:
    """Whether the neighbours of images share their class or their domain; None: no neighbour decides it."""

    index: float | None  # 1: always the class, 0: always the domain
    same_domain_share: float | None  # of all neighbours


def robustness(nearest: np.ndarray, labels: np.ndarray, domains: np.ndarray) -> Robustness:
    """Returns SO / (SO + OS) over the neighbours of all images, and the share of neighbours in the image's domain.

    SO counts neighbours of the same class and another domain, OS those of another class and the same domain; the other
    neighbours say nothing about which of the two the encoder follows (de Jong et al. 2025, Current Pathology Foundation
    Models are unrobust to Medical Center Differences).

    Args:
        nearest: int64 [n,k], as in `Neighbours`.
        labels, domains: int64 [n].
    """
    exists = nearest >= 0
    same_class = (labels[nearest] == labels[:, None])[exists]
    same_domain = (domains[nearest] == domains[:, None])[exists]
    so, os = int((same_class & ~same_domain).sum()), int((~same_class & same_domain).sum())
    index = so / (so + os) if so + os and len(np.unique(domains)) > 1 else None  # in one domain all are of the same
    return Robustness(index, float(same_domain.mean()) if len(same_domain) else None)


def sampled_robustness(features: Rows, rows: np.ndarray, labels: np.ndarray, domains: np.ndarray) -> Robustness:
    """Returns the robustness of an encoder's features of a `sample` of some rows of the data set."""
    rows = sample(rows, domains[rows] * (labels.max(initial=0) + 1) + labels[rows], SAMPLED)
    chosen = torch.from_numpy(rows)
    unit = directions(features, chosen, lambda row: f"row {row} of the data set")
    return robustness(neighbours(unit, chosen, domains[rows]).nearest, labels[rows], domains[rows])
