"""The blocks of a recipe that belong to no component."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from xdm_ft.algorithms import HeadInit
from xdm_ft.cut.trainable import Trainable
from xdm_ft.images.dataset import Augmentation
from xdm_ft.runtime.settings import Block
from xdm_ft.weights.prompts import Prompts


def _one_line(text: str | None) -> str | None:
    if text is not None and not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


class DataCommon(Block):
    """Keys of the block `data`; the data set adds its own."""

    name: Annotated[str, Field(description="data set, see `xdm-ft ls data`")]
    on_bad_image: Annotated[
        Literal["error", "skip"],
        Field(description="if an image does not decode: stop, or leave the image out and report it"),
    ] = "error"
    class_names: Annotated[
        dict[str, str], Field(description="class folder or label → name of the class in prompts and reports")
    ] = {}
    train_augmentation: Annotated[
        Augmentation | None,
        Field(
            description="augmentation of training images: none, or domainbed (crop, flip, colours, grey); null: of "
            "methods that train on images, or with features.views of all, domainbed for DomainBed's five and else none "
            "(WILDS' examples use none); of other methods, which read what is cached, none"
        ),
    ] = None


class EncoderCommon(Block):
    """Keys of the block `encoder`; the encoder adds its own."""

    name: Annotated[str, Field(description="library of the encoder, see `xdm-ft ls encoders`")]
    trainable: Annotated[
        Trainable,
        Field(
            description="false: frozen, on cached features; true: train end to end; {blocks: k}: train the last k "
            "blocks, see `xdm-ft validate` for the chain; {lora: {rank: r, blocks: k}}: train low-rank updates in them"
        ),
    ] = False
    batch_norm: Annotated[
        Literal["train", "frozen"],
        Field(description="batch-norm statistics of what trains in the encoder: updated, or kept as they are"),
    ] = "train"
    unfreeze_at: Annotated[
        int,
        Field(ge=0, description="steps that train the head alone, before the encoder too (LP-FT)"),
    ] = 0


class ListedEncoder(EncoderCommon):
    """Keys of an item of `encoders`; the encoder adds its own."""

    label: Annotated[
        str | None,
        Field(min_length=1, description="name in results; null: the model's name"),
        AfterValidator(_one_line),
    ] = None


class MethodCommon(Block):
    """Keys of an item of `methods`. The algorithm adds its own; those of add-ons and of the head have a prefix.

    Examples are `sam.rho` and `mlp.hidden_width`.
    """

    name: Annotated[
        str,
        Field(description="ALGORITHM, ALGORITHM+SHARPNESS, ALGORITHM+AVERAGING or all three, see `xdm-ft ls methods`"),
    ]
    label: Annotated[
        str | None,
        Field(min_length=1, description="name in results; null: the method's name"),
        AfterValidator(_one_line),
    ] = None
    head: Annotated[str, Field(description="kind of class head, see `xdm-ft ls heads`")] = "linear"
    head_init: Annotated[
        HeadInit, Field(description="initial class head: random, or the class embeddings of the text encoder")
    ] = "random"
    prompts: Annotated[
        Prompts | None,
        Field(description="like encoder.prompts, for this method only; null: encoder.prompts"),
    ] = None
    normalize: Annotated[
        Literal[True] | None,
        Field(description="true: L2-normalise the cached features for this method; null: as encoder.normalize"),
    ] = None
    trainable: Annotated[
        Trainable | None, Field(description="like encoder.trainable, for this method only; null: encoder.trainable")
    ] = None
    encoder_lr: Annotated[
        float | None,
        Field(
            gt=0,
            description="like training.encoder_lr, for this method only (usual with lora: 1e-4 to 1e-3); null: "
            "training.encoder_lr",
        ),
    ] = None


class Cluster(Block):
    """Keys of the block `cluster`: where features are extracted and models train. They change no number."""

    name: Annotated[
        Literal["ray"] | None,
        Field(
            description="ray: extract and train on the nodes of a Ray cluster (pip install 'xdm_ft[ray]'); null: here"
        ),
    ] = None
    address: Annotated[
        str,
        Field(min_length=1, description="HOST:PORT of the cluster's head node; auto: the cluster of this machine"),
    ] = "auto"
    gpus_per_model: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="GPUs of one task: a model trained end to end, a chunk of heads, or a stretch of extraction; "
            "0: the CPU, 0.25: four tasks share a GPU",
        ),
    ] = 0.0
    cpus_per_model: Annotated[
        int,
        Field(
            ge=1,
            description="cores and threads of a model trained end to end, and of a stretch of extraction; a chunk of "
            "heads takes one",
        ),
    ] = 1


class Output(Block):
    """Keys of the block `output`."""

    dir: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$", description="parent of the run directory")] = (
        "output"
    )
