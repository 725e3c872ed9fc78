"""The settings of a recipe: its blocks, the components that they name, and the whole `Recipe`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field

from xdm_ft.algorithms import HeadInit, Solver
from xdm_ft.data import Augmentation
from xdm_ft.encoders._prompts import Prompts
from xdm_ft.features import FeatureSettings
from xdm_ft.protocol.splits import Protocol
from xdm_ft.recipe.search import TRAINING_KEYS, Search, Value, settings_of
from xdm_ft.recipe.text import Key, as_text
from xdm_ft.report import ReportSettings
from xdm_ft.settings import Block
from xdm_ft.training import Training

B = TypeVar("B", bound=Block)


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
            description="augmentation of training images, end to end or in features.views: none, or domainbed (crop, "
            "flip, colours, grey); null: domainbed for DomainBed's five, else none (WILDS' examples use none)"
        ),
    ] = None


class EncoderCommon(Block):
    """Keys of the block `encoder`; the encoder adds its own."""

    name: Annotated[str, Field(description="library of the encoder, see `xdm-ft ls encoders`")]
    trainable: Annotated[bool, Field(description="true: train end to end; false: frozen, on cached features")] = False
    batch_norm: Annotated[
        Literal["train", "frozen"],
        Field(description="batch-norm statistics in training end to end: updated, or kept as they are"),
    ] = "train"
    unfreeze_at: Annotated[
        int, Field(ge=0, description="steps that train the head alone, before the encoder too (LP-FT; end to end only)")
    ] = 0


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


class Output(Block):
    """Keys of the block `output`."""

    dir: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$", description="parent of the run directory")] = (
        "output"
    )


def unfreeze_problem(unfreeze_at: int, steps: int) -> str:
    return f"{unfreeze_at} of {steps} training steps leave the encoder untrained; lower it or raise training.steps"


@dataclass(frozen=True)
class Component:
    """A component named in a recipe: its class and the settings for its constructor."""

    name: str
    cls: type[Any]
    block: Block  # common keys and the component's own
    own: tuple[str, ...]  # names of the constructor's keys
    prefix: str = ""  # of these names in the block, such as `sam.`; the keys of an algorithm have none

    def kwargs(self) -> dict[str, Any]:
        """Returns the keywords for the constructor."""
        return {key: getattr(self.block, f"{self.prefix}{key}") for key in self.own}

    def settings(self) -> dict[str, Any]:
        """Returns the same values under their names in a recipe and in results."""
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
        """Whether its head is, or is initialised with, the class embeddings."""
        return self.algorithm.cls.needs_text or self.head_init == "zero_shot"

    @property
    def reads_normalized(self) -> bool:
        """Whether it needs L2-normalised features even if `encoder.normalize` is false."""
        return bool(self.block.normalize or getattr(self.algorithm.cls, "normalized", False))

    @property
    def is_plain_erm(self) -> bool:
        """Whether it is ERM without add-ons, with any kind of class head."""
        return self.algorithm.name == "erm" and self.sharpness is None and self.averaging is None

    @property
    def is_solver(self) -> bool:
        return issubclass(self.algorithm.cls, Solver)

    @property
    def parts(self) -> tuple[Component, ...]:
        every = self.algorithm, self.head, self.sharpness, self.averaging
        return tuple(part for part in every if part is not None)

    def gradient_evaluations(self, steps: int, num_domains: int) -> int:
        """Returns the number of gradients that training one model takes; twice as many if sharpness-aware."""
        per_step: int = self.algorithm.cls.gradients_per_step(num_domains)
        return steps * per_step * (2 if self.sharpness else 1)


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    name: str
    data: Component
    protocol: Protocol
    encoder: Component
    features: FeatureSettings
    methods: tuple[MethodItem, ...]
    training: Training
    search: Search
    report: ReportSettings
    output: Output
    analyse: bool = False  # measure the models at the end of the run, as `xdm-ft analyse` does

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
        """The recipe's augmentation; if it sets none, the data set's own, or "none" if features are computed once."""
        own: Augmentation = self.data.cls.train_augmentation if self.trainable or self.features.views else "none"
        return self.data_common.train_augmentation or own

    @property
    def needs_features(self) -> bool:
        """Whether a method reads cached features of the encoder before training."""
        return not self.trainable or any(item.is_solver for item in self.methods)

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by their keys, in the order in which a recipe is printed; `methods` is not among them."""
        return {
            "data": self.data.block,
            "protocol": self.protocol,
            "encoder": self.encoder.block,
            "features": self.features,
            "training": self.training,
            "search": self.search,
            "report": self.report,
            "output": self.output,
        }

    def resolved(self) -> dict[str, Any]:
        """Returns the recipe as plain values, including every default."""
        plain = {name: block.model_dump(mode="json") for name, block in self.blocks.items()}
        methods = [item.block.model_dump(mode="json") for item in self.methods]
        return {"name": self.name, **plain, "analyse": self.analyse, "methods": methods}

    def as_yaml(self) -> str:
        return as_text(self.resolved())


