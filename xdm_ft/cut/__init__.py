"""An encoder cut in two, and low-rank updates of it. Here: how much of an encoder trains: nothing, low-rank
updates, its last blocks, or all of it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from xdm_ft.runtime.settings import Block, OneOrMany


class LastBlocks(Block):
    """The last blocks of the encoder train whole; what lies below is frozen, and cached."""

    blocks: Annotated[int, Field(ge=1, description="number of blocks that train, counted from the end")]


class Lora(Block):
    """Low-rank updates W + (alpha / rank) B A of some layers train (Hu et al. 2022, LoRA, section 4.1)."""

    rank: Annotated[int, Field(ge=1, le=4096, description="rank of the update of each layer")] = 8
    alpha: Annotated[
        float | None, Field(gt=0, description="numerator of the update's factor alpha / rank; null: 2 · rank")
    ] = None
    dropout: Annotated[float, Field(ge=0, lt=1, description="dropout before the update")] = 0.0
    blocks: Annotated[
        int | None, Field(ge=1, description="number of blocks with updates, counted from the end; null: all")
    ] = None
    targets: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        OneOrMany,
        Field(
            description="linear layers of a block to update, by name or a dotted part of it, e.g. attn, mlp.fc1, qkv; "
            "null: all of the attention and the MLP",
        ),
    ] = None

    @property
    def scale(self) -> float:
        """The factor of the update, alpha / rank."""
        return (2.0 * self.rank if self.alpha is None else self.alpha) / self.rank


class LowRank(Block):
    """`trainable: {lora: {…}}`."""

    lora: Lora

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        if isinstance(values, dict) and "blocks" in values:
            raise ValueError("has both blocks and lora; keep one, or write {lora: {blocks: k}}")
        return values


def _way(value: Any) -> str | None:
    """Returns the tag of what is written for `trainable`, so that faults are those of one way only."""
    if isinstance(value, bool):
        return "tag-all"
    if isinstance(value, dict):
        return "tag-lora" if "lora" in value else "tag-blocks"
    if isinstance(value, LastBlocks | LowRank):
        return "tag-lora" if isinstance(value, LowRank) else "tag-blocks"
    return None


Trainable = Annotated[
    Annotated[bool, Tag("tag-all")] | Annotated[LastBlocks, Tag("tag-blocks")] | Annotated[LowRank, Tag("tag-lora")],
    Discriminator(
        _way,
        custom_error_type="trainable",
        custom_error_message="must be true, false, {blocks: k} or {lora: {rank: r}}",
    ),
]
"""false: frozen, on cached features; true: all of it, end to end."""


def blocks_above(trainable: Trainable) -> int | None:
    """Returns how many of the last blocks lie above the cut: what lies below is frozen; None: all blocks do."""
    if isinstance(trainable, LastBlocks):
        return trainable.blocks
    return trainable.lora.blocks if isinstance(trainable, LowRank) else None
