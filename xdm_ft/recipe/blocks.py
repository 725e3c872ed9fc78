"""What a recipe is made of: its blocks, the components that they name, and the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import Field

from xdm_ft.algorithms import HeadInit, Solver
from xdm_ft.data import Augmentation
from xdm_ft.encoders._prompts import Prompts
from xdm_ft.features import FeatureSettings
from xdm_ft.protocol.splits import Protocol
from xdm_ft.recipe.search import TRAINING_KEYS, Search, Value, settings_of
from xdm_ft.recipe.text import Key
from xdm_ft.settings import Block
from xdm_ft.training import Training

B = TypeVar("B", bound=Block)


class DataCommon(Block):
    """The images. The other keys of the block are those of the data set."""

    name: Annotated[str, Field(description="data set, see `xdm-ft ls data`")]
    on_bad_image: Annotated[
        Literal["error", "skip"], Field(description="an image that does not decode: stop, or leave it out and count it")
    ] = "error"
    class_names: Annotated[
        dict[str, str], Field(description="class folder or label → words, for prompts and reports")
    ] = {}
    train_augmentation: Annotated[
        Augmentation | None,
        Field(
            description="random changes of training images, end to end or in features.views: none, or domainbed (crop, "
            "flip, colours, grey); null: domainbed for DomainBed's five, none for others (WILDS' examples use none)"
        ),
    ] = None


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
    """One item of `methods`. The other keys are the algorithm's and, prefixed, those of what is added and of the head.

    Examples of the latter are `sam.rho` and `mlp.hidden_width`.
    """

    name: Annotated[
        str, Field(description="ALGORITHM, with +SHARPNESS, +AVERAGING or both behind it, see `xdm-ft ls methods`")
    ]
    label: Annotated[str | None, Field(min_length=1, description="name in results; null: as written")] = None
    head: Annotated[str, Field(description="kind of class head, see `xdm-ft ls heads`")] = "linear"
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
    prefix: str = ""  # of these names in the block: `sam.`, where the keys of an algorithm are beside them

    def kwargs(self) -> dict[str, Any]:
        """The constructor's keywords."""
        return {key: getattr(self.block, f"{self.prefix}{key}") for key in self.own}

    def settings(self) -> dict[str, Any]:
        """The same under their names in a recipe and in results."""
        return {f"{self.prefix}{key}": value for key, value in self.kwargs().items()}

    def build(self, *args: Any) -> Any:
        return self.cls(*args, **self.kwargs())


@dataclass(frozen=True)
class MethodItem:
    """One entry of `methods`."""

    label: str
    head_init: HeadInit
    algorithm: Component
    head: Component
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
    def is_plain_erm(self) -> bool:
        """ERM with nothing added; its class head may be of any kind."""
        return self.algorithm.name == "erm" and self.sharpness is None and self.averaging is None

    @property
    def is_solver(self) -> bool:
        return issubclass(self.algorithm.cls, Solver)

    @property
    def parts(self) -> tuple[Component, ...]:
        every = self.algorithm, self.head, self.sharpness, self.averaging
        return tuple(part for part in every if part is not None)

    def gradient_evaluations(self, steps: int, num_domains: int) -> int:
        """Gradients of the parameters that one model takes; a sharpness-aware step takes each of them twice."""
        per_step: int = self.algorithm.cls.gradients_per_step(num_domains)
        return steps * per_step * (2 if self.sharpness else 1)


