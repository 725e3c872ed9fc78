"""The types that the layers exchange. Imports torch only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """The task to learn: C classes, D training domains, and the metric of selection."""

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
    """The annotations of the N images of a data set."""

    labels: Tensor  # int64 [N], the class: 0…C−1
    domains: Tensor  # int64 [N], numbered as in the data set, held-out domains included
    worst_of: Tensor  # int64 [N]: worst_domain_accuracy is the minimum over these groups; −1: in no group
    groups: Tensor | None = None  # int64 [N]: patient, slide or sequence; None: images are independent

    def to(self, device: torch.device) -> Annotations:
        """Returns the same annotations on a device."""
        groups = None if self.groups is None else self.groups.to(device)
        return Annotations(self.labels.to(device), self.domains.to(device), self.worst_of.to(device), groups)


@dataclass(frozen=True)
class Criteria:
    """The selection rules of a training, and the metric that they compare."""

    rules: tuple[str, ...]  # the recipe's own rule first: if it can select no step, the training has failed
    metric: str  # a key of `Score`, such as "accuracy"


class Batch(NamedTuple):
    """One batch. `x` is images, or cached features if the encoder is frozen."""

    x: Tensor  # float [B,3,H,W] or [B,K]
    y: Tensor  # int64 [B]
    domain: Tensor  # int64 [B], 0…D−1, training domains only
    row: Tensor  # int64 [B], of the sample in the data set
    position: Tensor  # int64 [B], of the sample in the full batch of the step: the key of every random draw
    targets: Tensor | None = None  # float [B,C], soft labels
    # set if the method mixes inputs (`Algorithm.input_partners`): x_j, its class, whether the sample has a partner
    partner: Tensor | None = None  # like x; a sample without a partner is its own
    partner_y: Tensor | None = None  # int64 [B]
    has_partner: Tensor | None = None  # bool [B]

    def fields(self) -> dict[str, Tensor]:
        """Returns the fields that are not None, by name, as `torch.func.vmap` cannot map None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def block(self, number: int, blocks: int, axis: int = 0) -> Batch:
        """Returns one of the equal blocks of a per-domain batch or of its parts; each block holds one domain.

        `axis` is that of the samples: 1 in a bank, where axis 0 is that of the heads.
        """
        size = self.y.shape[axis] // blocks
        return Batch(**{name: value.narrow(axis, number * size, size) for name, value in self.fields().items()})


class Samples(NamedTuple):
    """Samples without their images."""

    row: Tensor  # int64 [...,B], in the data set
    y: Tensor  # int64 [...,B]
    domain: Tensor  # int64 [...,B], as in `Batch`


class InputPartners(NamedTuple):
    """The partner that each sample of a batch is mixed with."""

    row: Tensor  # int64 [...,B]: its row in the data set
    position: Tensor  # int64 [...,B]: its position in the batch; B or more if it was drawn from outside the batch
    exists: Tensor  # bool [...,B]: False if there is no valid partner; the sample is then its own


class Losses(NamedTuple):
    """The losses of one batch, and the tensors that the engine stores or logs."""

    total: Tensor  # scalar: trains encoder and head, with sharpness and clipping
    auxiliary: Tensor  # scalar: trains the modules of `Algorithm.auxiliary`, without sharpness and clipping
    # plain dicts, never changed in place: `torch.func.vmap` returns no other mapping
    buffers: dict[str, Tensor] = {}  # new values of the algorithm's buffers, written once per step
    logs: dict[str, Tensor] = {}  # scalars to log
    first_pass_draws: dict[str, Tensor] = {}  # masks and draws that `loss_at_perturbed` uses again


@dataclass(frozen=True)
class Score:
    """The metrics of one split, as `metrics` in results.json holds them. Accuracies and rates are fractions."""

    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    auroc: float | None  # None: fewer than two classes are present
    worst_domain_accuracy: float | None  # None: no image is in a group of `Annotations.worst_of`
    nll: float
    ece: float
    n: int
    per_class_recall: dict[str, float | None] = field(repr=False)  # None for a class without images
    per_domain: dict[str, dict[str, Any]] = field(repr=False)  # name → {"accuracy", "n"}

    @property
    def worst_class_recall(self) -> float | None:
        """The lowest recall of a class; None if no class has images."""
        return min((recall for recall in self.per_class_recall.values() if recall is not None), default=None)