def drawn_item(item: MethodItem, drawn: Mapping[str, Value]) -> MethodItem:
    """Returns the item with the drawn settings of its parts. A setting that differs from its default is not replaced.

    Values are compared with defaults, instead of looking at which keys were written, because a resolved recipe writes
    all keys and must draw the same. Raises pydantic's `ValidationError` for a value that a part does not accept.
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
    """Returns the block with its drawn keys. Raises pydantic's `ValidationError` as `drawn_item` does."""
    own = {key: value for key, value in drawn.items() if key in TRAINING_KEYS}
    return _changed(training, own) if own else training


def _changed(block: B, changes: Mapping[str, Value]) -> B:
    """Returns a checked copy; values of integer settings are rounded."""
    types = {key: type(block).model_fields[key].annotation for key in changes}
    whole = {key for key, of_key in types.items() if int in (get_args(of_key) or (of_key,))}
    rounded = {key: round(value) if key in whole else value for key, value in changes.items()}  # type: ignore[arg-type]
    return type(block).model_validate({**block.model_dump(), **rounded})


def text_faults(item: MethodItem, has_text: bool, normalized: bool) -> Iterator[tuple[Key, str]]:
    """Yields the faults that concern the text side: the faulty key of the method, and the problem.

    `has_text`: the encoder has a text side. `normalized`: the method trains on L2-normalised features.
    """
    needs_text, head = item.algorithm.cls.needs_text, item.head.cls
    if needs_text and not has_text:
        yield (), f"{item.label} needs an encoder with a text side; leave it out, or use encoder.name: open_clip"
    elif item.head_init == "random" and needs_text and not item.is_solver:
        yield ("head_init",), f"{item.label} starts from the class embeddings; leave head_init out"
    elif item.head_init == "zero_shot":
        if item.is_solver:
            yield ("head_init",), f"{item.label} has no initial head; leave head_init out"
        elif not has_text:
            yield ("head_init",), "zero_shot needs an encoder with a text side; use encoder.name: open_clip"
        elif head.text_reason:
            yield ("head",), f"{item.head.name} can not be combined with head_init: zero_shot: {head.text_reason}"
        elif not normalized and not head.normalizes:
            what = item.label if needs_text else "zero_shot"
            remedy = "set encoder.normalize: true, or normalize: true for this method"
            yield (), f"{what} starts from class embeddings, which need L2-normalised features; {remedy}"
    if item.is_solver and item.head.name != item.algorithm.cls.head_kind:
        yield ("head",), f"{item.label} computes a {item.algorithm.cls.head_kind} head directly; leave head out"
    elif not item.is_solver and not head.trained:
        yield (
            ("head",),
            f"{item.head.name} is computed by a solver, and no gradient trains it; use linear, cosine or mlp",
        )
    if item.block.prompts is not None and not item.reads_text:
        yield ("prompts",), f"{item.label} uses no class embeddings; leave it out, or set head_init: zero_shot"
