"""YAML → typed, frozen settings. All faults are found at once, before any data is read."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from typing import Any

import yaml
from pydantic import ValidationError

from xdm_ft import components
from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.blocks import Block
from xdm_ft.data import Augmentation
from xdm_ft.data.loading.splits import Protocol
from xdm_ft.encoders import TextEncoder
from xdm_ft.errors import UserError, did_you_mean
from xdm_ft.features import FeatureSettings
from xdm_ft.recipe_blocks import (
    Component,
    DataCommon,
    EncoderCommon,
    MethodCommon,
    MethodItem,
    Output,
    drawn_item,
    drawn_training,
    unfreezes_too_late,
    views_faults,
)
from xdm_ft.recipe_text import Key, RecipeText, dotted, read_recipe
from xdm_ft.tensors import Task
from xdm_ft.training import Training
from xdm_ft.training.search import TRAINING_KEYS, Search

logger = logging.getLogger("xdm_ft")


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


BLOCKS: dict[str, type[Block]] = {
    "protocol": Protocol,
    "features": FeatureSettings,
    "training": Training,
    "search": Search,
    "output": Output,
}
COMPONENTS: dict[str, tuple[str, type[Block]]] = {"data": ("data", DataCommon), "encoder": ("encoders", EncoderCommon)}
BEHIND = ("sharpness", "averaging")  # folders of what a method's name may have behind a +
KEYS = ["name", *COMPONENTS, "protocol", "features", "methods", "training", "search", "output"]


class _Faults:
    """Collects every fault with its place, so that all are shown at once."""

    def __init__(self, text: RecipeText) -> None:
        self.text, self.found = text, dict[str, None]()

    def add(self, key: Key, problem: str) -> None:
        self.found[f"{self.text.where(key)}: {dotted(key)}: {problem}"] = None

    def raise_if_any(self) -> None:
        if self.found:
            raise UserError("\n".join(self.found))


def load(name: str, overrides: list[str] | None = None) -> Recipe:
    """The checked recipe. Raises `UserError` with one line per fault."""
    return check(read_recipe(name, overrides or []))


def check(text: RecipeText) -> Recipe:
    faults = _Faults(text)
    values = text.values
    for key in values:
        if key not in KEYS:
            faults.add((key,), f"unknown key{did_you_mean(key, KEYS)}")
    name = values.get("name")
    if not isinstance(name, str) or not name or set(name) & set("/\\\0") or name in (".", ".."):
        faults.add(("name",), "a recipe needs a name, a text without slashes; it names the run directory")
    found: dict[str, Any] = {}
    for block, (folder, common) in COMPONENTS.items():
        found[block] = _component(faults, (block,), folder, common, values.get(block))
    for block, model in BLOCKS.items():
        found[block] = _block(faults, (block,), model, values.get(block, {}))
    found["methods"] = _methods(faults, values.get("methods"))
    faults.raise_if_any()
    recipe = Recipe(name=str(name), **found)
    _check_together(faults, recipe)
    faults.raise_if_any()
    augmented = recipe.data.block.model_copy(update={"train_augmentation": recipe.train_augmentation})
    return replace(recipe, data=replace(recipe.data, block=augmented))


def _block(faults: _Faults, key: Key, model: type[Block], values: Any) -> Block | None:
    if not isinstance(values, dict):
        faults.add(key, f"must be a block of keys, not {values!r}")
        return None
    try:
        return model.model_validate(values)
    except ValidationError as error:
        known = list(components.describe(model))
        for fault in error.errors():
            place = tuple(part for part in fault["loc"] if not str(part).startswith("function-"))
            faults.add((*key, *place), _sentence(dict(fault), place, known))
        return None


def _sentence(fault: dict[str, Any], place: Key, known: list[str]) -> str:
    if fault["type"] == "extra_forbidden":
        return f"unknown key{did_you_mean(str(place[-1]), known) if len(place) == 1 else ''}"
    if fault["type"] == "missing":
        return "is needed"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}, given {fault['input']!r}"


def _named(faults: _Faults, key: Key, folder: str, name: Any) -> type[Any] | None:
    try:
        return components.find(folder, str(name))
    except UserError as error:
        faults.add((*key, "name"), str(error))
        return None


def _component(faults: _Faults, key: Key, folder: str, common: type[Block], values: Any) -> Component | None:
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        faults.add(key, f"needs a name; known: {', '.join(components.names(folder))}")
        return None
    cls = _named(faults, key, folder, values["name"])
    if cls is None:
        return None
    model = components.settings_model(cls, common)
    block = _block(faults, key, model, _without_leftovers(faults.text, key, model, values))
    own = tuple(field for field in model.model_fields if field not in common.model_fields)
    return Component(values["name"], cls, block, own) if block is not None else None


def _without_leftovers(text: RecipeText, key: Key, model: type[Block], values: dict[str, Any]) -> dict[str, Any]:
    """Where the command line names another component, the file's keys that only the former one knows are dropped."""
    if (*key, "name") not in text.overridden:
        return values
    kept = {k: v for k, v in values.items() if k in model.model_fields or (*key, k) in text.overridden}
    for dropped in values.keys() - kept.keys():
        logger.info("%s: %s.%s does not apply to %s and is left out", text.origin, dotted(key), dropped, values["name"])
    return kept


