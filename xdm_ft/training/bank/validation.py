"""The images that selection looks at while a bank trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from xdm_ft.tensors import Criteria
from xdm_ft.training import Job
from xdm_ft.training.bank.cached_data import CachedData, are_held, rows_at_once
from xdm_ft.training.rule_images import RuleImages, rule_images
from xdm_ft.training.selection import rows_of_rules, split_of

LOGITS_AT_ONCE = 1 << 24  # of validation images, all heads together
LOGITS_PER_READING = 1 << 28  # the same where the images are more than are held: further heads read them once more
GROUP_ROWS = 64  # fewer validation images are not worth a matrix product of their own


class BankValidation:
    """The images that selection looks at. A row that several heads look at is gathered and multiplied once.

    Rows are in groups that the same heads look at, so that no head is multiplied with what another one looks at, unless
    the groups would be so small that one product of all rows with all heads is faster.
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
        device, held = data.features.device, are_held(data.features, len(union))
        self.held = data.features[self.rows.to(device)] if held else None  # float32 [U,K]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        about = data.annotations, criteria.metric, jobs[0].setup.task.num_classes
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
            yield self.data.features[block.to(self.data.features.device)]

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
