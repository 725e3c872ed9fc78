"""Measures the selection metric on validation images while a bank trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xdm_ft.algorithms import Method
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.sharpness import Tensors
from xdm_ft.training import Job
from xdm_ft.training.bank.data import CachedData, fits_in_memory, rows_at_once
from xdm_ft.training.selection import RuleImages, rows_of_rules, rule_images, split_of

# Logits (or hidden units) in memory at once, of several heads together. VALUES_AT_ONCE applies if the features are in
# memory. Otherwise all features are read from files again for the next heads, so that the limit is larger.
VALUES_AT_ONCE = 1 << 24
VALUES_PER_READING = 1 << 28
GROUP_ROWS = 64  # with fewer validation images on average, separate matrix products per group are slower than one


class Measured(NamedTuple):
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
        self.metric, self.data = criteria.metric, data
        rows_of_heads = [rows_of_rules(job, criteria.rules) for job in jobs]
        distinct = {id(rows): rows for rows_of in rows_of_heads for rows in rows_of.values()}  # splits share them
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
        where = device if criteria.metric == "accuracy" else torch.device("cpu")
        self.labels = data.annotations.labels[self.rows.to(device)].to(where)  # int64 [U]
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        annotations, classes = data.annotations.to(where), jobs[0].setup.task.num_classes
        measured: dict[tuple[int, str], Measured] = {}
        for head, rows_of in enumerate(rows_of_heads):
            for rule, rows in rows_of.items():
                key = id(rows), split_of(rule)
                if key not in measured:
                    images = rule_images(key[1], rows, annotations, criteria.metric, classes)
                    measured[key] = Measured(position[index_of[id(rows)]].to(where), images, {})
                measured[key].rules.setdefault(head, []).append(rule)
        self.measured = list(measured.values())

    @torch.no_grad()
    def values(self, model: Method, state: Tensors) -> list[dict[str, float] | None]:
        """Returns for each head {selection rule: value of the metric}; None for a head with logits that are not finite.

        `state`: name of a parameter of `model` → its values in the heads, [H,…]; the model's own are not used.
        """
        heads = len(next(iter(state.values())))
        most = VALUES_PER_READING if self.loaded is None else VALUES_AT_ONCE
        at_once = max(1, most // max(1, len(self.rows) * model.head.values_per_image))
        values_of: list[dict[str, float] | None] = [{} for _ in range(heads)]
        for first in range(0, heads, at_once):
            block = range(heads)[first : first + at_once]
            for head, rules, value in self._measure(self._logits(model, state, block), block):
                values = values_of[head]
                values_of[head] = None if values is None or value is None else values | dict.fromkeys(rules, value)
        return values_of

    def _measure(self, logits: Tensor, heads: range) -> Iterator[tuple[int, list[str], float | None]]:
        """Yields (head, rules, their value; None: a logit is not finite) from the logits [U,h,C] of a range of heads.

        They are read from the device once.
        """
        readers = [sorted(set(measured.rules).intersection(heads)) for measured in self.measured]
        columns = [torch.tensor(of_images, dtype=torch.int64) - heads.start for of_images in readers]
        if self.metric == "accuracy":
            values = self._accuracies(logits, columns)
        else:
            values = self._other_metrics(logits.cpu(), columns)
        for measured, of_images, of_heads in zip(self.measured, readers, values, strict=True):
            yield from ((head, measured.rules[head], value) for head, value in zip(of_images, of_heads, strict=True))

    def _accuracies(self, logits: Tensor, columns: Sequence[Tensor]) -> list[list[float | None]]:
        """Returns the accuracies on the measured images of the heads that read them; None: a logit is not finite."""
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
        """Returns the values of other metrics, as `_accuracies` does; the logits are on the CPU."""
        values = []
        for (positions, images, _), heads in zip(self.measured, columns, strict=True):
            own = logits[positions[:, None], heads]  # [n,heads,C]
            finite = own.isfinite().all(-1).all(0)  # [heads]
            of_finite = iter(images.values(own[:, finite]))
            values.append([next(of_finite) if is_finite else None for is_finite in finite.tolist()])
        return values

    def _logits(self, model: Method, state: Tensors, heads: range) -> Tensor:
        """Returns logits [U,h,C] of a range of heads; only the rows that a head validates on are filled."""
        device = self.data.features.device
        logits = torch.empty(len(self.rows), len(heads), model.task.num_classes, device=device)
        begin = 0
        for size, readers in zip(self.sizes, self.heads, strict=True):
            own = readers[(readers >= heads.start) & (readers < heads.stop)].to(device)
            group = slice(begin, begin + size)
            begin += size
            if len(own) == 0:
                continue
            own_state, done = {name: values[own] for name, values in state.items()}, group.start
            for z in self._features(group):
                logits[done : done + len(z), own - heads.start] = model.stacked_logits(z, own_state)
                done += len(z)
        return logits

    def _features(self, group: slice) -> Iterator[Tensor]:
        """Yields the features of a group's rows: all at once, or in blocks [n,K] if they are read from files."""
        if self.loaded is not None:
            yield self.loaded[group]
            return
        for block in self.rows[group].split(rows_at_once(self.data.features)):
            yield self.data.features[block.to(self.data.features.device)]


def distinct_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `table.unique(dim=0, return_inverse=True)` of bool [U,H], which itself creates an object per row."""
    group = torch.zeros(len(table), dtype=torch.int64)
    for columns in table.split(32, dim=1):
        for column in columns.unbind(1):
            group = 2 * group + column
        group = group.unique(return_inverse=True)[1]
    groups = table.new_zeros(int(group.max()) + 1 if len(group) else 0, table.shape[1])
    groups[group] = table
    return groups, group
