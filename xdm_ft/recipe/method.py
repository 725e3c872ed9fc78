"""An entry of `methods`: its keys, the components that it names, and the overrides METHOD.KEY=VALUE that change it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PlainSerializer, ValidationError

from xdm_ft.algorithms import HeadInit, Solver
from xdm_ft.augmentations import Augmentation, Augmentations
from xdm_ft.cut import LastBlocks, LowRank, Trainable
from xdm_ft.encoders import TextEncoder
from xdm_ft.model_sources.prompts import Prompts
from xdm_ft.recipe import components
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.search import METHOD_KEYS, TRAINING_KEYS, Value, settings_of
from xdm_ft.recipe.text import Faults, Key
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.runtime.settings import Block, Name
from xdm_ft.training import ClassWeights, Training

B = TypeVar("B", bound=Block)


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


def _strength(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "clap" and not (is_number and 0 <= float(value) < math.inf):  # type: ignore[arg-type]
        raise ValueError("must be a number from 0, or clap")
    return value


def augmentations_of(value: Any) -> Augmentations | None:
    """Returns what a recipe's value says; None: the value is null. Raises `ValueError`."""
    if value is None or isinstance(value, Augmentations):
        return value
    if value in ("none", ["none"]):
        return Augmentations()
    entries = value if isinstance(value, list | tuple) else [value]
    named = [pair for entry in entries for pair in _named_augmentations(entry)]
    if not named:
        raise ValueError("must name an augmentation; write none for none")
    if repeated := [name for i, (name, _) in enumerate(named) if name in dict(named[:i])]:
        raise ValueError(f"names {repeated[0]} twice; keep one")
    made = [_augmentation(name, settings) for name, settings in named]
    resizing = [augmentation for augmentation in made if augmentation.replaces_resizing]
    if len(resizing) > 1:
        names = " and ".join(augmentation.name for augmentation in resizing)
        raise ValueError(f"{names} both replace the encoder's resizing; keep one")
    # it gets the image before it is resized
    return Augmentations(sorted(made, key=lambda augmentation: not augmentation.replaces_resizing))


def _named_augmentations(entry: Any) -> list[tuple[str, Any]]:
    """Returns (name, settings) of each augmentation of an entry of the list."""
    if isinstance(entry, str):
        return [(entry, {})]
    if isinstance(entry, Mapping) and "name" in entry:
        raise ValueError(f"must have the form {{{entry['name']}: {{KEY: VALUE}}}}, without name")
    if isinstance(entry, Mapping) and all(isinstance(name, str) for name in entry):
        return [(name, {} if settings is None else settings) for name, settings in entry.items()]
    raise ValueError("must be a name, a mapping {name: settings}, or a list of them")


def _augmentation(name: str, settings: Any) -> Augmentation:
    if name == "none":
        raise ValueError("none stands alone; leave it out of the list")
    try:
        cls = components.find("augmentations", name)
    except UserError as error:
        raise ValueError(str(error)) from error
    if not isinstance(settings, Mapping):
        raise ValueError(f"{name}: must be a mapping of settings ({', '.join(cls.model_fields) or 'it has none'})")
    try:
        made: Augmentation = cls.model_validate(dict(settings))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        if fault["type"] == "extra_forbidden":
            meant = did_you_mean(key, list(cls.model_fields)) if cls.model_fields else "; it has none"
            raise ValueError(f"{name}: unknown key {key}{meant}") from error
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{name}.{key}: {message[0].lower()}{message[1:]}") from error
    return made


def _as_written(augmentations: Augmentations | None) -> Any:
    """Returns the recipe's value with every default."""
    if augmentations is None:
        return None
    entries = [{of.name: of.model_dump(mode="json")} if type(of).model_fields else of.name for of in augmentations]
    return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries or "none"


TrainAugmentation = Annotated[
    InstanceOf[Augmentations] | None, BeforeValidator(augmentations_of), PlainSerializer(_as_written)
]
"""Type of the keys `train_augmentation`: `Augmentations`, or None."""
Label = Annotated[Name, Field(min_length=1), AfterValidator(_one_line)]


class EncoderCommon(Block):
    """Keys of the block `encoder`; the encoder adds its own."""

    name: str = Field(description="library of the encoder, see `xdm-ft ls encoders`")
    trainable: Trainable = Field(
        default=False,
        description="false: frozen, on cached features; true: train end to end; {blocks: k}: train the last k blocks "
        "(`xdm-ft validate` lists them); {lora: {rank: r, blocks: k}}: train low-rank updates in them",
    )
    batch_norm: Literal["train", "frozen"] = Field(
        default="train",
        description="batch-norm statistics in the trained part of the encoder: train updates them, frozen keeps them",
    )
    unfreeze_at: int = Field(
        default=0, ge=0, description="first steps, which train the head alone; then the encoder trains too (LP-FT)"
    )