def _methods(faults: _Faults, values: Any) -> tuple[MethodItem, ...]:
    if not isinstance(values, list) or not values:
        faults.add(("methods",), "a recipe needs a list of at least one method, e.g. [erm, xdomainmix]")
        return ()
    items = [_method(faults, ("methods", i), value) for i, value in enumerate(values)]
    labels = dict[str, int]()
    for i, item in enumerate(items):
        if item is not None and labels.setdefault(item.label, i) != i:
            faults.add(
                ("methods", i), f'two methods are called "{item.label}" in results; give one a label: of its own'
            )
    return tuple(item for item in items if item is not None)


def split_name(name: str) -> tuple[str, list[str]]:
    """`xdomainmix+sam+swad` → (xdomainmix, [sam, swad]); what goes behind a method, alone (`sam`), goes behind erm."""
    first, *behind = name.split("+")
    alone = first not in components.names("algorithms") and any(first in components.names(f) for f in BEHIND)
    return ("erm", [first, *behind]) if alone else (first, behind)


def _method(faults: _Faults, key: Key, value: Any) -> MethodItem | None:
    values = {"name": value} if isinstance(value, str) else value
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        faults.add(key, "a method is a name, or a block with a name: and settings")
        return None
    algorithm_name, behind = split_name(values["name"])
    cls = _named(faults, key, "algorithms", algorithm_name)
    added = _behind(faults, key, behind)
    if cls is None or added is None:
        return None
    if added and not issubclass(cls, Algorithm):
        faults.add((*key, "name"), f"{algorithm_name} is not trained by gradient steps, so +{behind[0]} has no meaning")
        return None
    model = components.settings_model(cls, MethodCommon)
    own = {"algorithms": tuple(field for field in model.model_fields if field not in MethodCommon.model_fields)}
    for folder, (_, part) in added.items():
        before, model = model, components.settings_model(part, model)
        own[folder] = tuple(field for field in model.model_fields if field not in before.model_fields)
    if cls.needs_text and issubclass(cls, Algorithm):
        values = {"head_init": "zero_shot", **values}
    block = _block(faults, key, model, values)
    if not isinstance(block, MethodCommon):
        return None
    parts = {folder: Component(name, part, block, own[folder]) for folder, (name, part) in added.items()}
    return MethodItem(
        label=block.label or block.name,
        head_init=block.head_init,
        algorithm=Component(algorithm_name, cls, block, own["algorithms"]),
        sharpness=parts.get("sharpness"),
        averaging=parts.get("averaging"),
        block=block,
    )


def _behind(faults: _Faults, key: Key, names: list[str]) -> dict[str, tuple[str, type[Any]]] | None:
    """Folder → name and class of what stands behind the algorithm's name; None where it is faulty."""
    known = {name: folder for folder in BEHIND for name in components.names(folder)}
    found: dict[str, tuple[str, type[Any]]] = {}
    for name in names:
        folder = known.get(name)
        if folder is None:
            faults.add((*key, "name"), f'no "{name}" in {" or ".join(BEHIND)}{did_you_mean(name, list(known))}')
            return None
        if folder in found:
            faults.add((*key, "name"), f"+{found[folder][0]} and +{name} do not go together; keep one")
            return None
        found[folder] = (name, components.find(folder, name))
    return found


