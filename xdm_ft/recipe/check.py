"""YAML → typed, frozen settings. All faults are reported together, before any data is read."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from xdm_ft.algorithms import Algorithm, Setup, Solver
from xdm_ft.encoders import TextEncoder
from xdm_ft.evaluation.records import with_encoder
from xdm_ft.features import FeatureSettings
from xdm_ft.protocol.splits import AUTO, LOOKS, Protocol
from xdm_ft.recipe import components
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.method import (
    EncoderCommon,
    ListedEncoder,
    MethodCommon,
    MethodItem,
    drawn_item,
    drawn_training,
    encoder_common,
    encoder_label,
    method_names,
    split_name,
    text_faults,
    unfreeze_problem,
    with_method_overrides,
)
from xdm_ft.recipe.override_keys import keys_meant
from xdm_ft.recipe.search import TRAINING_KEYS, Search
from xdm_ft.recipe.settings import Cluster, DataCommon, Output, Recipe
from xdm_ft.recipe.text import Faults, Key, RecipeText, dotted, read_recipe
from xdm_ft.report import ReportSettings
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.runtime.settings import Block
from xdm_ft.runtime.tensors import Task
from xdm_ft.training import Training
from xdm_ft.weights.pooling import outside_text_space

logger = logging.getLogger("xdm_ft")


LONGEST = 120  # characters of a value that a message shows
LONGEST_NAME = 200  # bytes of a recipe's name
BLOCKS: dict[str, type[Block]] = {
    "protocol": Protocol,
    "features": FeatureSettings,
    "training": Training,
    "search": Search,
    "report": ReportSettings,
    "output": Output,
    "cluster": Cluster,
}
COMPONENTS: dict[str, tuple[str, type[Block]]] = {"data": ("data", DataCommon), "encoder": ("encoders", EncoderCommon)}
KEYS = [
    "name", "data", "encoder", "encoders", "protocol", "features", "methods", "training", "search", "report", "output",
    "cluster", "analyse",
]  # fmt: skip


FAULTY = Component("", object, EncoderCommon(name=""), ())  # stands for an encoder with a fault, which ends the check


def load(name: str, overrides: list[str] | None = None) -> Recipe:
    """Returns the recipe of a file or of a packaged name. Raises `UserError` with one line per fault."""
    return check(read_recipe(name, overrides or []))


def check(text: RecipeText) -> Recipe:
    """Returns the recipe of a text. Raises `UserError` with one line per fault."""
    faults = Faults(text)
    values = with_method_overrides(faults, KEYS)
    for key in values:
        if key not in KEYS:
            known = method_names(text.values.get("methods"))
            faults.add((key,), f"unknown key{keys_meant(key, text.values, KEYS, known)}")
    name = values.get("name")
    if "name" not in values:
        faults.add(("name",), "is missing; it names the run and its directory")
    elif problem := _name_problem(name):
        faults.add(("name",), problem)
    found: dict[str, Any] = {}
    found["data"] = _component(faults, ("data",), *COMPONENTS["data"], values.get("data"))
    encoders = _encoders(faults, values)
    for block, model in BLOCKS.items():
        found[block] = _block(faults, (block,), model, values.get(block, {}))
    written = _methods(faults, values.get("methods"), encoders[0] if encoders else FAULTY)
    found["analyse"] = values.get("analyse", False)
    if not isinstance(found["analyse"], bool):
        faults.add(("analyse",), f"must be true or false, given {_shown(found['analyse'])}")
    faults.raise_if_any()  # the checks across blocks need valid blocks
    found["search"] = found["search"].for_data(found["data"].name)
    methods = tuple(_without_text(under_encoder(item, encoder)) for encoder in encoders for item in written)
    for label, count in Counter(item.label for item in methods).items():
        if count > 1:
            faults.add(("encoders",), f'two rows of results have the name "{label}"; change a label')
    auto_seeds = values.get("protocol", {}).get("seeds") == AUTO
    recipe = Recipe(name=str(name), encoders=encoders, methods=methods, auto_seeds=auto_seeds, **found)
    if "seeds" not in recipe.protocol.model_fields_set:
        recipe = recipe.with_seeds(LOOKS[0] if recipe.trains_encoders else LOOKS[1])
    recipe = _without_stale_pairs(faults.text, recipe)
    check_together(faults, recipe)
    faults.raise_if_any()
    if recipe.data_common.train_augmentation is None:
        defaults = {recipe.augmentation_of(item) for item in methods if not item.is_solver} or {"none"}
        # resolved here, so that recipe.yaml and results.json contain it; null where the methods differ
        recipe = recipe.with_augmentation(defaults.pop() if len(defaults) == 1 else None)
    return recipe


def _name_problem(name: Any) -> str:
    """Returns why the recipe's name can not be the name of a run directory; "" if it can."""
    if not isinstance(name, str) or not name or not name.isprintable() or set(name) & set("/\\") or name in (".", ".."):
        return "must be a text without slashes or control characters, the name of the run directory"
    length = len(name.encode())
    return "" if length <= LONGEST_NAME else f"takes {length} bytes as a folder's name; at most {LONGEST_NAME}"