class ListedEncoder(EncoderCommon):
    """Keys of an item of `encoders`; the encoder adds its own."""

    label: Label | None = Field(default=None, description="name in results; null: the model's name")


class MethodCommon(Block):
    """Keys of an item of `methods`. The algorithm adds its own; those of add-ons and of the head have a prefix.

    Examples are `sam.rho` and `mlp.hidden_width`.
    """

    name: str = Field(
        description="ALGORITHM, ALGORITHM+SHARPNESS, ALGORITHM+AVERAGING or all three, see `xdm-ft ls methods`"
    )
    label: Label | None = Field(default=None, description="name in results; null: the method's name")
    head: str = Field(default="linear", description="kind of class head, see `xdm-ft ls heads`")
    start: Literal["zero_shot"] | None = Field(
        default=None,
        description="zero_shot: start from the class embeddings, with what belongs together: head_init: zero_shot and "
        "normalize: true (not with head: cosine), or center: zero_shot; null: as these say",
    )
    anchor: Annotated[float | Literal["clap"], BeforeValidator(_strength)] = Field(
        default=0.0,
        description="strength of the loss that pulls the class head back to its start; 0: none; clap: each class's is "
        "the mean zero-shot probability of it on its training images",
    )
    head_init: HeadInit = Field(
        default="random", description="initial class head: random, or the class embeddings of the text encoder"
    )
    prompts: Prompts | None = Field(
        default=None, description="encoder.prompts of this method alone; null: encoder.prompts"
    )
    normalize: Literal[True] | None = Field(
        default=None, description="true: L2-normalise what this method's head reads; null: as encoder.normalize"
    )
    trainable: Trainable | None = Field(
        default=None, description="encoder.trainable of this method alone; null: encoder.trainable"
    )
    encoder_lr: float | None = Field(
        default=None,
        gt=0,
        description="training.encoder_lr of this method alone (lora: usually 1e-4 to 1e-3); null: training.encoder_lr",
    )
    class_weights: ClassWeights | None = Field(
        default=None, description="training.class_weights of this method alone; null: training.class_weights"
    )
    train_augmentation: TrainAugmentation = Field(
        default=None, description="data.train_augmentation of this method alone; null: data.train_augmentation"
    )


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
    index: int  # of the entry in `methods`
    encoder: Component
    encoder_label: str | None = None  # None: the recipe has one encoder
    skipped: str | None = None  # why its encoder cannot serve it; its models become skipped rows
    has_text: bool = False  # of a solver that takes them: its encoder has class embeddings; known once it is built

    @property
    def own_label(self) -> str:
        """The label of the entry, without that of its encoder."""
        return self.block.label or self.block.name

    @property
    def encoder_common(self) -> EncoderCommon:
        return encoder_common(self.encoder)

    @property
    def trainable(self) -> Trainable:
        """How much of the encoder trains. Solvers read the features of the whole, frozen encoder."""
        written = self.block.trainable
        return False if self.is_solver else self.encoder_common.trainable if written is None else written

    @property
    def is_cut(self) -> bool:
        """Whether the lower part of the encoder is frozen, and its upper part trains."""
        return isinstance(self.trainable, LastBlocks | LowRank)

    @property
    def reads_text(self) -> bool:
        """Whether its head is, or is initialised with, the class embeddings."""
        return self.has_text or self.algorithm.cls.needs_text or "zero_shot" in (self.head_init, self.center)

    @property
    def may_read_text(self) -> bool:
        """Whether it reads class embeddings, or will if its encoder has some."""
        is_open = self.center is None and "center" in self.algorithm.keys
        takes_text = is_open or (self.is_solver and self.algorithm.cls.takes_text)
        return self.reads_text or (takes_text and issubclass(self.encoder.cls, TextEncoder))

    @property
    def center(self) -> str | None:
        """Where a solver's penalty pulls to; None: to be decided when the encoder is built, or no such method."""
        return getattr(self.block, "center", None)

    def with_text(self, has_text: bool) -> MethodItem:
        """Returns the item with what its encoder decides where the recipe leaves it open.

        `has_text`: the encoder has class embeddings.
        """
        if self.center is None and "center" in self.algorithm.keys:
            return change_item(self, {"center": "zero_shot" if has_text else "zero"})
        return replace(self, has_text=has_text) if self.is_solver and self.algorithm.cls.takes_text else self

    @property
    def reads_normalized(self) -> bool:
        """Whether it needs L2-normalised features even if `encoder.normalize` is false."""
        from_text = self.center == "zero_shot" or (self.block.start is not None and not self.head.cls.normalizes)
        return bool(self.block.normalize or from_text or getattr(self.algorithm.cls, "normalized", False))

    @property
    def picks_across_domains(self) -> bool:
        """Whether a solver picks a point on training domains that are left out."""
        return getattr(self.block, "pick", None) == "cross_domain"

    @property
    def takes_anchor(self) -> bool:
        """Whether `anchor` can pull its head back: gradients train it, and it has weights of each class."""
        return not self.is_solver and bool(self.head.cls.per_class)

    @property
    def anchor_fault(self) -> str:
        """Why its `anchor` cannot be; "" if it can."""
        if not self.block.anchor:
            return ""
        if self.is_solver:
            return f"{self.label} computes its head, and no step moves it; leave it out"
        if not self.takes_anchor:
            return f"the head {self.head.name} has no weights of a class that could be pulled back; leave it out"
        if self.block.anchor == "clap" and self.head_init == "random":
            return "clap pulls to the class embeddings; set start: zero_shot, or a number"
        return ""

    def start_words(self, normalized: bool) -> str:
        """Returns how its head starts and whether it reads L2-normalised features. `normalized`: its encoder's are."""
        if self.is_solver:
            center = f"computed around {'the class embeddings' if self.center == 'zero_shot' else 'zero'}"
            start = center if self.center else "the class embeddings" if self.is_text else "computed"
            start += " beside the class embeddings" if self.has_text and not self.center else ""
        else:
            start = "starts at the class embeddings" if self.head_init == "zero_shot" else "starts at random"
            start += f", anchor {self.block.anchor}" if self.block.anchor else ""
        if self.head.cls.normalizes:
            return f"{self.label}: {start}, normalises features itself"
        reads = "normalised features" if normalized or self.reads_normalized else "features as they are"
        return f"{self.label}: {start}, reads {reads}"

    @property
    def adapts_to_sites(self) -> bool:
        """Whether few labels can adapt its models to a site: linear heads on a frozen encoder, no means of weights."""
        linear = self.trainable is False and self.head.name == "linear"
        return linear and not self.varied_by_finish and self.skipped is None

    @property
    def varied_by_finish(self) -> Mapping[str, str]:
        """What its means of weights vary, `Algorithm.varied_by_finish`; {} of solvers and other methods."""
        names: Mapping[str, str] = getattr(self.algorithm.cls, "varied_by_finish", {})
        return names

    @property
    def is_plain_erm(self) -> bool:
        """Whether it is ERM without add-ons and without an anchor, with any kind of class head."""
        add_ons = self.sharpness or self.averaging or self.block.anchor
        return self.algorithm.name == "erm" and not add_ons

    @property
    def is_solver(self) -> bool:
        return issubclass(self.algorithm.cls, Solver)

    @property
    def start_key(self) -> str:
        """The key of a recipe that says that it starts at, or is computed around, the class embeddings."""
        return "start" if self.block.start else "center" if self.center else "head_init"

    @property
    def is_text(self) -> bool:
        """Whether its head is class embeddings alone: all seeds would give the same model."""
        return self.is_solver and self.algorithm.cls.needs_text

    @property
    def record_fields(self) -> dict[str, Any]:
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

    def text_faults(self, normalized: bool) -> Iterator[tuple[Key, str]]:
        """Yields the faults that concern the text side: the faulty key of the method, and the problem.

        `normalized`: the method trains on L2-normalised features.
        """
        needs_text, head = self.algorithm.cls.needs_text, self.head.cls
        if self.skipped is not None:
            key = (self.start_key,) * (not needs_text)
            yield key, f"{self.label} {self.skipped}; use encoder.name: open_clip"
        elif self.head_init == "zero_shot":
            if self.is_solver:
                yield ("head_init",), f"{self.label} has no initial head; leave head_init out"
            elif head.text_reason:
                start = f"{self.start_key}: zero_shot"
                yield ("head",), f"{self.head.name} cannot be combined with {start}: {head.text_reason}"
            elif not normalized and not head.normalizes:
                remedy = "set start: zero_shot in place of head_init"
                yield (), f"zero_shot starts from class embeddings, which need L2-normalised features; {remedy}"
        if self.is_solver and self.head.name != self.algorithm.cls.head_kind:
            yield ("head",), f"{self.label} computes a {self.algorithm.cls.head_kind} head directly; leave head out"
        elif not self.is_solver and not head.trained:
            yield (
                ("head",),
                f"{self.head.name} is computed by a solver, no gradient trains it; use linear, cosine or mlp",
            )


