"""What a finding costs: held-out accuracy of heads trained without the affected images, less that of heads trained
without as many random ones. It is the balanced accuracy if `protocol.metric` is: a rare class that is left out, or
relabelled, would raise the plain one.

A difference is judged as two rows of a table are (`results/verdicts.py`): over seeds and test images, with Holm's
correction over the findings of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from xdm_ft.audit.heads import HeadRequest, Study
from xdm_ft.core import DomainSet, Interval
from xdm_ft.evaluation.metrics import balanced_accuracy, confusion
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.results import Runs
from xdm_ft.results.table import NO_VERDICT, Comparison
from xdm_ft.results.verdicts import Pair, WithoutGroups, compared, judge

RULE = "audit"  # in place of a selection rule's name


@dataclass(frozen=True)
class Answered(Runs):
    """The answers of heads under every seed, on the images of some held-out sets."""

    answers: Mapping[tuple[DomainSet, int], Prediction] = field(default_factory=dict)

    @classmethod
    def of(cls, answers: Sequence[Prediction], metric: str = "accuracy") -> Answered:
        """`metric`: defined on the images of each held-out set."""
        held_out = tuple(dict.fromkeys(answer.test_domains for answer in answers))
        by_key = {(answer.test_domains, answer.seed): answer for answer in answers}
        return cls("", RULE, metric, held_out, (), answers=by_key)

    @property
    def planned_seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.answers})

    @property
    def values(self) -> dict[tuple[DomainSet, int], float]:
        return {key: self._value(of.predicted, of.images.labels) for key, of in self.answers.items()}

    def _value(self, predicted: np.ndarray, labels: np.ndarray) -> float:
        if self.metric == "accuracy":
            return float((predicted == labels).mean())
        classes = 1 + max(int(predicted.max()), int(labels.max()))
        return balanced_accuracy(confusion(torch.from_numpy(predicted), torch.from_numpy(labels), classes))

    @property
    def mean(self) -> float:
        """The mean over seeds and held-out sets."""
        return float(np.mean([*self.values.values()]))


def difference(first: Answered, second: Answered) -> Comparison:
    """Returns the metric of the first less that of the second, on the same images, before any correction."""
    pair = Pair(replace(first, method="first"), replace(second, method="second"))
    answers = [replace(of, method=runs.method) for runs in pair for _, of in sorted(runs.answers.items())]  # type: ignore[attr-defined]
    row = compared(pair, WithoutGroups(first.metric, [pair], answers))
    assert row is not None, "every seed is complete"
    return row


def judge_costs(rows: Sequence[Comparison]) -> list[Comparison]:
    """Returns the comparisons of a kind with their verdicts; Holm's correction is over all of them."""
    return judge("accuracy", rows, [True] * len(rows))


class Change(NamedTuple):
    """What is done to the images that train."""

    what: str
    images: int
    left_out: Mapping[
        DomainSet, np.ndarray
    ]  # {held-out set: rows that neither train nor validate}; others do not change
    labels: torch.Tensor | None = None  # int64 [N], to train with
    note: str = ""  # on what the difference does not show


@dataclass(frozen=True)
class Cost:
    """What a change of the images that train does to the metric on held-out domains. None where it can't be known."""

    what: str
    images: int
    metric: str = "accuracy"  # or balanced_accuracy
    before: float | None = None
    after: float | None = None
    matched: float | None = None  # as `after`, with as many random images left out
    difference: float | None = None  # after − before
    excess: float | None = None  # after − matched, which the verdict is on
    interval: Interval | None = None  # of the excess, 95%
    p: float | None = None
    p_holm: float | None = None
    verdict: str = NO_VERDICT
    note: str = ""


def costs(study: Study, changes: Sequence[Change], untested: Sequence[int] = ()) -> list[Cost]:
    """Trains heads with and without each change, and without as many random images; returns its costs, in this order.

    `untested`: rows that are left out of the test images, since their own labels are in doubt.
    """
    heads = list[
        tuple[int, DomainSet, tuple[HeadRequest, HeadRequest, HeadRequest]]
    ]()  # number of the change; before, after, matched
    lacking = set[tuple[int, DomainSet]]()
    for number, change in enumerate(changes):
        for cell, (seed, split) in enumerate(study.heads):
            held, rows = split.test_domains, split.evaluation["test"]
            rows = rows[~torch.isin(rows, torch.tensor(untested, dtype=torch.int64))]
            without = change.left_out.get(held)
            changed = matched = None
            if without is not None and len(rows):
                changed, matched = study.without(split, without), study.matched(split, without, [seed, number, cell])
            if changed is None or matched is None:
                lacking.add((number, held))  # under one seed: the others alone would be another mean
                continue
            after = HeadRequest(changed, rows, seed, change.labels)
            heads.append((number, held, (HeadRequest(split, rows, seed), after, HeadRequest(matched, rows, seed))))
    heads = [of for of in heads if of[:2] not in lacking]
    predicted = study.predictions([head for *_, three in heads for head in three], "costs")
    answers: dict[int, tuple[list[Prediction], ...]] = {}
    for place, (number, _, three) in enumerate(heads):
        for kept, head, classes in zip(
            answers.setdefault(number, ([], [], [])), three, predicted[3 * place : 3 * place + 3], strict=True
        ):
            kept.append(prediction(study, head, classes))
    metric = cost_metric(study, [three[0].rows for *_, three in heads])
    ends = {number: [Answered.of(of, metric) for of in kept] for number, kept in answers.items()}
    rows_of = judge_costs([difference(after, matched) for _, after, matched in ends.values()])
    verdicts = dict(zip(ends, rows_of, strict=True))
    return [_cost(change, ends.get(number), verdicts.get(number)) for number, change in enumerate(changes)]


def cost_metric(study: Study, tested: Sequence[torch.Tensor]) -> str:
    """Returns the metric of costs: the recipe's if it is an accuracy, and defined on the images of each head."""
    labels = torch.from_numpy(study.dataset.labels)
    defined = all(len(labels[rows].unique()) > 1 for rows in tested)
    return "balanced_accuracy" if defined and study.plan.criteria.metric == "balanced_accuracy" else "accuracy"


def prediction(study: Study, head: HeadRequest, predicted: np.ndarray) -> Prediction:
    """Returns the predicted classes int64 [n] of a head as a row of a table has them."""
    images = HeldOutImages.of(study.dataset, head.rows.numpy())
    return Prediction("", head.split.test_domains, head.seed, RULE, images, predicted)


def _cost(change: Change, ends: Sequence[Answered] | None, row: Comparison | None) -> Cost:
    if ends is None or row is None:
        note = "nothing changes" if not change.left_out else "too few images are left to train on"
        return Cost(change.what, change.images, note=note)
    before, after, matched = (runs.mean for runs in ends)
    return Cost(
        what=change.what,
        images=change.images,
        metric=ends[0].metric,
        before=before,
        after=after,
        matched=matched,
        difference=after - before,
        excess=row.difference,
        interval=row.on_these and row.on_these.interval(),
        p=row.p_here and row.p_here.plain,
        p_holm=row.p_here and row.p_here.holm,
        verdict=f"{row.here} {row.where}" if row.is_found else row.here,
        note="; ".join(filter(None, [change.note, row.note])),
    )
