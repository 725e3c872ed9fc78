"""Cached features as the head bank reads them: batches to train on, images to select by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.protocol.samplers import BatchSampler, sampler
from xdm_ft.randomness import Stream, integers
from xdm_ft.tensors import Batch, InputPartners, Samples
from xdm_ft.training import Job, Training
from xdm_ft.training.rule_images import RuleImages, rule_images
from xdm_ft.training.selection import rows_of_rules, split_of

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features

BLOCK_STEPS = 256  # steps whose rows are drawn at once
LOGITS_AT_ONCE = 1 << 24  # of validation images, all heads together
LOGITS_PER_READING = 1 << 28  # the same where the images are more than are held: further heads read them once more
GROUP_ROWS = 64  # fewer validation images are not worth a matrix product of their own
# Bounds on what is in memory at once, in bytes. What is held or read again follows from the recipe and the data, never
# from the machine: products of other blocks may round otherwise.
HELD_BYTES = 1 << 30  # of the features that selection looks at; more are read again at each evaluation
READ_BYTES = 1 << 27  # of features that are read from their files at once


@dataclass(frozen=True)
class CachedData:
    """What all heads read, on one device: features of N images, their labels and domains (int64 [N])."""

    features: Features
    labels: Tensor
    domains: Tensor  # numbered as in the data set
    worst_of: Tensor | None = None  # what worst_domain_accuracy looks at, −1: left out; None: the domains


def batches(jobs: Sequence[Job], data: CachedData, training: Training, begin: int = 0) -> Iterator[Batch]:
    """The batches of all steps from `begin` on, each head with its own rows: x [H,B,K], y, domain, index, place [H,B].

    Where inputs are mixed the partners' features, classes and whether there is one come with them.
    """
    samplers = _samplers(jobs, data, training)
    domain_of = torch.stack([job.split.domain_of for job in jobs]).to(data.labels.device)  # [H, domains of the data]
    head = torch.arange(len(jobs), device=data.labels.device)[:, None]  # [H,1]
    steps = jobs[0].setup.steps
    choose = _partner_choices(jobs, data)
    for first in range(begin, steps, BLOCK_STEPS):
        last = min(first + BLOCK_STEPS, steps)
        rows = torch.stack([own.indices(first, last) for own in samplers], dim=1).to(data.labels.device)  # [S,H,B]
        labels, domains = data.labels[rows], domain_of[head, data.domains[rows]]  # [S,H,B]
        place = torch.arange(rows.shape[-1], device=rows.device).expand_as(rows)
        partners, size = choose(Samples(rows, labels, domains), first), rows.shape[-1]
        read, placed = rows, place
        if partners is not None and bool((partners.place >= size).any()):  # not of the batch: read them too
            read, placed = torch.cat([rows, partners.row], -1), torch.cat([place, partners.place], -1)  # [S,H,2B]
        views = _drawn_views(jobs, data.features, placed, first)
        for number, x in enumerate(_gathered(data.features, read, views)):
            batch = Batch(x[:, :size], labels[number], domains[number], rows[number], place[number])
            if partners is not None:
                theirs = x[:, size:] if read is not rows else x.take_along_dim(partners.place[number][..., None], 1)
                y, found = data.labels[partners.row[number]], partners.found[number]
                batch = batch._replace(partner=theirs, partner_y=y, has_partner=found)
            yield batch


def _partner_choices(jobs: Sequence[Job], data: CachedData) -> Callable[[Samples, int], InputPartners | None]:
    """For the batches of steps `first` on, fields [S,H,B], the partners of every head, where its inputs are mixed."""
    device = data.labels.device
    made = [job.make(job.setup) for job in jobs]
    algorithms = [algorithm.to(device) for algorithm in made if isinstance(algorithm, Algorithm)]
    pools = [torch.cat(list(job.split.train)).to(device) for job in jobs]
    domain_of = [job.split.domain_of.to(device) for job in jobs]

    def of_head(head: int, drawn: Samples, steps: Tensor) -> InputPartners | None:
        pool = pools[head]
        training = Samples(pool, data.labels[pool], domain_of[head][data.domains[pool]])
        return algorithms[head].input_partners(Samples(*(field[:, head] for field in drawn)), training, steps)

    def choose(drawn: Samples, first: int) -> InputPartners | None:
        if type(algorithms[0]).input_partners is Algorithm.input_partners:
            return None
        steps = torch.arange(first, first + len(drawn.row), device=device)
        of_heads = [of_head(head, drawn, steps) for head in range(len(jobs))]
        chosen = [partners for partners in of_heads if partners is not None]
        return InputPartners(*(torch.stack(fields, 1) for fields in zip(*chosen, strict=True))) if chosen else None

    return choose


def _samplers(jobs: Sequence[Job], data: CachedData, training: Training) -> list[BatchSampler]:
    """One per job; trials of one split and seed share theirs, as each holds all training rows."""
    known: dict[tuple[int, int], BatchSampler] = {}
    for job in jobs:
        if (id(job.split), job.seed) not in known:
            own = sampler(training.sampler, job.split.train, training.batch_size, job.seed, data.labels)
            known[id(job.split), job.seed] = own
    return [known[id(job.split), job.seed] for job in jobs]


def _drawn_views(jobs: Sequence[Job], features: Features, place: Tensor, first: int) -> Tensor | None:
    """Which view each place of the batches reads: int64 [S,H,B] in 1…views, uniform; None where there is the plain one.

    A function of seed, step and place in the batch: a row that comes twice in a batch may come in two views.
    """
    if not features.views:
        return None
    seed = torch.tensor([job.seed for job in jobs], device=place.device)[:, None]  # [H,1]
    step = torch.arange(first, first + len(place), device=place.device)[:, None, None]  # [S,1,1]
    return 1 + integers(seed, step, Stream.VIEW, place, features.views)


def _gathered(features: Features, rows: Tensor, views: Tensor | None) -> Iterator[Tensor]:
    """The features of each step, [H,B,K]: read for several steps at once where they come from files."""
    at_once = 1 if features.in_memory else max(1, READ_BYTES // (4 * features.width * rows[0].numel()))
    for first in range(0, len(rows), at_once):
        some = slice(first, first + at_once)
        yield from features[rows[some]] if views is None else features.of_views(rows[some], views[some])


def head_logits(features: Features, rows: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Logits float32 [n,C] for the images `rows` (int64 [n]) of the class head in a selected `state`."""
    device = features.device
    weight, bias = state["head.weight"].to(device), state["head.bias"].to(device)
    held = 4 * len(rows) * features.width <= HELD_BYTES
    blocks = [rows] if held else rows.split(rows_at_once(features))
    return torch.cat([F.linear(features[block.to(device)], weight, bias) for block in blocks])