def _block(faults: Faults, key: Key, model: type[Block], values: Any) -> Block | None:
    if not isinstance(values, dict):
        faults.add(key, f"must be a block of keys, not {type(values).__name__}")
        return None
    try:
        return model.model_validate(values)
    except ValidationError as error:
        known = list(components.describe(model))
        for fault in error.errors():
            # pydantic adds the names of validator functions and the tags of alternatives to a fault's location
            place = tuple(part for part in fault["loc"] if not str(part).startswith(("function-", "tag-")))
            faults.add((*key, *place), _problem(dict(fault), place, known))
        return None


def _problem(fault: dict[str, Any], place: Key, known: list[str]) -> str:
    """Returns the text of a fault that pydantic found."""
    if fault["type"] == "extra_forbidden":
        if len(place) > 1:
            return "unknown key"
        prefixed = [key for key in known if key.endswith(f".{place[0]}")]
        return "unknown key" + (f"; write {' or '.join(prefixed)}" if prefixed else did_you_mean(str(place[0]), known))
    if fault["type"] == "missing":
        return "is needed"
    if fault["type"] == "model_type":
        return f"must be a block of keys, given {_shown(fault['input'])}"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}, given {_shown(fault['input'])}"


def _shown(value: Any) -> str:
    given = repr(value)
    return given if len(given) <= LONGEST else f"{given[:LONGEST]}…"


def _find(faults: Faults, key: Key, folder: str, name: Any) -> type[Any] | None:
    """Returns the class of the component `name`, written at `key`. If it is unknown, adds a fault and returns None."""
    try:
        return components.find(folder, str(name))
    except UserError as error:
        faults.add(key, str(error))
        return None


def _component(faults: Faults, key: Key, folder: str, common: type[Block], values: Any) -> Component | None:
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        faults.add(key, f"needs a name; known: {', '.join(components.names(folder))}")
        return None
    cls = _find(faults, (*key, "name"), folder, values["name"])
    if cls is None:
        return None
    model = components.settings_model(cls, common)
    block = _block(faults, key, model, _without_stale_keys(faults.text, key, model, values))
    own = tuple(field for field in model.model_fields if field not in common.model_fields)
    return Component(values["name"], cls, block, own) if block is not None else None


def _encoders(faults: Faults, values: dict[str, Any]) -> tuple[Component, ...]:
    """Returns the encoder, or the items of `encoders`."""
    if "encoders" not in values:
        one = _component(faults, ("encoder",), *COMPONENTS["encoder"], values.get("encoder"))
        return () if one is None else (one,)
    listed = values["encoders"]
    if "encoder" in values:
        faults.add(("encoder",), "is for one encoder, and encoders lists several; keep one of the two keys")
        return ()
    if not isinstance(listed, list) or not listed:
        faults.add(("encoders",), "must be a list of blocks like encoder, each with a name")
        return ()
    of_list = [_component(faults, ("encoders", i), "encoders", ListedEncoder, value) for i, value in enumerate(listed)]
    found = tuple(one for one in of_list if one is not None)
    labels = dict[str, int]()
    for i, one in enumerate(found):
        if labels.setdefault(encoder_label(one), i) != i:
            problem = f'two encoders have the name "{encoder_label(one)}" in results; give one of them a label'
            faults.add(("encoders", i), problem)
    return found