@dataclass(frozen=True)
class Recipe:
    """A whole recipe, checked."""

    name: str
    data: Component
    protocol: Protocol
    encoder: Component
    features: FeatureSettings
    methods: tuple[MethodItem, ...]
    training: Training
    search: Search
    output: Output

    @property
    def trainable(self) -> bool:
        return self.encoder_common.trainable

    @property
    def data_common(self) -> DataCommon:
        assert isinstance(self.data.block, DataCommon)
        return self.data.block

    @property
    def encoder_common(self) -> EncoderCommon:
        assert isinstance(self.encoder.block, EncoderCommon)
        return self.encoder.block

    @property
    def train_augmentation(self) -> Augmentation:
        """What training images go through: the data set's own where the recipe says nothing, none if read once."""
        own: Augmentation = self.data.cls.train_augmentation if self.trainable or self.features.views else "none"
        return self.data_common.train_augmentation or own

    @property
    def needs_features(self) -> bool:
        """Some method reads cached features of the encoder as it comes."""
        return not self.trainable or any(item.is_solver for item in self.methods)

    def resolved(self) -> dict[str, Any]:
        """Plain values with every default written out."""
        blocks: dict[str, Block] = {
            "data": self.data.block,
            "protocol": self.protocol,
            "encoder": self.encoder.block,
            "features": self.features,
            "training": self.training,
            "search": self.search,
            "output": self.output,
        }
        plain = {name: block.model_dump(mode="json") for name, block in blocks.items()}
        methods = [item.block.model_dump(mode="json") for item in self.methods]
        return {"name": self.name, **plain, "methods": methods}

    def as_yaml(self) -> str:
        return str(yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True, width=120))


def drawn_item(item: MethodItem, drawn: Mapping[str, Value]) -> MethodItem:
    """The item with the drawn settings of its parts. One that its recipe has changed from its default stays as it is.

    Defaults are compared, not what was written, so that a resolved recipe draws the same.

    Raises pydantic's `ValidationError` for a value that the part does not take.
    """
    changes: dict[str, Value] = {}
    for part in item.parts:
        own = settings_of(drawn, part.name)
        changes |= {f"{part.prefix}{key}": value for key, value in own.items() if key in part.own}
    fields = type(item.block).model_fields
    changes = {key: value for key, value in changes.items() if getattr(item.block, key) == fields[key].default}
    if not changes:
        return item
    block = _changed(item.block, changes)

    def of(part: Component | None) -> Component | None:
        return None if part is None else replace(part, block=block)

    return MethodItem(
        item.label,
        item.head_init,
        replace(item.algorithm, block=block),
        replace(item.head, block=block),
        of(item.sharpness),
        of(item.averaging),
        block,
    )


def drawn_training(training: Training, drawn: Mapping[str, Value]) -> Training:
    """The block with the drawn keys of its own. Raises pydantic's `ValidationError` as `drawn_item` does."""
    own = {key: value for key, value in drawn.items() if key in TRAINING_KEYS}
    return _changed(training, own) if own else training


def _changed(block: B, changes: Mapping[str, Value]) -> B:
    """A checked copy; whole-numbered settings are rounded to."""
    whole = {key for key in changes if int in _types(type(block).model_fields[key].annotation)}
    rounded = {key: round(value) if key in whole else value for key, value in changes.items()}  # type: ignore[arg-type]
    return type(block).model_validate({**block.model_dump(), **rounded})


def _types(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)


def text_faults(item: MethodItem, has_text: bool, normalized: bool) -> Iterator[tuple[Key, str]]:
    """Faults of what a method asks of the text side: the key of the method that is wrong, and what is wrong with it.

    `has_text`: the encoder has a text side; `normalized`: the method trains on L2-normalised features.
    """
    needs_text, head = item.algorithm.cls.needs_text, item.head.cls
    if needs_text and not has_text:
        yield (), f"{item.label} needs an encoder with a text side; use encoder.name: open_clip"
    elif item.head_init == "random" and needs_text and not item.is_solver:
        yield ("head_init",), f"{item.label} starts from the class embeddings; leave head_init out"
    elif item.head_init == "zero_shot":
        if item.is_solver:
            yield ("head_init",), f"{item.label} does not start from a head; leave head_init out"
        elif not has_text:
            yield ("head_init",), "zero_shot needs an encoder with a text side; use encoder.name: open_clip"
        elif head.text_reason:
            yield ("head",), f"{item.head.name} does not go with head_init: zero_shot: {head.text_reason}"
        elif not normalized and not head.normalizes:
            what = item.label if needs_text else "zero_shot"
            remedy = "set encoder.normalize: true, or normalize: true of this method"
            yield (), f"{what} starts from class embeddings, which fit L2-normalised features; {remedy}"
    if item.is_solver and item.head.name != "linear":
        yield ("head",), f"{item.label} finds a linear head without training; leave head out"
    if item.block.prompts is not None and not item.reads_text:
        yield ("prompts",), f"{item.label} reads no class embeddings; leave it out, or set head_init: zero_shot"
