"""The images that a selection rule measures, and the one value of the metric that it compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xdm_ft.evaluation.metrics import is_defined, per_image_nll
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.runtime.tensors import Annotations

BY_DOMAIN = "train_val"
"""The split that is measured as an unweighted mean over its domains: DomainBed averages the accuracies of the training
domains' validation parts (`env{i}_out_acc`, model_selection.py of Gulrajani & Lopez-Paz 2021), SWAD their losses. All
other splits are pooled."""


@dataclass(frozen=True)
class RuleImages:
    """n images of one split. Its tensors are on the device of the logits to measure."""

    labels: Tensor  # int64 [n]
    worst_of: Tensor  # int64 [n], see `Annotations`
    metric: str
    parts: tuple[Tensor, ...] | None  # per domain the places of its images, int64; None: all images together
    part_of: Tensor  # int64 [n]: the number of an image's part; len(parts): in no part

    def value(self, logits: Tensor) -> float:
        """Returns the metric of finite logits [n,C], the unweighted mean over `parts`; nan if it is not defined."""
        if self.metric == "accuracy":
            return self.accuracy(self.count(logits.argmax(1) == self.labels).tolist())
        if self.metric == "nll":
            return self._mean(per_image_nll(logits, self.labels))
        if self.parts is None:
            return metric_of(self.metric, logits, self.labels, self.worst_of)
        of_parts = (metric_of(self.metric, logits[p], self.labels[p], self.worst_of[p]) for p in self.parts)
        # fsum is exact in any order of the domains, so that equally good steps have equal values
        return math.fsum(of_parts) / len(self.parts) if self.parts else math.nan

    def values(self, logits: Tensor) -> list[float]:
        """Returns `value` of H heads from their finite logits [n,H,C] on the CPU."""
        images, heads = logits.shape[:2]
        if self.metric == "nll":
            losses = per_image_nll(logits.flatten(0, 1), self.labels.repeat_interleave(heads)).reshape(images, heads)
            return [self._mean(np.ascontiguousarray(losses[:, head])) for head in range(heads)]
        return [self.value(logits[:, head]) for head in range(heads)]

    def _mean(self, losses: np.ndarray) -> float:
        """Returns the mean of losses [n], or of their means over parts."""
        if self.parts is None:
            return float(losses.mean())
        of_parts = [float(losses[part.cpu().numpy()].mean()) for part in self.parts]
        return math.fsum(of_parts) / len(of_parts) if of_parts else math.nan

    def count(self, right: Tensor) -> Tensor:
        """Returns the number of right predictions of every part, int64 [parts,…], from bool [n,…]."""
        if self.parts is None:
            return right.sum(0, keepdim=True)
        counts = torch.zeros(len(self.parts) + 1, *right.shape[1:], dtype=torch.int64, device=right.device)
        return counts.index_add_(0, self.part_of, right.long())[:-1]

    def accuracy(self, right: Sequence[int]) -> float:
        """Returns the accuracy from the number of right predictions of every part, as `count` returns them."""
        sizes = [len(self.labels)] if self.parts is None else list(map(len, self.parts))
        return math.fsum(n / size for n, size in zip(right, sizes, strict=True)) / len(sizes) if sizes else math.nan


def rule_images(split: str, rows: Tensor, annotations: Annotations, metric: str, num_classes: int) -> RuleImages:
    """Returns the images `rows` (int64 [n]) of a split.

    The labels alone decide which domains count, so they are the same at every step and in every trial.
    """
    rows = rows.to(annotations.labels.device)
    own, worst_of, part_of = annotations.labels[rows], annotations.worst_of[rows], torch.zeros_like(rows)
    if split != BY_DOMAIN or metric == "worst_domain_accuracy":
        return RuleImages(own, worst_of, metric, None, part_of)
    parts = tuple(_defined_parts(rows, annotations, metric, num_classes)[0].values())
    part_of += len(parts)
    for number, part in enumerate(parts):
        part_of[part] = number
    return RuleImages(own, worst_of, metric, parts, part_of)


def undefined_domains(rows: Tensor, annotations: Annotations, metric: str, num_classes: int) -> list[int]:
    """Returns the domains (by number) on whose images in `rows`, of the split BY_DOMAIN, the metric is undefined."""
    return _defined_parts(rows, annotations, metric, num_classes)[1]


def _defined_parts(
    rows: Tensor, annotations: Annotations, metric: str, num_classes: int
) -> tuple[dict[int, Tensor], list[int]]:
    """Returns {domain: places of its images in `rows`} if the metric is defined on them, and the other domains."""
    of_row, found, undefined = annotations.domains[rows], dict[int, Tensor](), list[int]()
    for domain in of_row.unique().tolist():
        place = (of_row == domain).nonzero()[:, 0]
        if is_defined(metric, annotations.labels[rows[place]], num_classes):
            found[domain] = place
        else:
            undefined.append(domain)
    return found, undefined
