"""The parts of a recipe that name components: their own keys, and what they become."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from xdm_ft.algorithms import HeadInit, Solver
from xdm_ft.blocks import Block
from xdm_ft.encoders.loading.prompts import Prompts
from xdm_ft.recipe_text import Key


class DataCommon(Block):
    """The images. The other keys of the block are those of the data set."""

    name: Annotated[str, Field(description="data set, see `xdm-ft ls data`")]
    on_bad_image: Annotated[
        Literal["error", "skip"], Field(description="an image that does not decode: stop, or leave it out and count it")
    ] = "error"
    class_names: Annotated[
        dict[str, str], Field(description="class folder or label → words, for prompts and reports")
    ] = {}


class EncoderCommon(Block):
    """The encoder f. The other keys of the block are those of the encoder."""

    name: Annotated[str, Field(description="library of the encoder, see `xdm-ft ls encoders`")]
    trainable: Annotated[bool, Field(description="true: train end to end; false: frozen, on cached features")] = False
    batch_norm: Annotated[
        Literal["train", "frozen"], Field(description="batch-norm statistics while training end to end")
    ] = "train"
    unfreeze_at: Annotated[
        int, Field(ge=0, description="steps of the head alone before the encoder trains too (LP-FT; end to end only)")
    ] = 0


class MethodCommon(Block):
    """One item of `methods`. The other keys are those of the algorithm, of its sharpness and of its averaging."""

    name: Annotated[
        str, Field(description="ALGORITHM, with +SHARPNESS, +AVERAGING or both behind it, see `xdm-ft ls methods`")
    ]
    label: Annotated[str | None, Field(min_length=1, description="name in results; null: as written")] = None
    head_init: Annotated[
        HeadInit, Field(description="class head before training: random, or the class embeddings of the text encoder")
    ] = "random"
    prompts: Annotated[
        Prompts | None,
        Field(description="as encoder.prompts, for the class embeddings of this method alone; null: encoder.prompts"),
    ] = None
    normalize: Annotated[
        Literal[True] | None,
        Field(description="true: this method reads its cached features L2-normalised; null: as encoder.normalize"),
    ] = None


class Output(Block):
    """Where results go."""

    dir: Annotated[str, Field(min_length=1, description="parent of the run directory")] = "output"


def unfreezes_too_late(unfreeze_at: int, steps: int) -> str:
    return f"{unfreeze_at} leaves the encoder untrained in {steps} training steps; lower it or raise training.steps"


@dataclass(frozen=True)
class Component:
    """A component named in a recipe: its class and the settings for its constructor."""

    name: str
    cls: type[Any]
    block: Block  # common keys and the component's own
    own: tuple[str, ...]  # names of the constructor's keys

    def kwargs(self) -> dict[str, Any]:
        return {key: getattr(self.block, key) for key in self.own}

    def build(self, *args: Any) -> Any:
        return self.cls(*args, **self.kwargs())


@dataclass(frozen=True)
class MethodItem:
    """One entry of `methods`."""

    label: str
    head_init: HeadInit
    algorithm: Component
    sharpness: Component | None
    averaging: Component | None
    block: MethodCommon

    @property
    def reads_text(self) -> bool:
        """Its head is, or starts from, the class embeddings."""
        return self.algorithm.cls.needs_text or self.head_init == "zero_shot"

    @property
    def reads_normalized(self) -> bool:
        """It reads L2-normalised features, whatever `encoder.normalize` says."""
        return bool(self.block.normalize or getattr(self.algorithm.cls, "normalized", False))

    @property
    def is_solver(self) -> bool:
        return issubclass(self.algorithm.cls, Solver)


def text_faults(item: MethodItem, has_text: bool, normalized: bool) -> Iterator[tuple[Key, str]]:
    """Faults of what a method asks of the text side: the key of the method that is wrong, and what is wrong with it.

    `has_text`: the encoder has a text side; `normalized`: the method trains on L2-normalised features.
    """
    needs_text = item.algorithm.cls.needs_text
    if needs_text and not has_text:
        yield (), f"{item.label} needs an encoder with a text side; use encoder.name: open_clip"
    elif item.head_init == "random" and needs_text and not item.is_solver:
        yield ("head_init",), f"{item.label} starts from the class embeddings; leave head_init out"
    elif item.head_init == "zero_shot":
        if item.is_solver:
            yield ("head_init",), f"{item.label} does not start from a head; leave head_init out"
        elif not has_text:
            yield ("head_init",), "zero_shot needs an encoder with a text side; use encoder.name: open_clip"
        elif not normalized:
            what = item.label if needs_text else "zero_shot"
            remedy = "set encoder.normalize: true, or normalize: true of this method"
            yield (), f"{what} starts from class embeddings, which fit L2-normalised features; {remedy}"
    if item.block.prompts is not None and not item.reads_text:
        yield ("prompts",), f"{item.label} reads no class embeddings; leave it out, or set head_init: zero_shot"