def unfreeze_problem(unfreeze_at: int, steps: int) -> str:
    return f"{unfreeze_at} of {steps} training steps leave the encoder untrained; lower it or raise training.steps"


def draw_item(item: MethodItem, drawn: Mapping[str, Value]) -> MethodItem:
    """Returns the item with the drawn settings of its parts. A setting that differs from its default is not replaced.

    Values are compared with defaults, instead of looking at which keys were written, because a resolved recipe writes
    all keys and must draw the same. Raises pydantic's `ValidationError` for a value that a part does not accept.
    """
    changes = {key: value for key, value in drawn.items() if key in METHOD_KEYS and item.takes_anchor}
    for part in item.parts:
        of_part = settings_of(drawn, part.name)
        changes |= {f"{part.prefix}{key}": value for key, value in of_part.items() if key in part.keys}
    fields = type(item.block).model_fields
    changes = {key: value for key, value in changes.items() if getattr(item.block, key) == fields[key].default}
    return change_item(item, changes) if changes else item


def change_item(item: MethodItem, changes: Mapping[str, Value]) -> MethodItem:
    """Returns the item with other values of its keys. Raises pydantic's `ValidationError` as `draw_item` does."""
    block = _change(item.block, changes)
    names = ("algorithm", "head", "sharpness", "averaging")
    parts: dict[str, Any] = {
        name: part and replace(part, block=block) for name in names if (part := getattr(item, name))
    }
    return replace(item, block=block, **parts)


