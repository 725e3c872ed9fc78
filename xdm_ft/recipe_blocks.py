"""The parts of a recipe that name components: their own keys, and what they become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field

from xdm_ft.algorithms import HeadInit, Solver
from xdm_ft.blocks import Block
from xdm_ft.data import Augmentation
from xdm_ft.features import FeatureSettings
from xdm_ft.training import Training
from xdm_ft.training.search import TRAINING_KEYS, Value, settings_of

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


def views_faults(
    features: FeatureSettings, data: DataCommon, used: Augmentation, trainable: bool, methods: Iterable[MethodItem]
) -> Iterator[tuple[tuple[str, str], str]]:
    """Key and problem where `features.views` and the augmentation (of `data`, and as resolved: `used`) do not fit."""
    augmentation, count, views = ("data", "train_augmentation"), ("features", "views"), features.views
    if not trainable and not views and data.train_augmentation not in (None, "none"):
        problem = "has no meaning with a frozen encoder, whose features of every image are computed once"
        yield augmentation, f"{problem}; leave it out, or set features.views, or encoder.trainable: true"
    if not views:
        return
    if trainable:
        yield count, "has no meaning with encoder.trainable, which augments at every step; leave it out"
    elif all(item.is_solver for item in methods):
        yield count, "has no meaning for methods without gradient steps, which read the plain images; leave it out"
    elif used == "none":
        own = "" if data.train_augmentation else ", as usual with this data set,"
        yield augmentation, f"none{own} makes no views to cache; set domainbed, or leave features.views out"


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

    @property
    def parts(self) -> tuple[Component, ...]:
        return tuple(part for part in (self.algorithm, self.sharpness, self.averaging) if part is not None)

    def gradient_evaluations(self, steps: int, num_domains: int) -> int:
        """Gradients of the parameters that one model takes; a sharpness-aware step takes each of them twice."""
        per_step: int = self.algorithm.cls.gradients_per_step(num_domains)
        return steps * per_step * (2 if self.sharpness else 1)


def drawn_item(item: MethodItem, drawn: Mapping[str, Value]) -> MethodItem:
    """The item with the drawn settings of its parts. What its recipe sets itself stays as it is.

    Raises pydantic's `ValidationError` for a value that the part does not take.
    """
    changes: dict[str, Value] = {}
    for part in item.parts:
        changes |= {key: value for key, value in settings_of(drawn, part.name).items() if key in part.own}
    changes = {key: value for key, value in changes.items() if key not in item.block.model_fields_set}
    if not changes:
        return item
    block = _changed(item.block, changes)

    def of(part: Component | None) -> Component | None:
        return None if part is None else replace(part, block=block)

    return MethodItem(
        item.label,
        item.head_init,
        replace(item.algorithm, block=block),
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