def under_encoder(item: MethodItem, encoder: Component) -> MethodItem:
    """Returns an entry of `methods` under an encoder, whose label the name in results gains if there may be several."""
    if not isinstance(encoder.block, ListedEncoder):
        return item if item.encoder is encoder else replace(item, encoder=encoder)
    label = encoder_label(encoder)
    return replace(item, encoder=encoder, encoder_label=label, label=with_encoder(item.label, label))


def _without_text(item: MethodItem) -> MethodItem:
    """Returns the item, marked as skipped if it needs class embeddings and its kind of encoder has no text side."""
    if not item.reads_text or issubclass(item.encoder.cls, TextEncoder):
        return item
    what = "" if item.algorithm.cls.needs_text else "with head_init: zero_shot "
    return replace(item, skipped=f"{what}needs an encoder with a text side")


def _without_stale_keys(text: RecipeText, key: Key, model: type[Block], values: dict[str, Any]) -> dict[str, Any]:
    """If an override names another component, removes the file's keys that this component does not have."""
    if (*key, "name") not in text.overridden:
        return values
    kept = {k: v for k, v in values.items() if k in model.model_fields or (*key, k) in text.overridden}
    for dropped in values.keys() - kept.keys():
        logger.info("%s: %s.%s is ignored, %s has no such key", text.origin, dotted(key), dropped, values["name"])
    return kept


def _without_stale_pairs(text: RecipeText, recipe: Recipe) -> Recipe:
    """If an override of methods or encoders leaves a pair of `report.compare` without a row, removes all pairs.

    The pairs that are left would keep other rows from a verdict.
    """
    compare = recipe.report.compare
    whole = all({*pair} <= {*recipe.labels} for pair in compare)
    if whole or not text.overridden & {("methods",), ("encoders",)} or text.is_overridden(("report", "compare")):
        return recipe
    logger.info("%s: report.compare is ignored, as it names rows that there are no more", text.origin)
    return replace(recipe, report=recipe.report.model_copy(update={"compare": ()}))


def _methods(faults: Faults, values: Any, encoder: Component) -> tuple[MethodItem, ...]:
    """Returns the entries of `methods`, under this encoder."""
    if not isinstance(values, list) or not values:
        faults.add(("methods",), "must be a list of at least one method, e.g. [erm, xdomainmix]")
        return ()
    items = [_method(faults, i, value, encoder) for i, value in enumerate(values)]
    labels = dict[str, int]()
    for i, item in enumerate(items):
        if item is not None and labels.setdefault(item.label, i) != i:
            faults.add(("methods", i), f'two methods have the name "{item.label}" in results; give one of them a label')
    return tuple(item for item in items if item is not None)


def _method(faults: Faults, place: int, value: Any, encoder: Component) -> MethodItem | None:
    key: Key = ("methods", place)
    values = {"name": value} if isinstance(value, str) else value
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        faults.add(key, "must be the name of a method, or a block with a name and settings")
        return None
    algorithm_name, add_ons = split_name(values["name"])
    cls = _find_algorithm(faults, (*key, "name"), algorithm_name)
    added = _find_add_ons(faults, (*key, "name"), add_ons)
    if cls is not None and issubclass(cls, Solver):
        values = {"head": cls.head_kind, **values}
    head_name = str(values.get("head", MethodCommon.model_fields["head"].default))
    head = _find(faults, (*key, "head"), "heads", head_name)
    if cls is None or added is None or head is None:
        return None
    if added and not issubclass(cls, Algorithm):
        problem = f"{algorithm_name} takes no gradient steps, so +{add_ons[0]} has no effect; leave +{add_ons[0]} out"
        faults.add((*key, "name"), problem)
        return None
    model = components.settings_model(cls, MethodCommon)
    for name, part in (*added.values(), (head_name, head)):
        model = components.settings_model(part, model, prefix=f"{name}.")
    if cls.needs_text and issubclass(cls, Algorithm):
        values = {"head_init": "zero_shot", **values}
    block = _block(faults, key, model, values)
    if not isinstance(block, MethodCommon):
        return None
    parts = {
        folder: Component(name, part, block, tuple(components.settings_model(part).model_fields), prefix=f"{name}.")
        for folder, (name, part) in (added | {"heads": (head_name, head)}).items()
    }
    return MethodItem(
        label=block.label or block.name,
        head_init=block.head_init,
        algorithm=Component(algorithm_name, cls, block, tuple(components.settings_model(cls).model_fields)),
        head=parts["heads"],
        sharpness=parts.get("sharpness"),
        averaging=parts.get("averaging"),
        block=block,
        place=place,
        encoder=encoder,
    )