def draw_training(training: Training, item: MethodItem, drawn: Mapping[str, Value]) -> Training:
    """Returns the block for an item: with its drawn keys, and with the item's own `encoder_lr`, which is not drawn.

    Raises pydantic's `ValidationError` as `draw_item` does.
    """
    changes = {key: value for key, value in drawn.items() if key in TRAINING_KEYS}
    if item.block.encoder_lr is not None:
        changes["encoder_lr"] = item.block.encoder_lr
    return _change(training, changes) if changes else training


def _change(block: B, changes: Mapping[str, Value]) -> B:
    """Returns a checked copy; values of integer settings are rounded."""
    types = {key: type(block).model_fields[key].annotation for key in changes}
    integers = {key for key, annotation in types.items() if int in (get_args(annotation) or (annotation,))}
    rounded = {key: round(value) if key in integers else value for key, value in changes.items()}  # type: ignore[arg-type]
    return type(block).model_validate({**block.model_dump(), **rounded})


def split_name(name: str) -> tuple[str, list[str]]:
    """Returns algorithm and add-ons: xdomainmix+sam+swad → (xdomainmix, [sam, swad]). sam alone means erm+sam."""
    first, *add_ons = name.split("+")
    if first in components.names("algorithms") or not any(first in components.names(f) for f in components.ADD_ONS):
        return first, add_ons
    return "erm", [first, *add_ons]


def items_with_overrides(faults: Faults) -> tuple[Any, list[str]]:
    """Returns the unchecked items of `methods`, changed by every override METHOD.KEY=VALUE, and what is no METHOD.

    METHOD is a component (every item that uses it), the name of an item as it is written, or a label. The label wins
    over the written name, and this one over the component. Adds a fault for every override that changes no item or may
    mean two.
    """
    text, methods = faults.text, faults.text.values.get("methods")
    items, names = _as_blocks(methods), method_names(methods)
    text.overridden |= {tuple(override.split(".")) for override, _ in text.method_overrides}
    unknown: list[str] = []
    changes: list[tuple[int, int, str, str, Any]] = []  # rank, index of the item, its key, override, value
    for override, value in text.method_overrides:
        named = [name for name in names if f"{override}.".startswith(f"{name}.")]  # labels may contain dots
        first = override.partition(".")[0]
        if not named and {*first.split("+")} <= components.method_parts().keys():
            named = [first]
        if len(named) > 1:
            faults.add(override, f"may mean {' or '.join(named)}; choose a label without a dot")
        elif override in named:
            faults.add(override, f"is a method, not a value; write {override}.KEY=VALUE")
        elif not named:
            unknown.append(first)
        else:
            try:
                keys = _keys_in_items(items, named[0], override.removeprefix(f"{named[0]}."))
                changes += [(rank, i, key, override, value) for rank, i, key in keys]
            except UserError as error:
                faults.add(override, str(error))
    # the least specific first, so that a label wins over a written name, and this one over a component
    for _, i, key, override, value in sorted(changes, key=lambda change: change[0]):
        path = tuple(key.split(".")) if key.startswith("trainable.") else (key,)
        items[i] = _with_value(items[i], path, value)
        text.mark_overridden(("methods", i, *path))
        text.written_as[("methods", i, *path)] = override
    return items or methods, unknown


