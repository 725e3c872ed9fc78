"""What heads read of cached features: batches of training images, validation images, and the images of a prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Method
from xdm_ft.core import Annotations, Batch, Criteria, InputPartners, Samples, Tensors
from xdm_ft.runtime.randomness import Stream, integers
from xdm_ft.training import Job
from xdm_ft.training.selection import RuleImages, rows_of_rules, split_of

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features

BLOCK_STEPS = 256  # steps whose rows are drawn at once
# Memory limits in bytes. They are constants, never the machine's free memory: products of blocks of another size may
# round differently, so that results would depend on the machine.
KEEP_IN_MEMORY_BYTES = 1 << 30  # validation features up to this size stay in memory; else each evaluation reads them
READ_BYTES = 1 << 27  # features that are read from files at once
PREDICTOR_BYTES = 1 << 28  # features that a predictor keeps for the next weights
# Logits (or hidden units) in memory at once, of several heads together. VALUES_AT_ONCE applies if the features are in
# memory. Otherwise all features are read from files again for the next heads, so that the limit is larger.
VALUES_AT_ONCE = 1 << 24
VALUES_PER_READING = 1 << 28
GROUP_ROWS = 64  # with fewer validation images on average, separate matrix products per group are slower than one


@dataclass(frozen=True)
class CachedData:
    """Features and annotations of N images, on one device, which all heads read."""

    features: Features
    annotations: Annotations


def batches(jobs: Sequence[Job], data: CachedData, begin: int = 0) -> Iterator[Batch]:
    """Yields the batches of all steps from `begin` on: x [H,B,K]; y, domain, row, position [H,B].

    Each head has its own rows. If the method reads soft labels and the data have some, the batches have `targets`. If
    it mixes inputs, they have `partner`, `partner_y` and `has_partner`.
    If all heads have the same rows, x is a view of one [B,K]: a step reads it from the cache, not from memory.
    """
    annotations, features, steps = data.annotations, data.features, jobs[0].setup.steps
    device = annotations.labels.device
    # trials of one split and seed share a sampler, which stores all training rows, and its draws
    keys = [(id(job.split), job.seed) for job in jobs]
    samplers = {key: job.sampler(annotations.labels) for key, job in dict(zip(keys, jobs, strict=True)).items()}
    numbers = {key: number for number, key in enumerate(samplers)}
    sampler_of = torch.tensor([numbers[key] for key in keys], device=device)  # [H]
    domain_of = torch.stack([job.split.domain_of for job in jobs]).to(device)  # [H, domains of the data]
    head = torch.arange(len(jobs), device=device)[:, None]  # [H,1]
    method = type(jobs[0].new_algorithm())
    mixes_inputs = method.input_partners is not Algorithm.input_partners
    soft_labels = annotations.soft_labels if method.reads_soft_labels else None
    algorithms = [job.new_algorithm().to(device) for job in jobs] if mixes_inputs else []
    pools = [torch.cat(list(job.split.train)).to(device) for job in jobs] if mixes_inputs else []
    for first in range(begin, steps, BLOCK_STEPS):
        last = min(first + BLOCK_STEPS, steps)
        drawn = [sampler.indices(first, last) for sampler in samplers.values()]
        rows = torch.stack(drawn, dim=1).index_select(1, sampler_of)  # [S,H,B]
        labels, domains = annotations.labels[rows], domain_of[head, annotations.domains[rows]]  # [S,H,B]
        size = rows.shape[-1]
        position = torch.arange(size, device=device).expand_as(rows)
        partners = _draw_partners(algorithms, pools, domain_of, annotations, Samples(rows, labels, domains), first)
        read, read_position = rows, position
        if partners is not None and bool((partners.position >= size).any()):  # from outside the batch: read them too
            read, read_position = torch.cat([rows, partners.row], -1), torch.cat([position, partners.position], -1)
        elif len(samplers) == 1:
            read, read_position = rows[:, :1], position[:, :1]  # [S,1,B]

        views = None
        if features.views:
            # drawn in 1…views, a function of seed, step and position in the batch: a row that is twice in a batch may
            # have two different views
            # heads that read the same rows have one seed: their views are drawn once
            seed = torch.tensor([job.seed for job in jobs[: read.shape[1]]], device=device)[:, None]  # [H,1]
            step = torch.arange(first, last, device=device)[:, None, None]  # [S,1,1]
            views = 1 + integers(seed, step, Stream.VIEW, read_position, features.views)  # [S,H,B]
        for number, x in enumerate(_read_steps(features, read, views)):
            x = x.expand(len(jobs), -1, -1)
            targets = None if soft_labels is None else soft_labels[rows[number]]  # [H,B,C]
            batch = Batch(x[:, :size], labels[number], domains[number], rows[number], position[number], targets)
            if partners is not None:
                at = partners.position[number][..., None]
                partner = x[:, size:] if x.shape[1] > size else x.take_along_dim(at, 1)
                partner_y = annotations.labels[partners.row[number]]
                batch = batch._replace(partner=partner, partner_y=partner_y, has_partner=partners.exists[number])
                if soft_labels is not None:
                    batch = batch._replace(partner_targets=soft_labels[partners.row[number]])
            yield batch


def _draw_partners(
    algorithms: Sequence[Algorithm],
    pools: Sequence[Tensor],
    domain_of: Tensor,
    annotations: Annotations,
    drawn: Samples,
    first: int,
) -> InputPartners | None:
    """Returns the partners of H heads at the S steps from `first` on, fields [S,H,B]; None: no inputs are mixed.

    `pools`: the training rows of each head.
    """
    steps, of_heads = torch.arange(first, first + len(drawn.row), device=drawn.row.device), list[InputPartners]()
    for head, (algorithm, pool) in enumerate(zip(algorithms, pools, strict=True)):
        training = Samples(pool, annotations.labels[pool], domain_of[head][annotations.domains[pool]])
        partners = algorithm.input_partners(Samples(*(field[:, head] for field in drawn)), training, steps)
        if partners is not None:
            of_heads.append(partners)
    return InputPartners(*(torch.stack(fields, 1) for fields in zip(*of_heads, strict=True))) if of_heads else None


def _read_steps(features: Features, rows: Tensor, views: Tensor | None) -> Iterator[Tensor]:
    """Yields the features of each step, [H,B,K]; if they are in files, it reads several steps at once."""
    at_once = 1 if features.in_memory else max(1, READ_BYTES // (4 * features.width * rows[0].numel()))
    for first in range(0, len(rows), at_once):
        steps = slice(first, first + at_once)
        yield from features[rows[steps]] if views is None else features.of_views(rows[steps], views[steps])


class CachedPredictor:
    """The `Predictor` of heads and solvers. Those of one chunk differ in their weights only, and share it."""

    def __init__(self, job: Job, features: Features) -> None:
        self.job, self._features = job, features
        self._model = job.new_method().eval()
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # id of rows → these rows, their features
        self._bytes_left = PREDICTOR_BYTES

    @torch.no_grad()
    def logits(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        features, size = self._features, 4 * len(rows) * self._features.width
        # assign, because a copy could have another memory layout, and with it products that round differently
        self._model.load_state_dict(state, assign=True)
        model = self._model.to(features.device)
        if id(rows) not in self._kept and size <= self._bytes_left:  # gathered once for all weights
            # the rows are kept too: as long as they live, no other tensor gets their id
            self._kept[id(rows)] = rows, features[rows.to(features.device)]
            self._bytes_left -= size
        if id(rows) in self._kept:
            return model.logits(self._kept[id(rows)][1]).cpu()
        blocks = [rows] if fits_in_memory(features, len(rows)) else rows.split(rows_at_once(features))
        return torch.cat([model.logits(features[block.to(features.device)]) for block in blocks]).cpu()

    def features(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return self._features[rows.to(self._features.device)].cpu()

    def starting_weights(self) -> dict[str, Tensor]:
        return self.job.new_method().state_dict()


def fits_in_memory(features: Features, rows: int) -> bool:
    """Returns whether the features of this number of validation rows stay in memory."""
    return 4 * rows * features.width <= KEEP_IN_MEMORY_BYTES


def rows_at_once(features: Features) -> int:
    return max(1, READ_BYTES // (4 * features.width))


class MeasuredSplit(NamedTuple):
    """Images of one split, on which the metric is measured."""

    positions: Tensor  # int64 [n]: where they are among the validation rows of all heads
    images: RuleImages
    rules: dict[int, list[str]]  # head → its selection rules that measure these images


class BankValidation:
    """The validation images of all heads. A row that several heads validate on is gathered and multiplied once.

    Rows that the same heads validate on form a group, which is multiplied with these heads only. If groups are very
    small, there is one group of all rows and all heads, which is faster.
    """

    def __init__(self, jobs: Sequence[Job], data: CachedData, criteria: Criteria) -> None:
        self.metric, self.features = criteria.metric, data.features
        rows_of_heads = [rows_of_rules(job, criteria.rules) for job in jobs]
        distinct = {id(rows): rows for rows_of in rows_of_heads for rows in rows_of.values()}  # splits share them
        # the empty tensor: `cat` refuses an empty list, and the rules of a final fit have no rows
        union = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *distinct.values()]))  # [U]
        index_of = {key: torch.searchsorted(union, rows) for key, rows in distinct.items()}
        reads = torch.zeros(len(union), len(jobs), dtype=torch.bool)  # [U,H]: whether the head validates on the row
        for head, rows_of in enumerate(rows_of_heads):
            for rows in rows_of.values():
                reads[index_of[id(rows)], head] = True
        groups, group = distinct_rows(reads)  # bool [G,H], int64 [U]
        if len(union) < GROUP_ROWS * max(1, len(groups)):
            groups, group = reads.new_ones(1, len(jobs)), torch.zeros_like(group)
        order = group.argsort(stable=True)
        self.rows = union[order]  # int64 [U], group after group
        self.sizes = group.bincount(minlength=len(groups)).tolist()
        self.heads = [heads.nonzero()[:, 0] for heads in groups]
        device = data.features.device
        # float32 [U,K]; None: they are read at each evaluation
        self.loaded = data.features[self.rows.to(device)] if fits_in_memory(data.features, len(union)) else None

        # accuracies are counted on the device of the features; other metrics need float64, on the CPU
        target = device if criteria.metric == "accuracy" else torch.device("cpu")
        self.labels = data.annotations.labels[self.rows.to(device)].to(target)  # int64 [U]
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        annotations = data.annotations.to(target)
        measured: dict[tuple[int, str], MeasuredSplit] = {}
        for head, rows_of in enumerate(rows_of_heads):
            for rule, rows in rows_of.items():
                key = id(rows), split_of(rule)
                if key not in measured:
                    images = RuleImages(key[1], rows, annotations, criteria.metric)
                    measured[key] = MeasuredSplit(position[index_of[id(rows)]].to(target), images, {})
                measured[key].rules.setdefault(head, []).append(rule)
        self.measured = list(measured.values())

    @torch.no_grad()
    def values(self, model: Method, state: Tensors) -> list[dict[str, float] | None]:
        """Returns for each head {selection rule: value of the metric}; None for a head with logits that are not finite.

        `state`: name of a parameter of `model` → its values in the heads, [H,…]; the model's own are not used.
        """
        heads = len(next(iter(state.values())))
        limit = VALUES_PER_READING if self.loaded is None else VALUES_AT_ONCE
        at_once = max(1, limit // max(1, len(self.rows) * model.head.values_per_image))
        measure = self._accuracies if self.metric == "accuracy" else self._other_metrics
        values_of: list[dict[str, float] | None] = [{} for _ in range(heads)]
        for first in range(0, heads, at_once):
            block = range(heads)[first : first + at_once]
            readers = [sorted(set(measured.rules).intersection(block)) for measured in self.measured]
            columns = [torch.tensor(of_images, dtype=torch.int64) - first for of_images in readers]
            measured_values = measure(self._logits(model, state, block), columns)
            for measured, of_images, values in zip(self.measured, readers, measured_values, strict=True):
                for head, value in zip(of_images, values, strict=True):
                    earlier = values_of[head]
                    if earlier is not None and value is not None:
                        values_of[head] = earlier | dict.fromkeys(measured.rules[head], value)
                    else:
                        values_of[head] = None
        return values_of

    def _accuracies(self, logits: Tensor, columns: Sequence[Tensor]) -> list[list[float | None]]:
        """Returns the accuracies on the measured images of the heads that read them, from logits [U,h,C].

        `columns`: int64, of these heads in the logits, for each of the measured images. None: a logit is not finite.
        """
        finite, right = logits.isfinite().all(-1), logits.argmax(-1) == self.labels[:, None]  # bool [U,h]
        counts = list[Tensor]()  # [1 + parts, heads] each: finite images, then right predictions
        for (positions, images, _), heads in zip(self.measured, columns, strict=True):
            heads = heads.to(positions.device)
            own_finite, own_right = (v.index_select(1, heads).index_select(0, positions) for v in (finite, right))
            counts.append(torch.cat([own_finite.sum(0, keepdim=True), images.count(own_right)]))
        flat = torch.cat([self.labels[:0], *(count.flatten() for count in counts)]).tolist()  # one copy to the host
        values, begin = [], 0
        for (positions, images, _), count in zip(self.measured, counts, strict=True):
            end, heads_counted = begin + count.numel(), count.shape[1]
            of_heads = (flat[begin + head : end : heads_counted] for head in range(heads_counted))
            values.append([images.accuracy(right) if n == len(positions) else None for n, *right in of_heads])
            begin = end
        return values

    def _other_metrics(self, logits: Tensor, columns: Sequence[Tensor]) -> list[list[float | None]]:
        """Returns the values of other metrics, as `_accuracies` does."""
        values, logits = [], logits.cpu()
        for (positions, images, _), heads in zip(self.measured, columns, strict=True):
            of_heads = logits[positions[:, None], heads]  # [n,heads,C]
            finite = of_heads.isfinite().all(-1).all(0)  # [heads]
            of_finite = iter(images.values(of_heads[:, finite]))
            values.append([next(of_finite) if is_finite else None for is_finite in finite.tolist()])
        return values

    def _logits(self, model: Method, state: Tensors, heads: range) -> Tensor:
        """Returns logits [U,h,C] of a range of heads; only the rows that a head validates on are filled."""
        features, begin = self.features, 0
        logits = torch.empty(len(self.rows), len(heads), model.task.num_classes, device=features.device)
        for size, readers in zip(self.sizes, self.heads, strict=True):
            validated = readers[(readers >= heads.start) & (readers < heads.stop)].to(features.device)
            rows, loaded = self.rows[begin : begin + size], self.loaded
            done, begin = begin, begin + size
            if len(validated) == 0:
                continue
            state_here = {name: values[validated] for name, values in state.items()}
            for block in [rows] if loaded is not None else rows.split(rows_at_once(features)):
                end = done + len(block)
                z = features[block.to(features.device)] if loaded is None else loaded[done:end]
                logits[done:end, validated - heads.start] = model.stacked_logits(z, state_here)
                done = end
        return logits


def distinct_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `table.unique(dim=0, return_inverse=True)` of bool [U,H], which itself creates an object per row."""
    group = torch.zeros(len(table), dtype=torch.int64)
    # 32 columns at a time: the number of a group, below 2^31, shifted by 32 bits still fits int64
    for columns in table.split(32, dim=1):
        for column in columns.unbind(1):
            group = 2 * group + column
        group = group.unique(return_inverse=True)[1]
    groups = table.new_zeros(int(group.max()) + 1 if len(group) else 0, table.shape[1])
    groups[group] = table
    return groups, group