def _find_algorithm(faults: Faults, key: Key, name: str) -> type[Any] | None:
    """Returns the class of the algorithm `name`, written at `key`. If it is unknown, adds a fault and returns None."""
    algorithms = components.names("algorithms")
    if name in algorithms:
        return components.find("algorithms", name)
    alone = [add_on for folder in components.ADD_ONS for add_on in components.names(folder)]  # sam means erm+sam
    remedy = f"; several are a list: [{name}]" if "," in name else did_you_mean(name, [*algorithms, *alone])
    faults.add(key, f'no "{name}" in algorithms{remedy}')
    return None


def _find_add_ons(faults: Faults, key: Key, names: list[str]) -> dict[str, tuple[str, type[Any]]] | None:
    """Returns {folder: (name, class)} of the add-ons at `key`. If one is wrong, adds a fault and returns None."""
    known = {name: folder for folder in components.ADD_ONS for name in components.names(folder)}
    found: dict[str, tuple[str, type[Any]]] = {}
    for name in names:
        folder = known.get(name)
        if folder is None:
            faults.add(key, f'no "{name}" in {" or ".join(components.ADD_ONS)}{did_you_mean(name, list(known))}')
            return None
        if folder in found:
            faults.add(key, f"+{found[folder][0]} and +{name} can not be combined; keep one")
            return None
        found[folder] = (name, components.find(folder, name))
    return found


# keys that other blocks depend on
PROTOCOL: Key = ("protocol", "name")
TRAINABLE: Key = ("encoder", "trainable")
METHODS: Key = ("methods",)
STEPS: Key = ("training", "steps")
SAMPLER: Key = ("training", "sampler")
LOSS_AVERAGE: Key = ("training", "loss_average")
SPACE: Key = ("search", "space")
WHOLE_BATCH = (TRAINABLE, SAMPLER, LOSS_AVERAGE, ("training", "accumulation"), ("training", "class_weights"))


def check_together(faults: Faults, recipe: Recipe) -> None:
    """Adds the faults that concern several blocks."""
    training, protocol = recipe.training, recipe.protocol
    if (training.steps is None) == (training.epochs is None):
        both = "both steps and epochs are given; keep one" if training.steps else "give steps or epochs"
        faults.add(("training", "epochs" if training.steps else "steps"), both)
    if training.epochs is not None and training.sampler != "pooled":
        faults.add(
            ("training", "epochs"),
            f"an epoch needs sampler: pooled; {training.sampler} draws with replacement, give steps",
            SAMPLER,
        )
    if protocol.name == "official" and protocol.test_domains is not None:
        faults.add(("protocol", "test_domains"), "is only for leave_one_domain_out; leave it out", PROTOCOL)
    if protocol.final_fit and protocol.selection == "oracle":
        problem = "needs an unbiased estimate; selection: oracle has none, use train_val"
        faults.add(("protocol", "final_fit"), problem, ("protocol", "selection"))
    _check_report(faults, recipe)
    _check_encoders(faults, recipe)
    if protocol.name == "official" and protocol.split_rule != "stratified":
        problem = "the official split defines the validation images; leave it out"
        faults.add(("protocol", "split_rule"), problem, PROTOCOL)
    if not recipe.trains_encoders:
        for key in ("mixed_precision", "accumulation", "layer_decay"):
            if getattr(training, key) not in (Training.model_fields[key].default, "no"):
                problem = "has no effect with a frozen encoder; leave it out (for precision set features.precision)"
                faults.add(("training", key), problem, TRAINABLE)
    if training.compile and all(item.trainable is False and _has_no_compiled_step(item) for item in recipe.methods):
        problem = "has no effect on these methods, which have kernels of their own or take no steps; leave it out"
        faults.add(("training", "compile"), problem)
    if training.steps is not None and training.schedule.warmup_steps >= training.steps:
        problem = f"{training.schedule.warmup_steps} is not below training.steps: {training.steps}; lower it"
        faults.add(("training", "schedule", "warmup_steps"), problem, STEPS)
    for item in recipe.own_methods:
        if item.averaging is not None and training.patience is not None:
            problem = f"+{item.averaging.name} decides itself which steps it averages; leave training.patience out"
            faults.add(("methods", item.place), problem, ("training", "patience"))
    if training.amsgrad and training.optimizer == "sgd":
        problem = "is only for adam and adamw; leave it out, or use one of them"
        faults.add(("training", "amsgrad"), problem, ("training", "optimizer"))
    _check_views(faults, recipe)
    _check_search(faults, recipe)
    for item in recipe.methods:
        _check_method(faults, ("methods", item.place), item, recipe)


