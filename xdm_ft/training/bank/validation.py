"""Measures the selection metric on validation images while a bank trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from xdm_ft.algorithms import Method
from xdm_ft.sharpness import Tensors
from xdm_ft.tensors import Criteria
from xdm_ft.training import Job
from xdm_ft.training.bank.cached_data import CachedData, fits_in_memory, rows_at_once
from xdm_ft.training.rule_images import RuleImages, rule_images
from xdm_ft.training.selection import rows_of_rules, split_of

# Logits (or hidden units) in memory at once, of several heads together. VALUES_AT_ONCE applies if the features are in
# memory. Otherwise all features are read from files again for the next heads, so that the limit is larger.
VALUES_AT_ONCE = 1 << 24
VALUES_PER_READING = 1 << 28
GROUP_ROWS = 64  # with fewer validation images on average, separate matrix products per group are slower than one


class BankValidation:
    """The validation images of all heads. A row that several heads validate on is gathered and multiplied once.

    Rows that the same heads validate on form a group, which is multiplied with these heads only. If groups are very
    small, there is one group of all rows and all heads, which is faster.
    """

    def __init__(self, jobs: Sequence[Job], data: CachedData, criteria: Criteria) -> None:
        self.metric, self.data = criteria.metric, data
        wanted = [rows_of_rules(job, criteria.rules) for job in jobs]
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
        device = data.features.device
        keep = fits_in_memory(data.features, len(union))
        self.loaded = (
            data.features[self.rows.to(device)] if keep else None
        )  # float32 [U,K]; None: read at each evaluation
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        about = data.annotations, criteria.metric, jobs[0].setup.task.num_classes
        placed = {key: place[places].to(device) for key, places in place_of.items()}
        measured: dict[tuple[int, str], RuleImages] = {}
        for rule, rows in (own for of_head in wanted for own in of_head.items()):
            key = id(rows), split_of(rule)
            if key not in measured:
                measured[key] = rule_images(key[1], rows, *about)
        self.images_by_rule = [
            {rule: (placed[id(rows)], measured[id(rows), split_of(rule)]) for rule, rows in of_head.items()}
            for of_head in wanted
        ]

    @torch.no_grad()
    def values(self, model: Method, state: Tensors) -> list[dict[str, float] | None]:
        """Returns for each head {selection rule: value of the metric}; None for a head with logits that are not finite.

        `state`: name of a parameter of `model` → its values in the heads, [H,…]; the model's own are not used.
        """
        heads = len(next(iter(state.values())))
        most = VALUES_PER_READING if self.loaded is None else VALUES_AT_ONCE
        at_once = max(1, most // max(1, len(self.rows) * model.head.values_per_image))
        found = []
        for first in range(0, heads, at_once):
            some = slice(first, first + at_once)
            logits = self._logits(model, state, range(heads)[some])  # [U,h,C]
            found += [
                self._values_of_head(logits[:, h], images_by_rule)
                for h, images_by_rule in enumerate(self.images_by_rule[some])
            ]
        return found

    def _logits(self, model: Method, state: Tensors, heads: range) -> Tensor:
        """Returns logits [U,h,C] of a range of heads; only the rows that a head validates on are filled."""
        device = self.data.features.device
        logits = torch.empty(len(self.rows), len(heads), model.task.num_classes, device=device)
        begin = 0
        for size, looking in zip(self.sizes, self.heads, strict=True):
            own = looking[(looking >= heads.start) & (looking < heads.stop)].to(device)
            group = slice(begin, begin + size)
            begin += size
            if len(own) == 0:
                continue
            of_own, done = {name: values[own] for name, values in state.items()}, group.start
            for z in self._features(group):
                logits[done : done + len(z), own - heads.start] = model.stacked_logits(z, of_own)
                done += len(z)
        return logits

    def _features(self, group: slice) -> Iterator[Tensor]:
        """Yields the features of a group's rows: all at once, or in blocks [n,K] if they are read from files."""
        if self.loaded is not None:
            yield self.loaded[group]
            return
        for block in self.rows[group].split(rows_at_once(self.data.features)):
            yield self.data.features[block.to(self.data.features.device)]

    def _values_of_head(
        self, logits: Tensor, images_by_rule: dict[str, tuple[Tensor, RuleImages]]
    ) -> dict[str, float] | None:
        """`images_by_rule`: where a rule's images are among the rows, and what is measured on them."""
        own = {rule: logits[place] for rule, (place, _) in images_by_rule.items()}
        if not all(torch.isfinite(values).all() for values in own.values()):
            return None
        return {rule: images.value(own[rule]) for rule, (_, images) in images_by_rule.items()}


def distinct_rows(looks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `looks.unique(dim=0, return_inverse=True)` of bool [U,H], which itself creates an object per row."""
    group = torch.zeros(len(looks), dtype=torch.int64)
    for some in looks.split(32, dim=1):
        for column in some.unbind(1):
            group = 2 * group + column
        group = group.unique(return_inverse=True)[1]
    groups = looks.new_zeros(int(group.max()) + 1 if len(group) else 0, looks.shape[1])
    groups[group] = looks
    return groups, group