def rows_at_once(features: Features) -> int:
    return max(1, READ_BYTES // (4 * features.width))


class Validation:
    """The images that selection looks at. A row that several heads look at is gathered and multiplied once.

    Rows are in groups that the same heads look at, so that no head is multiplied with what another one looks at, unless
    the groups would be so small that one product of all rows with all heads is faster.
    """

    def __init__(self, jobs: Sequence[Job], data: CachedData, rules: Sequence[str], metric: str) -> None:
        self.metric, self.data = metric, data
        wanted = [rows_of_rules(job, rules) for job in jobs]
        distinct = {id(rows): rows for of_head in wanted for rows in of_head.values()}  # splits share them
        union = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *distinct.values()]))  # [U]
        place_of = {key: torch.searchsorted(union, rows) for key, rows in distinct.items()}
        looks = torch.zeros(len(union), len(jobs), dtype=torch.bool)  # [U,H]
        for head, of_head in enumerate(wanted):
            for rows in of_head.values():
                looks[place_of[id(rows)], head] = True
        groups, group = distinct_rows(looks)  # bool [G,H], int64 [U]
        if len(union) < GROUP_ROWS * max(1, len(groups)):
            groups, group = looks.new_ones(1, len(jobs)), torch.zeros_like(group)
        order = group.argsort(stable=True)
        self.rows = union[order]  # int64 [U], group after group
        self.sizes = group.bincount(minlength=len(groups)).tolist()
        self.heads = [heads.nonzero()[:, 0] for heads in groups]
        held = 4 * len(union) * data.features.width <= HELD_BYTES
        self.held = data.features[self.rows.to(data.labels.device)] if held else None  # float32 [U,K]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        device, worst_of = data.labels.device, data.domains if data.worst_of is None else data.worst_of
        about = data.labels, data.domains, worst_of, metric, jobs[0].setup.task.num_classes
        placed = {key: place[places].to(device) for key, places in place_of.items()}
        measured: dict[tuple[int, str], RuleImages] = {}
        for rule, rows in (own for of_head in wanted for own in of_head.items()):
            key = id(rows), split_of(rule)
            if key not in measured:
                measured[key] = rule_images(key[1], rows, *about)
        self.views = [
            {rule: (placed[id(rows)], measured[id(rows), split_of(rule)]) for rule, rows in of_head.items()}
            for of_head in wanted
        ]

    @torch.no_grad()
    def values(self, weight: Tensor, bias: Tensor) -> list[dict[str, float] | None]:
        """For each head the metric by selection rule; None for a head whose logits are not finite.

        `weight` is [H,C,K], `bias` [H,C].
        """
        heads, classes = bias.shape
        most = LOGITS_PER_READING if self.held is None else LOGITS_AT_ONCE
        at_once = max(1, most // max(1, len(self.rows) * classes))
        found = []
        for first in range(0, heads, at_once):
            some = slice(first, first + at_once)
            logits = self._logits(weight, bias, range(heads)[some])  # [U,h,C]
            found += [self._values_of_head(logits[:, h], views) for h, views in enumerate(self.views[some])]
        return found

    def _logits(self, weight: Tensor, bias: Tensor, heads: range) -> Tensor:
        """[U,h,C] of a range of heads, filled where it is read."""
        logits = weight.new_empty(len(self.rows), len(heads), bias.shape[-1])
        begin = 0
        for size, looking in zip(self.sizes, self.heads, strict=True):
            own = looking[(looking >= heads.start) & (looking < heads.stop)].to(weight.device)
            group = slice(begin, begin + size)
            begin += size
            if len(own) == 0:
                continue
            w, b, done = weight[own].flatten(0, 1).T, bias[own].flatten(), group.start
            for z in self._features(group):
                product = torch.addmm(b, z, w)
                logits[done : done + len(z), own - heads.start] = product.view(len(z), len(own), bias.shape[-1])
                done += len(z)
        return logits

    def _features(self, group: slice) -> Iterator[Tensor]:
        """Those of the rows of a group, whole or in blocks [n,K]."""
        if self.held is not None:
            yield self.held[group]
            return
        for block in self.rows[group].split(rows_at_once(self.data.features)):
            yield self.data.features[block.to(self.data.labels.device)]

    def _values_of_head(self, logits: Tensor, views: dict[str, tuple[Tensor, RuleImages]]) -> dict[str, float] | None:
        """`views`: where a rule's images are among the rows, and what is measured on them."""
        own = {rule: logits[place] for rule, (place, _) in views.items()}
        if not all(torch.isfinite(values).all() for values in own.values()):
            return None
        return {rule: images.value(own[rule]) for rule, (_, images) in views.items()}


def distinct_rows(looks: Tensor) -> tuple[Tensor, Tensor]:
    """`looks.unique(dim=0, return_inverse=True)` of bool [U,H], which would make an object of every row."""
    group = torch.zeros(len(looks), dtype=torch.int64)
    for some in looks.split(32, dim=1):
        for column in some.unbind(1):
            group = 2 * group + column
        group = group.unique(return_inverse=True)[1]
    groups = looks.new_zeros(int(group.max()) + 1 if len(group) else 0, looks.shape[1])
    groups[group] = looks
    return groups, group