def _check_report(faults: Faults, recipe: Recipe) -> None:
    """Adds the faulty pairs of `report.compare`, and looks that could have no end."""
    if recipe.auto_seeds and recipe.report.margin is None:
        problem = "auto needs report.margin, to know when a row is settled; set it, e.g. 1.0, or give a number of seeds"
        faults.add(("protocol", "seeds"), problem, ("report", "margin"))
    rows, labels = {item.label for item in recipe.methods}, recipe.labels
    seen = set[frozenset[str]]()
    for place, pair in enumerate(recipe.report.compare):
        key: Key = ("report", "compare", place)
        known = [label for label in pair if label in labels]
        for label in pair:
            if label not in known:
                faults.add(key, f'no row "{label}"{did_you_mean(label, labels)}', METHODS)
        if len(known) == 2 and (pair[0] in rows) != (pair[1] in rows):
            problem = f"{pair[0]} and {pair[1]}: one of the two names an encoder; write METHOD @ ENCODER for both"
            faults.add(key, f"{problem}, or for none")
        elif pair[0] == pair[1]:
            faults.add(key, f"compares {pair[0]} with itself; name two rows")
    for first, second in recipe.declared:
        if (both := frozenset((first, second))) in seen:
            faults.add(("report", "compare"), f"{first} and {second} are compared twice; keep one of the pairs")
        seen.add(both)


def _has_no_compiled_step(item: MethodItem) -> bool:
    return item.is_solver or item.algorithm.cls.has_kernels


def _check_encoders(faults: Faults, recipe: Recipe) -> None:
    """Adds the faults of what trains in the encoders, and of what is cached below it."""
    steps = recipe.training.steps
    for place, encoder in enumerate(recipe.encoders):
        key: Key = ("encoders", place) if recipe.several_encoders else ("encoder",)
        items = [item for item in recipe.methods if item.encoder is encoder]
        unfreeze_at = encoder_common(encoder).unfreeze_at
        if unfreeze_at and all(item.trainable is False for item in items):
            problem = "has no effect with a frozen encoder; leave it out, or set trainable: true"
            faults.add((*key, "unfreeze_at"), problem, TRAINABLE)
        elif steps is not None and unfreeze_at >= steps:
            faults.add((*key, "unfreeze_at"), unfreeze_problem(unfreeze_at, steps), STEPS)
    if recipe.features.cut != "auto" and not any(item.is_cut for item in recipe.methods):
        problem = "is for a partly trained encoder; leave it out, or set trainable: {blocks: k}"
        faults.add(("features", "cut"), problem, TRAINABLE)
    for item in recipe.own_methods:
        if item.is_solver and item.block.trainable not in (None, False):
            problem = f"{item.label} computes a head from features of the frozen encoder; leave it out"
            faults.add(("methods", item.place, "trainable"), problem)
        under_each = [other for other in recipe.methods if other.place == item.place]
        if item.block.encoder_lr is not None and all(other.trainable is False for other in under_each):
            problem = f"{item.label} trains no encoder; leave it out, or set it for a row with trainable, by its label"
            faults.add(("methods", item.place, "encoder_lr"), problem, TRAINABLE)


