"""Which images train, which select, which test: the protocol's splits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, field_validator
from torch import Tensor

from xdm_ft.blocks import Block

Rule = Literal["train_val", "val_domain", "oracle"]
SELECTION_SPLIT: dict[str, str] = {"train_val": "train_val", "val_domain": "val_domain", "oracle": "test_val"}
"""Selection rule → the split whose metric it looks at. `oracle` looks at a part of the test domain: cheating."""

Metric = Literal["accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "nll", "ece"]


class Protocol(Block):
    """How performance on an unseen domain is estimated."""

    name: Annotated[
        Literal["leave_one_domain_out", "official"],
        Field(description="leave_one_domain_out: each test domain in turn; official: the split of the data set"),
    ] = "leave_one_domain_out"
    test_domains: Annotated[
        tuple[str, ...] | None,
        Field(description="domains held out in turn; null: all (leave_one_domain_out only)", min_length=1),
    ] = None
    val_fraction: Annotated[
        float, Field(gt=0, lt=1, description="fraction of each training domain kept for validation")
    ] = 0.2
    selection: Annotated[
        Rule,
        Field(
            description="which images pick the step: train_val, validation parts of the training domains; "
            "val_domain, the official validation domain; oracle, a part of the test domain (cheating)"
        ),
    ] = "train_val"
    metric: Annotated[Metric, Field(description="metric that selects the step, and the headline of the tables")] = (
        "accuracy"
    )
    seeds: Annotated[
        tuple[int, ...], Field(min_length=1, description="a count n (seeds 0…n−1) or a list of seeds")
    ] = (0, 1, 2)

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_to_list(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError("at least 1 seed is needed")
            return tuple(range(value))
        return value


@dataclass(frozen=True)
class Split:
    """The rows of one model: what it trains on and what it is evaluated on. Row numbers are those of the data set."""

    test_domains: tuple[str, ...]
    train_domains: tuple[str, ...]  # names, in the order of `Batch.domain`
    train: tuple[Tensor, ...]  # int64 rows, one tensor per training domain
    evaluation: dict[str, Tensor]  # split name (train_val | val_domain | test | test_val) → int64 rows
    domain_of: Tensor  # int64 [number of domains of the data set] → 0…D−1 of `train_domains`, −1 for the others
    notes: tuple[str, ...] = field(default=())  # what the protocol line must say of this split
