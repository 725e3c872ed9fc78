"""The components that a recipe names, and an entry of its methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from xdm_ft.algorithms import HeadInit, Solver
from xdm_ft.cut.trainable import LastBlocks, LowRank, Trainable
from xdm_ft.recipe.blocks import EncoderCommon, MethodCommon
from xdm_ft.recipe.search import TRAINING_KEYS, Value, settings_of
from xdm_ft.recipe.text import Key
from xdm_ft.runtime.settings import Block
from xdm_ft.training import Training

B = TypeVar("B", bound=Block)


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


def encoder_common(encoder: Component) -> EncoderCommon:
    """Returns the settings of an encoder, typed as those that all encoders share."""
    assert isinstance(encoder.block, EncoderCommon)
    return encoder.block


def encoder_label(encoder: Component) -> str:
    """Returns the name of an encoder in results: its label, else its model."""
    return getattr(encoder.block, "label", None) or str(encoder.kwargs().get("model", encoder.name))


@dataclass(frozen=True)
class MethodItem:
    """One entry of `methods`, under one encoder."""

    label: str  # in results; under several encoders with the encoder's label: "erm @ small"
    head_init: HeadInit
    algorithm: Component
    head: Component
    sharpness: Component | None
    averaging: Component | None
    block: MethodCommon
    place: int  # of the entry in `methods`
    encoder: Component
    encoder_label: str | None = None  # None: the recipe has one encoder
    skipped: str | None = None  # why its encoder can not serve it; its models become skipped rows

    @property
    def encoder_common(self) -> EncoderCommon:
        return encoder_common(self.encoder)

    @property
    def trainable(self) -> Trainable:
        """How much of the encoder trains. Solvers read the features of the whole, frozen encoder."""
        own = self.block.trainable
        return False if self.is_solver else self.encoder_common.trainable if own is None else own

    @property
    def is_cut(self) -> bool:
        """Whether the lower part of the encoder is frozen, and its upper part trains."""
        return isinstance(self.trainable, LastBlocks | LowRank)

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
    def is_text(self) -> bool:
        """Whether its head is class embeddings alone: all seeds would give the same model."""
        return self.is_solver and self.algorithm.cls.needs_text

    @property
    def of_records(self) -> dict[str, Any]:
        """The fields of `Record` that are the same for all of its models."""
        trainable = self.trainable if isinstance(self.trainable, bool) else self.trainable.model_dump(mode="json")
        return {"encoder": encoder_label(self.encoder), "trainable": trainable, "deterministic": self.is_text or None}

    @property
    def parts(self) -> tuple[Component, ...]:
        every = self.algorithm, self.head, self.sharpness, self.averaging
        return tuple(part for part in every if part is not None)

    def gradient_evaluations(self, steps: int, num_domains: int) -> int:
        """Returns the number of gradients that training one model takes; twice as many if sharpness-aware."""
        per_step: int = self.algorithm.cls.gradients_per_step(num_domains)
        return steps * per_step * (2 if self.sharpness else 1)


def unfreeze_problem(unfreeze_at: int, steps: int) -> str:
    return f"{unfreeze_at} of {steps} training steps leave the encoder untrained; lower it or raise training.steps"


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

    return replace(
        item,
        algorithm=replace(item.algorithm, block=block),
        head=replace(item.head, block=block),
        sharpness=of(item.sharpness),
        averaging=of(item.averaging),
        block=block,
    )


def drawn_training(training: Training, item: MethodItem, drawn: Mapping[str, Value]) -> Training:
    """Returns the block for an item: with its drawn keys, and with the item's own `encoder_lr`, which is not drawn.

    Raises pydantic's `ValidationError` as `drawn_item` does.
    """
    own = {key: value for key, value in drawn.items() if key in TRAINING_KEYS}
    if item.block.encoder_lr is not None:
        own["encoder_lr"] = item.block.encoder_lr
    return _changed(training, own) if own else training


def _changed(block: B, changes: Mapping[str, Value]) -> B:
    """Returns a checked copy; values of integer settings are rounded."""
    types = {key: type(block).model_fields[key].annotation for key in changes}
    whole = {key for key, of_key in types.items() if int in (get_args(of_key) or (of_key,))}
    rounded = {key: round(value) if key in whole else value for key, value in changes.items()}  # type: ignore[arg-type]
    return type(block).model_validate({**block.model_dump(), **rounded})


def text_faults(item: MethodItem, normalized: bool) -> Iterator[tuple[Key, str]]:
    """Yields the faults that concern the text side: the faulty key of the method, and the problem.

    `normalized`: the method trains on L2-normalised features.
    """
    needs_text, head = item.algorithm.cls.needs_text, item.head.cls
    if item.skipped is not None:
        yield ("head_init",) * (not needs_text), f"{item.label} {item.skipped}; use encoder.name: open_clip"
    elif item.head_init == "random" and needs_text and not item.is_solver:
        yield ("head_init",), f"{item.label} starts from the class embeddings; leave head_init out"
    elif item.head_init == "zero_shot":
        if item.is_solver:
            yield ("head_init",), f"{item.label} has no initial head; leave head_init out"
        elif head.text_reason:
            yield ("head",), f"{item.head.name} can not be combined with head_init: zero_shot: {head.text_reason}"
        elif not normalized and not head.normalizes:
            what = item.label if needs_text else "zero_shot"
            remedy = "set encoder.normalize: true, or normalize: true for this method"
            yield (), f"{what} starts from class embeddings, which need L2-normalised features; {remedy}"
    if item.is_solver and item.head.name != item.algorithm.cls.head_kind:
        yield ("head",), f"{item.label} computes a {item.algorithm.cls.head_kind} head directly; leave head out"
    elif not item.is_solver and not head.trained:
        yield ("head",), f"{item.head.name} is computed by a solver, no gradient trains it; use linear, cosine or mlp"
    if item.block.prompts is not None and not item.reads_text:
        yield ("prompts",), f"{item.label} uses no class embeddings; leave it out, or set head_init: zero_shot"