def _check_views(faults: Faults, recipe: Recipe) -> None:
    """Adds the faults of `features.views`, which needs an augmentation and a method that trains on cached features."""
    given, views = recipe.data_common.train_augmentation, recipe.features.views
    augmentation, count = ("data", "train_augmentation"), ("features", "views")
    trained = [item for item in recipe.methods if not item.is_solver]
    on_images = [item for item in trained if recipe.trains_on_images(item)]
    if not on_images and not views and given not in (None, "none"):
        what = "a frozen encoder" if not any(item.is_cut for item in trained) else "cached activations"
        problem = f"has no effect with {what}: each image is computed only once"
        remedy = "leave it out, or set features.views, or trainable: true"
        if any(item.is_cut for item in trained):
            remedy += ", or features.cut: compute"
        faults.add(augmentation, f"{problem}; {remedy}", TRAINABLE, count)
    if views and trained and len(on_images) == len(trained):
        problem = "has no effect with encoder.trainable: true, which augments at every step; leave it out"
        faults.add(count, problem, TRAINABLE)
    elif views and not trained:
        problem = "has no effect on methods without gradient steps, which read the plain images"
        faults.add(count, f"{problem}; leave it out", METHODS)
    elif views and recipe.train_augmentation == "none":
        own = "" if given else ", the default of this data set,"
        problem = f"none{own} gives no views to cache; set domainbed, or leave features.views out"
        faults.add(augmentation, problem, count)


def _check_search(faults: Faults, recipe: Recipe) -> None:
    """Adds faulty keys of the search space, and the first trial whose settings are not allowed."""
    search, items = recipe.search, recipe.methods
    parts = {part.name: part for item in items for part in item.parts}
    known = [*TRAINING_KEYS, *(f"{name}.{key}" for name, part in parts.items() for key in part.own)]
    for key in search.space:
        if key not in known:
            problem = f"is no searchable hyper-parameter of this recipe's methods{did_you_mean(key, known)}"
            faults.add(("search", "space", key), problem, METHODS)
        elif key in ("encoder_lr", "layer_decay") and not recipe.trains_encoders:
            faults.add(("search", "space", key), "has no effect with a frozen encoder; leave it out", TRAINABLE)
        elif key in ("momentum", "beta1", "beta2") and (key == "momentum") != (recipe.training.optimizer == "sgd"):
            problem = f"has no effect on {recipe.training.optimizer}; leave it out"
            faults.add(("search", "space", key), problem, ("training", "optimizer"))
    averaging = [item.averaging.name for item in items if item.averaging is not None]
    if averaging and "patience" in search.distributions:
        problem = f"+{averaging[0]} decides itself which steps it averages; leave it out"
        faults.add(("search", "space", "patience"), problem, METHODS)
    if search.space and search.trials == 1:
        problem = "1 uses no value of search.space, as the first trial draws none; raise it"
        faults.add(("search", "trials"), problem, SPACE)
    if search.preset != "none" and search.trials == 1:
        problem = f"1 uses no value of the preset {search.preset}, as the first trial draws none; raise it"
        faults.add(("search", "trials"), problem, ("search", "preset"))
    if search.trials > 1 and not search.distributions:
        problem = f"{search.trials} would train each model {search.trials} times with the same settings"
        remedy = "set search.preset (frozen or domainbed), or ranges in search.space"
        faults.add(("search", "trials"), f"{problem}; {remedy}", ("search", "preset"), SPACE)
    for trial in range(search.trials):
        try:
            draws = [recipe.search_of(item).drawn(trial) for item in items]
            for item, values in zip(items, draws, strict=True):
                drawn_training(recipe.training, item, values)
            drawn = [drawn_item(item, values) for item, values in zip(items, draws, strict=True)]
        except ValidationError as error:
            fault = error.errors()[0]
            problem = f"trial {trial} draws {'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
            faults.add(SPACE, problem)
            return  # one faulty trial is enough: thousands may follow
        for item in drawn:
            if item in items or item.is_solver:  # items without drawn settings are checked by _check_method
                continue
            try:
                reason = _parts_reason(checked_algorithm(item, recipe), item, recipe)
            except UserError as error:
                reason = str(error)
            if reason:
                faults.add(SPACE, f"trial {trial} of {item.label}: {reason}", *WHOLE_BATCH)
                return


