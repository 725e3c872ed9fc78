"""The parts of a recipe that name components: their own keys, and what they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from xdm_ft.algorithms import HeadInit, Solver
from xdm_ft.blocks import Block


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
    block: Block

    @property
    def is_solver(self) -> bool:
        return issubclass(self.algorithm.cls, Solver)

    def gradient_evaluations(self, steps: int, num_domains: int) -> int:
        """Gradients of the parameters that one model takes; a sharpness-aware step takes each of them twice."""
        per_step: int = self.algorithm.cls.gradients_per_step(num_domains)
        return steps * per_step * (2 if self.sharpness else 1)
