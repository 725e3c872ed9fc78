"""The types that the layers exchange, the key of a model, and the names of what all of them name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xdm_ft.storage.names import model_folder

Tensors = dict[str, Tensor]  # parameter name → value


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
    soft_labels: Tensor | None = None  # float32 [N,C], rows with sum 1; None: the labels

    def to(self, device: torch.device) -> Annotations:
        """Returns the same annotations on a device."""
        needed = self.labels.to(device), self.domains.to(device), self.worst_of.to(device)
        optional = (None if values is None else values.to(device) for values in (self.groups, self.soft_labels))
        return Annotations(*needed, *optional)


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
    # set if the method mixes inputs (`Algorithm.input_partners`): x_j, its class and soft label, whether there is one
    partner: Tensor | None = None  # like x; a sample without a partner is its own
    partner_y: Tensor | None = None  # int64 [B]
    has_partner: Tensor | None = None  # bool [B]
    partner_targets: Tensor | None = None  # float [B,C], if there are targets

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
    balanced_accuracy: float | None  # None: fewer than two classes are present
    macro_f1: float
    auroc: float | None  # None: fewer than two classes are present
    worst_domain_accuracy: float | None  # None: no image is in a group of `Annotations.worst_of`
    nll: float
    ece: float
    n: int
    per_class_recall: dict[str, float | None] = field(repr=False)  # None for a class without images
    per_domain: dict[str, dict[str, Any]] = field(repr=False)  # name → {"accuracy", "n", …}

    @property
    def worst_class_recall(self) -> float | None:
        """The lowest recall of a class; None if no class has images."""
        return min((recall for recall in self.per_class_recall.values() if recall is not None), default=None)


class ModelKey(NamedTuple):
    """What identifies a model of a run: "erm, sketch held out, seed 0"."""

    method: str  # its label; under several encoders METHOD @ ENCODER (`with_encoder`)
    test_domains: tuple[str, ...]
    seed: int
    trial: int

    @property
    def folder(self) -> str:
        """The folder, relative to the run directory, of a model that has files of its own."""
        return model_folder(*self)

    def __str__(self) -> str:
        trial = f", trial {self.trial}" if self.trial else ""
        return f"{self.method}, {', '.join(self.test_domains)} held out, seed {self.seed}{trial}"


class OfModel:
    """What belongs to one model of a run, and has its key."""

    key: ModelKey

    @property
    def method(self) -> str:
        return self.key.method

    @property
    def test_domains(self) -> tuple[str, ...]:
        return self.key.test_domains

    @property
    def seed(self) -> int:
        return self.key.seed

    @property
    def trial(self) -> int:
        return self.key.trial


DomainSet = tuple[str, ...]
"""Held-out domains of one model: one, or several (`protocol.together`, official split), whose images count as one."""


def set_name(held: DomainSet) -> str:
    """The name of a set of held-out domains, as the summary's columns have it."""
    return " + ".join(held)


def sets_noun(held_out: Collection[DomainSet]) -> str:
    """Returns what several held-out sets are called after their number."""
    return "held-out domains" if all(len(held) == 1 for held in held_out) else "held-out sets of domains"


ORACLE = "oracle"  # the selection rule that reads labels of the held-out domain


def honest_rule(rules: Iterable[str]) -> str | None:
    """Returns the first rule that reads no label of the held-out domain; None if there is none.

    Of steps, trials and candidates that are equally good for `oracle`, it takes the one that this rule picks, so that
    a difference between both is never one of two ties.
    """
    return next((rule for rule in rules if rule != ORACLE), None)


ALPHA = 0.05  # significance level of verdicts; intervals are 95%


class Interval(NamedTuple):
    """The two ends of a 95% interval, in the unit of the estimate."""

    low: float
    high: float
