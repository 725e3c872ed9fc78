"""Cached features as the head bank reads them: batches to train on, images to select by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.data.loading.samplers import sampler
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.tensors import Batch
from xdm_ft.training import Job, Training
from xdm_ft.training.selection import rows_of_rules

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features

BLOCK_STEPS = 256  # steps whose rows are drawn at once
LOGITS_AT_ONCE = 1 << 24  # of validation images, all heads together
GROUP_ROWS = 64  # fewer validation images are not worth a matrix product of their own


@dataclass(frozen=True)
class CachedData:
    """What all heads read, on one device: features of N images, their labels and domains (int64 [N])."""

    features: Features
    labels: Tensor
    domains: Tensor  # numbered as in the data set
    worst_of: Tensor | None = None  # what worst_domain_accuracy looks at, −1: left out; None: the domains


def batches(jobs: Sequence[Job], data: CachedData, training: Training, begin: int = 0) -> Iterator[Batch]:
    """The batches of all steps from `begin` on, each head with its own rows: x [H,B,K], y, domain and index [H,B]."""
    samplers = [sampler(training.sampler, job.split.train, training.batch_size, job.seed, data.labels) for job in jobs]
    domain_of = torch.stack([job.split.domain_of for job in jobs]).to(data.labels.device)  # [H, domains of the data]
    head = torch.arange(len(jobs), device=data.labels.device)[:, None]  # [H,1]
    steps = jobs[0].setup.steps
    for first in range(begin, steps, BLOCK_STEPS):
        last = min(first + BLOCK_STEPS, steps)
        rows = torch.stack([own.indices(first, last) for own in samplers], dim=1).to(data.labels.device)  # [S,H,B]
        labels, domains = data.labels[rows], domain_of[head, data.domains[rows]]  # [S,H,B]
        for index, y, domain in zip(rows, labels, domains, strict=True):
            yield Batch(data.features[index], y, domain, index)


def head_logits(features: Features, rows: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Logits float32 [n,C] for the images `rows` (int64 [n]) of the class head in a selected `state`."""
    device = features.device
    return F.linear(features[rows.to(device)], state["head.weight"].to(device), state["head.bias"].to(device))


class Validation:
    """The images that selection looks at. A row that several heads look at is gathered and multiplied once.

    Rows are in groups that the same heads look at, so that no head is multiplied with what another one looks at, unless
    the groups would be so small that one product of all rows with all heads is faster.
    """

    def __init__(self, jobs: Sequence[Job], data: CachedData, rules: Sequence[str], metric: str) -> None:
        self.metric = metric
        wanted = [rows_of_rules(job, rules) for job in jobs]
        none = torch.empty(0, dtype=torch.int64)
        union = torch.unique(torch.cat([none, *(rows for of_head in wanted for rows in of_head.values())]))  # [U]
        looks = torch.stack([torch.isin(union, torch.cat([none, *of_head.values()])) for of_head in wanted], 1)  # [U,H]
        groups, group = looks.unique(dim=0, return_inverse=True)  # bool [G,H], int64 [U]
        if len(union) < GROUP_ROWS * max(1, len(groups)):
            groups, group = looks.new_ones(1, len(jobs)), torch.zeros_like(group)
        order = group.argsort(stable=True)
        self.features = data.features[union[order].to(data.labels.device)]  # [U,K]
        self.sizes = group.bincount(minlength=len(groups)).tolist()
        self.heads = [heads.nonzero()[:, 0].to(data.labels.device) for heads in groups]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        self.views = [
            {rule: _view(place[torch.searchsorted(union, rows)], rows, data) for rule, rows in of_head.items()}
            for of_head in wanted
        ]

    @torch.no_grad()
    def values(self, weight: Tensor, bias: Tensor) -> list[dict[str, float] | None]:
        """For each head the metric by selection rule; None for a head whose logits are not finite.

        `weight` is [H,C,K], `bias` [H,C].
        """
        at_once = max(1, LOGITS_AT_ONCE // max(1, len(self.features) * bias.shape[1]))
        values = []
        for first in range(0, len(bias), at_once):
            last = min(first + at_once, len(bias))
            logits = self._logits(weight, bias, first, last)
            values += [self._values_of_head(logits[:, head - first], self.views[head]) for head in range(first, last)]
        return values

    def _logits(self, weight: Tensor, bias: Tensor, first: int, last: int) -> Tensor:
        """[U,last − first,C] of heads first … last−1, filled where it is read."""
        logits = self.features.new_empty(len(self.features), last - first, bias.shape[1])
        for z, out, heads in zip(self.features.split(self.sizes), logits.split(self.sizes), self.heads, strict=True):
            own = heads[(heads >= first) & (heads < last)]
            product = torch.addmm(bias[own].flatten(), z, weight[own].flatten(0, 1).T)
            out[:, own - first] = product.view(len(z), len(own), bias.shape[1])
        return logits

    def _values_of_head(
        self, logits: Tensor, views: dict[str, tuple[Tensor, Tensor, Tensor]]
    ) -> dict[str, float] | None:
        own = {rule: (logits[place], labels, worst_of) for rule, (place, labels, worst_of) in views.items()}
        if not all(torch.isfinite(values).all() for values, _, _ in own.values()):
            return None
        return {rule: metric_of(self.metric, *of_rule) for rule, of_rule in own.items()}


def _view(place: Tensor, rows: Tensor, data: CachedData) -> tuple[Tensor, Tensor, Tensor]:
    """Where a rule's rows are among the features, their labels, and what the worst domain is one of."""
    place, rows = place.to(data.labels.device), rows.to(data.labels.device)
    return place, data.labels[rows], (data.domains if data.worst_of is None else data.worst_of)[rows]
