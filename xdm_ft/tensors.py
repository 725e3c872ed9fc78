"""The types that flow between the layers. Imports torch only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
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


@dataclass(frozen=True)
class Annotations:
    """What is known of the N images of a data set besides their pixels."""

    labels: Tensor  # int64 [N], the class: 0…C−1
    domains: Tensor  # int64 [N], numbered as in the data set: those held out included
    worst_of: Tensor  # int64 [N]: the groups of which worst_domain_accuracy takes the worst; −1: in none of them
    groups: Tensor | None = None  # int64 [N]: patient, slide or sequence; None: images are independent

    def to(self, device: torch.device) -> Annotations:
        """The same on a device."""
        groups = None if self.groups is None else self.groups.to(device)
        return Annotations(self.labels.to(device), self.domains.to(device), self.worst_of.to(device), groups)


@dataclass(frozen=True)
class Criteria:
    """How the step of a training is selected, and by what models are compared."""

    rules: tuple[str, ...]  # selection rules, the recipe's own first: without a pick by that one there is no model
    metric: str  # a key of `Score`, such as "accuracy"


class Batch(NamedTuple):
    """One batch. `x` is images, or cached features where the encoder is frozen."""

    x: Tensor  # float [B,3,H,W] or [B,K]
    y: Tensor  # int64 [B]
    domain: Tensor  # int64 [B], 0…D−1, training domains only
    index: Tensor  # type: ignore[assignment]  # int64 [B], the sample's row in the data set
    place: Tensor  # int64 [B], the sample's place in the whole batch of the step: the key of every random draw
    targets: Tensor | None = None  # float [B,C], soft labels
    # of a method that mixes inputs (`Algorithm.input_partners`): x_j of every sample, its class, whether there is one
    partner: Tensor | None = None  # like x; x itself where there is none
    partner_y: Tensor | None = None  # int64 [B]
    has_partner: Tensor | None = None  # bool [B]

    def fields(self) -> dict[str, Tensor]:
        """Those that are not None, by name: `torch.func.vmap` maps no None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def block(self, number: int, blocks: int, axis: int = 0) -> Batch:
        """One of the equal blocks, a domain each, that a per-domain batch and its parts consist of.

        `axis` is that of the samples: 1 in a bank, where the axis of the heads comes before it.
        """
        size = self.y.shape[axis] // blocks
        return Batch(**{name: value.narrow(axis, number * size, size) for name, value in self.fields().items()})


class Samples(NamedTuple):
    """Samples without their images."""

    row: Tensor  # int64 [...,B], in the data set
    y: Tensor  # int64 [...,B]
    domain: Tensor  # int64 [...,B], as in `Batch`


class InputPartners(NamedTuple):
    """Which samples those of a batch are mixed with."""

    row: Tensor  # int64 [...,B]
    place: Tensor  # int64 [...,B]: its place in the batch; B or more where it is drawn from outside the batch
    found: Tensor  # bool [...,B]: False where there is none, and the sample is its own


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