def checked_algorithm(item: MethodItem, recipe: Recipe) -> Algorithm:
    """Builds the method for two classes, two domains and two features, so that it checks its own settings."""
    # with epochs the number of steps is not known before the data; the plan checks these settings again
    steps, task = recipe.training.steps or sys.maxsize, Task(("a", "b"), ("a", "b"))
    setup = Setup(task, width=2, steps=steps, seed=0, loss_average=recipe.training.loss_average)
    algorithm: Algorithm = item.algorithm.build(setup)
    return algorithm


def _parts_reason(algorithm: Algorithm, item: MethodItem, recipe: Recipe) -> str:
    """Returns why the method can not train on batches in parts (accumulation, several processes); "" if it can."""
    training, processes = recipe.training, int(os.environ.get("WORLD_SIZE", "1"))
    if item.trainable is False or processes * training.accumulation == 1:
        return ""
    adds_up = training.class_weights == "none" and algorithm.parts_add_up(training.sampler == "pooled")
    if algorithm.loss_over == "part" and not adds_up:
        return (
            "partners: local averages the loss over each part of a batch, and these means do not add up to the batch's "
            "with class_weights or, in pooled batches, loss_average: domain; use partners: global"
        )
    return algorithm.parts_reason


def _check_method(faults: Faults, key: Key, item: MethodItem, recipe: Recipe) -> None:
    if item.sharpness is not None and item.trainable is not False and recipe.training.mixed_precision == "fp16":
        problem = f"fp16 scales the loss, which makes the second pass of {item.sharpness.name} wrong"
        faults.add(("training", "mixed_precision"), f"{problem}; use bf16 or no with {item.label}", key)
    if not item.is_solver:
        try:
            algorithm = checked_algorithm(item, recipe)
        except UserError as error:
            faults.add(key, str(error), key, STEPS, LOSS_AVERAGE)
        else:
            if item.trainable is False and algorithm.frozen_reason:
                faults.add(key, f"{item.label}: {algorithm.frozen_reason}", TRAINABLE)
            if encoder_common(item.encoder).unfreeze_at and not any(p.requires_grad for p in algorithm.parameters()):
                problem = "its class head is fixed, so that no step can train the head alone; leave unfreeze_at out"
                faults.add(key, f"{item.label}: {problem}", ("encoder", "unfreeze_at"))
            if item.is_cut and algorithm.cut_reason:
                faults.add(key, f"{item.label}: {algorithm.cut_reason}", TRAINABLE)
            if recipe.training.sampler == "pooled" and algorithm.pooled_reason:
                faults.add(key, f"{item.label}: {algorithm.pooled_reason}", SAMPLER)
            if reason := _parts_reason(algorithm, item, recipe):
                faults.add(key, f"{item.label}: {reason}", key, *WHOLE_BATCH)
    if item.block.normalize and item.trainable is not False:
        problem = "is for cached features, but this method trains its encoder; set encoder.normalize: true"
        faults.add((*key, "normalize"), problem, TRAINABLE)
    normalized = item.reads_normalized or getattr(item.encoder.block, "normalize", False)
    only_skipped = all(other.skipped is not None for other in recipe.methods)
    for setting, problem in text_faults(item, normalized) if item.skipped is None or only_skipped else ():
        faults.add((*key, *setting), problem, ("encoder", "name"), ("encoder", "normalize"))
    elsewhere = outside_text_space(getattr(item.encoder.block, "pooling", None))
    if item.reads_text and elsewhere:
        faults.add(key, f"{item.label} needs class embeddings, but {elsewhere}", ("encoder", "pooling"))