def method_names(methods: Any) -> list[str]:
    """Returns what METHOD may be, given the unchecked value of `methods`: components, names and labels of items."""
    written = [name for item in _as_blocks(methods) for key in ("name", "label") if (name := _text(item, key))]
    return list(dict.fromkeys([*components.method_parts(), *written]))


def _with_value(block: Any, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns a copy of a block in which the key at `path` has the value; what is no block on the way is replaced."""
    first, *rest = path
    values = block if isinstance(block, dict) else {}
    return {**values, first: _with_value(values.get(first), tuple(rest), value) if rest else value}


def _as_blocks(methods: Any) -> list[Any]:
    """Returns the unchecked items of `methods`, names as blocks; [] if it is neither a list nor a text of names."""
    if isinstance(methods, str):  # methods=erm,xdomainmix
        methods = [name.strip() for name in methods.split(",") if name.strip()]
    listed = methods if isinstance(methods, list) else []
    return [{"name": item} if isinstance(item, str) else item for item in listed]


def _text(item: Any, key: str) -> str:
    """Returns the text at `key` of an unchecked item, or ""."""
    value = item.get(key) if isinstance(item, dict) else None
    return value if isinstance(value, str) else ""


def _parts_of(item: Any) -> list[str]:
    """Returns the names of the known components that an unchecked item of `methods` names."""
    first, add_ons = split_name(_text(item, "name"))
    return [name for name in (first, *add_ons, _text(item, "head")) if name in components.method_parts()]


def _keys_in_items(items: list[Any], name: str, setting: str) -> list[tuple[int, int, str]]:
    """Returns (rank, index, key) of each item that `name.setting` changes. Raises `UserError` if that is unclear."""
    using = [i for i, item in enumerate(items) if name in (*_parts_of(item), _text(item, "name"))]
    labelled = [i for i, item in enumerate(items) if name == _text(item, "label") and i not in using]
    if using and labelled:
        raise UserError(f"{name} is the label of methods.{labelled[0]}, and another item uses it; choose another label")
    if not using and not labelled:
        raise UserError(f"no item of methods uses {name}; add it to one, or leave this out")
    folders = components.method_parts()
    if name in folders and using:
        return [(0, i, setting if folders[name] == "algorithms" else f"{name}.{setting}") for i in using]
    changed = []
    for i in using or labelled:
        keys: dict[str, str] = {}  # {component: key in the item} that `setting`, with or without its name, may mean
        for part in _parts_of(items[i]):
            key = setting.removeprefix(f"{part}.")
            if key in components.settings_model(components.find(folders[part], part)).model_fields:
                keys[part] = key if folders[part] == "algorithms" else f"{part}.{key}"
        if len(keys) > 1:
            choices = " or ".join(f"{name}.{part}.{setting}" for part in keys)
            raise UserError(f"is a key of {' and '.join(keys)}; write {choices}")
        rank = 2 if name == _text(items[i], "label") else 1
        changed.append((rank, i, next(iter(keys.values()), setting)))
    return changed


SEPARATOR = " @ "


def split_label(label: str, encoders: Collection[str]) -> tuple[str, str | None]:
    """Returns (METHOD, ENCODER) of the label of a row; the encoder is None if none of `encoders` stands in it.

    A method's own label may hold the separator, and so may an encoder's: the longest encoder that fits is returned.
    """
    fitting = [name for name in encoders if label.endswith(f"{SEPARATOR}{name}")]
    if not fitting:
        return label, None
    encoder = max(fitting, key=len)
    return label.removesuffix(f"{SEPARATOR}{encoder}"), encoder


def with_encoder(label: str, encoder: str) -> str:
    """Returns the label in results of a method under one of several encoders."""
    return f"{label}{SEPARATOR}{encoder}"
