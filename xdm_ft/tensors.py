"""The types that flow between the layers. Imports torch only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Task:
    """What is to be learned: C classes, D training domains and the metric that selection looks at."""

    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]  # training domains only, in the order of `Batch.domain`
    metric: str = "accuracy"

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_domains(self) -> int:
        return len(self.domain_names)


class Batch(NamedTuple):
    """One batch. `x` is images, or cached features where the encoder is frozen."""

    x: Tensor  # float [B,3,H,W] or [B,K]
    y: Tensor  # int64 [B]
    domain: Tensor  # int64 [B], 0…D−1, training domains only
    index: Tensor  # type: ignore[assignment]  # int64 [B], the sample's row in the data set: the key of every random draw
    targets: Tensor | None = None  # float [B,C], soft labels
    partnered: Tensor | None = None  # bool [B]: whether another sample is mixed into this one; None: no method mixes


class Importance(NamedTuple):
    """Equations (1) and (2): the importance scores of every feature dimension."""

    by_class: Tensor  # float [B,K]
    by_domain: Tensor  # float [B,K]


class Parts(NamedTuple):
    """Equation (4): class-specific/generic × domain-specific/generic components of z. They sum to z exactly."""

    csds: Tensor  # Z_c,d
    csdg: Tensor  # Z_c,¬d
    cgds: Tensor  # Z_¬c,d
    cgdg: Tensor  # Z_¬c,¬d


class Losses(NamedTuple):
    """What an algorithm returns for one batch."""

    total: Tensor  # scalar: what sharpness, clipping and the main step see
    auxiliary: Tensor  # scalar: the domain head and its like, stepped once, outside sharpness and clipping
    # plain dicts, never changed in place: `torch.func.vmap` returns no other mapping
    buffers: dict[str, Tensor] = {}  # new values of the algorithm's state, committed once a step
    logs: dict[str, Tensor] = {}  # scalars worth plotting
    held: dict[str, Tensor] = {}  # what the second pass of a sharpness-aware step reuses: both see one loss


@dataclass(frozen=True)
class Score:
    """What one split of `metrics` in results.json holds. Accuracies and rates are fractions."""

    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    auroc: float | None  # None where fewer than two classes are present
    worst_domain_accuracy: float | None  # None where no image is in any of the groups that count
    nll: float
    ece: float
    n: int
    per_class_recall: dict[str, float | None]  # None for a class without images
    per_domain: dict[str, dict[str, Any]]  # name → {"accuracy", "n"}
