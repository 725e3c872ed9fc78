"""The blocks of a recipe whose other keys are those of the component that they name, and the output."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xdm_ft.algorithms import HeadInit
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