def _check_together(faults: _Faults, recipe: Recipe) -> None:
    """What no block can see alone."""
    training, protocol, augmentation = recipe.training, recipe.protocol, recipe.train_augmentation
    if (training.steps is None) == (training.epochs is None):
        both = "both steps and epochs are given; keep one" if training.steps else "give steps or epochs"
        faults.add(("training", "epochs" if training.steps else "steps"), both)
    if training.epochs is not None and training.sampler != "pooled":
        faults.add(
            ("training", "epochs"),
            f"an epoch needs sampler: pooled; {training.sampler} draws with replacement, give steps",
        )
    if protocol.name == "official" and protocol.test_domains is not None:
        faults.add(("protocol", "test_domains"), "only leave_one_domain_out chooses test domains; leave it out")
    if protocol.final_fit and protocol.selection == "oracle":
        faults.add(("protocol", "final_fit"), "ships a model with its estimate, and what oracle tells is none")
    unfreeze_at = recipe.encoder_common.unfreeze_at
    if unfreeze_at and not recipe.trainable:
        faults.add(("encoder", "unfreeze_at"), "has no meaning with a frozen encoder; leave it out, or set trainable")
    elif training.steps is not None and unfreeze_at >= training.steps:
        faults.add(("encoder", "unfreeze_at"), unfreezes_too_late(unfreeze_at, training.steps))
    if protocol.name == "official" and protocol.split_rule != "stratified":
        faults.add(("protocol", "split_rule"), "the official split decides what validates; leave it out")
    if not recipe.trainable:
        for key, idle in (("mixed_precision", "no"), ("accumulation", 1)):
            if getattr(training, key) != idle:
                problem = "has no meaning with a frozen encoder; leave it out (features.precision exists)"
                faults.add(("training", key), problem)
    for place, problem in views_faults(
        recipe.features, recipe.data_common, augmentation, recipe.trainable, recipe.methods
    ):
        faults.add(place, problem)
    _check_search(faults, recipe)
    has_text = issubclass(recipe.encoder.cls, TextEncoder)
    for i, item in enumerate(recipe.methods):
        _check_method(faults, ("methods", i), item, recipe, has_text)


def _check_search(faults: _Faults, recipe: Recipe) -> None:
    """The keys of the space, and that every draw makes settings that their blocks take."""
    search, items = recipe.search, recipe.methods
    parts = {part.name: part for item in items for part in item.parts}
    known = [*TRAINING_KEYS, *(f"{name}.{key}" for name, part in parts.items() for key in part.own)]
    for key in search.space:
        if key not in known:
            problem = f"no hyper-parameter of this recipe's methods that can be searched{did_you_mean(key, known)}"
            faults.add(("search", "space", key), problem)
        elif key == "encoder_lr" and not recipe.trainable:
            faults.add(("search", "space", key), "has no meaning with a frozen encoder; leave it out")
    if search.space and search.trials == 1:
        faults.add(("search", "trials"), "1 trial draws nothing from search.space; raise it")
    if search.preset != "none" and search.trials == 1:
        faults.add(("search", "trials"), f"1 trial draws nothing from the preset {search.preset}; raise it")
    for trial in range(search.trials):
        try:
            drawn_training(recipe.training, search.drawn(trial))
            for item in items:
                drawn_item(item, search.drawn(trial))
        except ValidationError as error:
            fault = error.errors()[0]
            problem = f"trial {trial} draws {'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
            faults.add(("search", "space"), problem)
            return


def _check_method(faults: _Faults, key: Key, item: MethodItem, recipe: Recipe, has_text: bool) -> None:
    if item.sharpness is not None and recipe.training.mixed_precision == "fp16":
        problem = f"fp16 scales the loss, which falsifies the second pass of {item.sharpness.name}"
        faults.add(("training", "mixed_precision"), f"{problem}; use bf16 or no with {item.label}")
    if not item.is_solver:
        # two classes, two domains and two features are enough for the algorithm to check its own settings
        setup = Setup(Task(("a", "b"), ("a", "b")), width=2, steps=recipe.training.steps or sys.maxsize, seed=0)
        try:
            algorithm = item.algorithm.build(setup)
        except UserError as error:
            faults.add(key, str(error))
        else:
            frozen_reason = "" if recipe.trainable else algorithm.frozen_reason
            pooled_reason = algorithm.pooled_reason if recipe.training.sampler == "pooled" else ""
            for reason in filter(None, (frozen_reason, pooled_reason)):
                faults.add(key, f"{item.label}: {reason}")
    needs_text = item.algorithm.cls.needs_text
    if needs_text and not has_text:
        faults.add(key, f"{item.label} needs an encoder with a text side; use encoder.name: open_clip")
    elif item.head_init == "random" and needs_text and not item.is_solver:
        faults.add((*key, "head_init"), f"{item.label} starts from the class embeddings; leave head_init out")
    elif item.head_init == "zero_shot":
        if item.is_solver:
            faults.add((*key, "head_init"), f"{item.label} does not start from a head; leave head_init out")
        elif not has_text:
            faults.add((*key, "head_init"), "zero_shot needs an encoder with a text side; use encoder.name: open_clip")
        elif not getattr(recipe.encoder.block, "normalize", False):
            what = item.label if needs_text else "zero_shot"
            faults.add(
                key,
                f"{what} starts from class embeddings, which fit L2-normalised features; set encoder.normalize: true",
            )
