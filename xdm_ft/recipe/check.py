"""Recipe text → checked recipe. All faults are reported together, before any data is read."""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, get_args

from pydantic import ValidationError

from xdm_ft.algorithms import Algorithm, Setup, Solver
from xdm_ft.augmentations import NO_AUGMENTATION
from xdm_ft.blocks import outside_text_space
from xdm_ft.core import ORACLE, Task
from xdm_ft.encoders import TextEncoder
from xdm_ft.features import FeatureSettings
from xdm_ft.features.given import GIVEN, NO_IMAGES, GivenFeatures, GivenText
from xdm_ft.images.decode import EncodedImages
from xdm_ft.protocol.splits import ENCODER_SEEDS, SEEDS, Protocol
from xdm_ft.recipe import components
from xdm_ft.recipe.components import ADD_ONS, Component
from xdm_ft.recipe.method import (
    EncoderCommon,
    ListedEncoder,
    MethodCommon,
    MethodItem,
    draw_item,
    draw_training,
    encoder_common,
    encoder_label,
    items_with_overrides,
    method_names,
    split_name,
    unfreeze_problem,
    with_encoder,
)
from xdm_ft.recipe.search import METHOD_KEYS, TRAINING_KEYS, Search
from xdm_ft.recipe.settings import Cluster, DataCommon, Output, Recipe, ReportSettings
from xdm_ft.recipe.text import KEYS, Faults, Key, RecipeText, join_key, read_recipe, recipe_keys
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.runtime.settings import Block
from xdm_ft.training import Training

logger = logging.getLogger("xdm_ft")
IN_QUOTES = "write it in quotes, as YAML reads no, 010, 12:30 and dates as other values"
IN_SHELL = "write it in quotes, and these in quotes for the shell: 'KEY=\"010\"'"
MAX_UNKNOWN = 50  # keys of the recipe, or faults of a block, that are reported: looking for the key meant takes long
MAX_SHOWN = 120  # characters of a value that a message shows
MAX_NAME = 200  # bytes of a recipe's name
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
WHOLE_BATCH = (
    "encoder.trainable", "training.sampler", "training.loss_average", "training.accumulation", "training.class_weights"
)  # fmt: skip
FAULTY = Component("", object, EncoderCommon(name=""), ())  # stands for an encoder with a fault, which ends the check
GIVEN_FEATURES = Component(GIVEN, GivenFeatures, EncoderCommon(name=GIVEN), ())  # of data without images
GIVEN_TEXT = replace(GIVEN_FEATURES, cls=GivenText)


def load(name: str, overrides: list[str] | None = None) -> Recipe:
    """Returns the recipe of a file or of a packaged name. Raises `UserError` with one line per fault."""
    return check(read_recipe(name, overrides or []))


def check(text: RecipeText) -> Recipe:
    """Returns the recipe of a text. Raises `UserError` with one line per fault."""
    faults = Faults(text)
    recipe = _of_valid_blocks(faults)
    _check_together(faults, recipe)
    faults.raise_if_any()
    if recipe.data_common.train_augmentation is None:
        unset = (item for item in recipe.methods if not item.is_solver and item.block.train_augmentation is None)
        defaults = {*map(recipe.augmentation_of, unset)} or {NO_AUGMENTATION}
        # resolved here, so that recipe.yaml and results.json contain it; null where the methods differ
        recipe = recipe.with_augmentation(defaults.pop() if len(defaults) == 1 else None)
    return recipe


def read_written(text: RecipeText) -> Recipe:
    """Returns the recipe of a text that `check` has resolved, as a run keeps it, without building its methods.

    Raises `UserError` if this version lacks what the text names, such as a method whose file is gone.
    """
    return _of_valid_blocks(Faults(text))


def _of_valid_blocks(faults: Faults) -> Recipe:
    """Returns the recipe whose blocks are valid, each alone. Raises `UserError`."""
    text = faults.text
    items, unknown = items_with_overrides(faults)
    values = text.values | ({} if items is None else {"methods": items})
    unknown = [*dict.fromkeys([*(key for key in values if key not in KEYS), *unknown])]
    for key in unknown[:MAX_UNKNOWN]:
        faults.add((key,), f"unknown key{_keys_meant(key, text.values)}")
    if more := len(unknown[MAX_UNKNOWN:]):
        faults.add((unknown[MAX_UNKNOWN],), f"unknown key, as are {more} in all from here; remove them")
    name = values.get("name")
    if "name" not in values:
        faults.add("name", "is missing; it names the run and its directory")
    elif not isinstance(name, str) or not name.isprintable() or set(name) & set("/\\") or name in ("", ".", ".."):
        problem = "must be a text without slashes or control characters, the name of the run directory"
        faults.add("name", f"{problem}{f'; {IN_QUOTES}' if not isinstance(name, str | list | dict) else ''}")
    elif (length := len(name.encode())) > MAX_NAME:
        faults.add("name", f"is {length} bytes long as a folder's name; use at most {MAX_NAME}")
    data = _component(faults, ("data",), *COMPONENTS["data"], values.get("data"))
    given = None
    if data is not None and not data.cls.has_images:
        given = GIVEN_FEATURES if getattr(data.block, "class_embeddings", None) is None else GIVEN_TEXT
    encoders = _encoders(faults, values, given)
    blocks: dict[str, Any] = {"data": data}
    for key, model in BLOCKS.items():
        blocks[key] = _block(faults, (key,), model, values.get(key, {}))
    written = _methods(faults, values.get("methods"), encoders[0] if encoders else FAULTY)
    flags = {key: values.get(key, False) for key in ("analyse", "label_curve")}
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            faults.add(key, f"must be true or false, given {_show(flag)}")
    faults.raise_if_any()  # the checks across blocks need valid blocks

    if not blocks["data"].cls.has_images and "precision" not in blocks["features"].model_fields_set:
        blocks["features"] = blocks["features"].model_copy(update={"precision": "fp32"})  # whatever a GPU computes in
    blocks["search"] = blocks["search"].for_data(blocks["data"].name)
    methods = tuple(_under_encoder(item, encoder) for encoder in encoders for item in written)
    recipe = Recipe(str(name), encoders=encoders, methods=methods, **flags, **blocks)
    if "seeds" not in recipe.protocol.model_fields_set:
        recipe = recipe.with_seeds(ENCODER_SEEDS if recipe.trains_encoders else SEEDS)
    complete = all({*pair} <= {*recipe.labels} for pair in recipe.report.compare)
    rows_changed = text.overridden & {("methods",), ("encoders",)}
    if rows_changed and not complete and not text.is_overridden(("report", "compare")):
        # all pairs: those that are left would keep other rows from a verdict
        logger.info("%s: report.compare is ignored, as it names rows that this run does not have", text.origin)
        recipe = replace(recipe, report=recipe.report.model_copy(update={"compare": ()}))
    return recipe


def known_keys() -> dict[str, list[str]]:
    """Returns the keys that overrides can set, as `recipe_keys` reads them: of all blocks and of every component."""
    models = BLOCKS | {name: common for name, (_, common) in COMPONENTS.items()} | {"methods": MethodCommon}
    keys = {name: list(_leaves(model)) for name, model in models.items()}
    for folder in components.FOLDERS.values():
        for name in components.names(folder):
            keys[f"{folder}.{name}"] = list(_leaves(components.settings_model(components.find(folder, name))))
    return keys


def _leaves(model: type[Block], prefix: str = "") -> Iterator[str]:
    """Yields the keys of a block; those of a block inside it with a dot. One beside other values is written whole."""
    for key, field in model.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Block)]
        if len(inner) == 1:
            yield from _leaves(inner[0], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _keys_meant(word: str, recipe: Mapping[str, Any]) -> str:
    """Returns the end of a message about an unknown top-level key: all keys that end with the nearest known word."""
    ending = {name: [name] for name in (*KEYS, *method_names(recipe.get("methods")))}
    for key in recipe_keys(recipe, known_keys()):
        if "." in key:
            ending.setdefault(key.rpartition(".")[2], []).append(key)
    close = difflib.get_close_matches(word, ending, n=1)
    if not close:
        return f"; known: {', '.join(KEYS)}"
    return "; did you mean " + " or ".join(f'"{key}"' for key in ending[close[0]]) + "?"


def _block(faults: Faults, key: Key, model: type[Block], values: Any) -> Block | None:
    if not isinstance(values, dict):
        faults.add(key, f"must be a block of keys, not {type(values).__name__}")
        return None
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors = error.errors()
        if len(errors) > MAX_UNKNOWN:
            faults.add(key, f"{len(errors) - MAX_UNKNOWN} more faults beside those listed")
        for fault in errors[:MAX_UNKNOWN]:
            # pydantic adds the names of validator functions and the tags of alternatives to a fault's location
            inner = tuple(part for part in fault["loc"] if not str(part).startswith(("function-", "tag-")))
            message = fault["msg"].removeprefix("Value error, ")
            problem = f"{message[0].lower()}{message[1:]}, given {_show(fault['input'])}"
            if fault["type"] == "extra_forbidden":
                problem = "unknown key"
                if len(inner) == 1:
                    prefixed = [name for name in model.model_fields if name.endswith(f".{inner[0]}")]
                    meant = did_you_mean(str(inner[0]), list(model.model_fields))
                    problem += f"; write {' or '.join(prefixed)}" if prefixed else meant
            elif fault["type"] == "literal_error":
                meant = did_you_mean(str(fault["input"]), re.findall("'([^']+)'", fault["ctx"]["expected"]))
                problem += meant if "mean" in meant else ""
            elif fault["type"] in ("tuple_type", "list_type"):
                problem = f"must be a list, given {_show(fault['input'])}"
            elif fault["type"] == "missing":
                problem = "is needed"
            elif fault["type"] in ("string_type", "path_type"):
                problem = f"must be text, given {_show(fault['input'])}"
                if not isinstance(fault["input"], list | dict | None):
                    at = (*key, *(part for part in inner if isinstance(part, int | str)))
                    problem += f"; {IN_SHELL if faults.text.is_overridden(at) else IN_QUOTES}"
            elif fault["type"] == "model_type":
                problem = f"must be a block of keys, given {_show(fault['input'])}"
            faults.add((*key, *inner), problem)
        return None


def _show(value: Any) -> str:
    given = repr(value)
    return given if len(given) <= MAX_SHOWN else f"{given[:MAX_SHOWN]}…"


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
    model, text = components.settings_model(cls, common), faults.text
    if (*key, "name") in text.overridden:  # another component, which may lack keys of the file's
        for stale in [k for k in values if k not in model.model_fields and (*key, k) not in text.overridden]:
            logger.info("%s: %s.%s is ignored, %s has no such key", text.origin, join_key(key), stale, values["name"])
            values = {k: value for k, value in values.items() if k != stale}
    block = _block(faults, key, model, values)
    keys = tuple(field for field in model.model_fields if field not in common.model_fields)
    return Component(values["name"], cls, block, keys) if block is not None else None


def _encoders(faults: Faults, values: dict[str, Any], given: Component | None) -> tuple[Component, ...]:
    """Returns the encoder, or the items of `encoders`; of data without images `given`, which stands for one."""
    if given is not None:
        for key in ("encoder", "encoders"):
            if key in values:
                faults.add(key, f"{NO_IMAGES}, so nothing is encoded; leave it out")
        return (given,)
    if "encoders" not in values:
        single = _component(faults, ("encoder",), *COMPONENTS["encoder"], values.get("encoder"))
        return () if single is None else (single,)
    listed = values["encoders"]
    if "encoder" in values:
        faults.add("encoder", "is for one encoder, but encoders lists several; keep one of the two keys")
        return ()
    if not isinstance(listed, list) or not listed:
        faults.add("encoders", "must be a list of blocks like encoder, each with a name")
        return ()
    every = [_component(faults, ("encoders", i), "encoders", ListedEncoder, value) for i, value in enumerate(listed)]
    encoders = tuple(encoder for encoder in every if encoder is not None)
    for i, label in _find_repeated(map(encoder_label, encoders)):
        faults.add(("encoders", i), f'two encoders have the name "{label}" in results; give one of them a label')
    return encoders


def _find_repeated(labels: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Yields the index and value of every label that stands earlier too."""
    first = dict[str, int]()
    for i, label in enumerate(labels):
        if first.setdefault(label, i) != i:
            yield i, label


def _under_encoder(item: MethodItem, encoder: Component) -> MethodItem:
    """Returns an entry of `methods` under an encoder, whose label the name in results gains if there may be several.

    It is marked as skipped if it needs class embeddings and the encoder's kind has no text side.
    """
    if isinstance(encoder.block, ListedEncoder):
        label = encoder_label(encoder)
        item = replace(item, encoder=encoder, encoder_label=label, label=with_encoder(item.label, label))
    if issubclass(encoder.cls, TextEncoder):
        return item
    item = item.with_text(False)
    if not item.reads_text:
        return item
    condition = "" if item.algorithm.cls.needs_text else f"with {item.start_key}: zero_shot "
    return replace(item, skipped=f"{condition}needs an encoder with a text side")


def _methods(faults: Faults, values: Any, encoder: Component) -> tuple[MethodItem, ...]:
    """Returns the entries of `methods`, under this encoder."""
    if not isinstance(values, list) or not values:
        faults.add("methods", "must be a list of at least one method, e.g. [erm, xdomainmix]")
        return ()
    every = [_method(faults, i, value, encoder) for i, value in enumerate(values)]
    items = tuple(item for item in every if item is not None)
    for i, label in _find_repeated(item.label for item in items):
        problem = f'two methods have the name "{label}" in results; give one of them a label'
        faults.add(("methods", items[i].index), problem)
    return items


def _method(faults: Faults, index: int, value: Any, encoder: Component) -> MethodItem | None:
    key: Key = ("methods", index)
    values = {"name": value} if isinstance(value, str) else value
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        faults.add(key, "must be the name of a method, or a block with a name and settings")
        return None
    algorithm, names = split_name(values["name"])
    algorithms = components.names("algorithms")
    folders = {name: folder for folder in ADD_ONS for name in components.names(folder)}
    cls, add_ons = None, dict[str, tuple[str, type[Any]]]()
    complete = algorithm in algorithms
    if complete:
        cls = components.find("algorithms", algorithm)
    else:  # an add-on alone, sam, means erm+sam
        several = f"; several are a list: [{algorithm}]"
        remedy = several if "," in algorithm else did_you_mean(algorithm, [*algorithms, *folders])
        faults.add((*key, "name"), f'no "{algorithm}" in algorithms{remedy}')
    for name in names:
        problem = ""
        if name not in folders:
            problem = f'no "{name}" in {" or ".join(ADD_ONS)}{did_you_mean(name, list(folders))}'
        elif folders[name] in add_ons:
            problem = f"+{add_ons[folders[name]][0]} and +{name} cannot be combined; keep one"
        else:
            add_ons[folders[name]] = (name, components.find(folders[name], name))
        if problem:
            faults.add((*key, "name"), problem)
            complete = False
            break
    if cls is not None and issubclass(cls, Solver):
        # what is written wins: another head is reported as a fault, and not replaced in silence
        values = {"head": cls.head_kind, **values}
    head_name = str(values.get("head", MethodCommon.model_fields["head"].default))
    head = _find(faults, (*key, "head"), "heads", head_name)
    if cls is None or head is None or not complete:
        return None
    if add_ons and not issubclass(cls, Algorithm):
        problem = f"{algorithm} takes no gradient steps, so +{names[0]} has no effect; leave +{names[0]} out"
        faults.add((*key, "name"), problem)
        return None
    prefixed = add_ons | {"heads": (head_name, head)}
    model = components.settings_model(cls, MethodCommon)
    for name, part in prefixed.values():
        model = components.settings_model(part, model, prefix=f"{name}.")
    if cls.needs_text and issubclass(cls, Algorithm) and values.get("start") is None:
        values = {**values, "start": "zero_shot"}
    if values.get("start") == "zero_shot":
        values = _from_start(faults, key, values, cls)
    block = _block(faults, key, model, values)
    if not isinstance(block, MethodCommon):
        return None
    parts = {
        folder: Component(name, part, block, tuple(components.settings_model(part).model_fields), prefix=f"{name}.")
        for folder, (name, part) in prefixed.items()
    }
    return MethodItem(
        label=block.label or block.name,
        head_init=block.head_init,
        algorithm=Component(algorithm, cls, block, tuple(components.settings_model(cls).model_fields)),
        head=parts["heads"],
        sharpness=parts.get("sharpness"),
        averaging=parts.get("averaging"),
        block=block,
        index=index,
        encoder=encoder,
    )


def _from_start(faults: Faults, key: Key, values: dict[str, Any], cls: type[Any]) -> dict[str, Any]:
    """Returns the values of an item with what `start: zero_shot` stands for, beside normalisation."""
    implied = "center" if "center" in components.settings_model(cls).model_fields else "head_init"
    if issubclass(cls, Solver) and implied != "center":
        faults.add((*key, "start"), f"{values['name']} computes its head, and takes no start; leave it out")
        return values
    if values.get(implied) not in (None, "zero_shot"):
        problem = f"{values['name']} starts from the class embeddings (start: zero_shot); leave {implied} out"
        faults.add((*key, implied), problem)
    return {**values, implied: "zero_shot"}


def _check_together(faults: Faults, recipe: Recipe) -> None:
    """Adds the faults of keys that depend on each other. Those inside one block stand in that block."""
    training = recipe.training
    blocks = training.problems(recipe.trains_encoders), recipe.protocol.problems(), recipe.search.problems()
    for key, text, causes in chain(*blocks):
        faults.add(key, text, *causes)
    for label, count in Counter(item.label for item in recipe.methods).items():
        if count > 1:
            faults.add("encoders", f'two rows of results have the name "{label}"; change a label')
    uncompiled = [item.is_solver or item.algorithm.cls.has_kernels for item in recipe.methods]
    if training.compile and not recipe.trains_encoders and all(uncompiled):
        problem = "has no effect on these methods: they have their own kernels or take no steps; leave it out"
        faults.add("training.compile", problem)
    if not recipe.has_images:
        _check_without_images(faults, recipe)
    elif recipe.features.cut != "auto" and not any(item.is_cut for item in recipe.methods):
        problem = "is for a partly trained encoder; leave it out, or set trainable: {blocks: k}"
        faults.add("features.cut", problem, "encoder.trainable")
    if recipe.has_images and recipe.data_common.intensity != "type" and not issubclass(recipe.data.cls, EncodedImages):
        problem = f"has no effect on {recipe.data.name}, which makes or decodes its images itself; leave it out"
        faults.add("data.intensity", problem, "data.name")
    if recipe.data_common.domain_min is not None and recipe.protocol.name == "official":
        problem = "is for leave_one_domain_out; the official split says which domains are tested"
        faults.add("data.domain_min", problem, "protocol.name")
    elif recipe.data_common.domain_min is None and recipe.data_common.small_domains != "join":
        faults.add("data.small_domains", "has no effect without data.domain_min; set it, or leave this out")
    _check_compared_rows(faults, recipe)
    for i, encoder in enumerate(recipe.encoders):
        under = [item.trainable for item in recipe.methods if item.encoder is encoder]
        encoder_key: Key = ("encoders", i) if recipe.several_encoders else ("encoder",)
        unfreeze_at = encoder_common(encoder).unfreeze_at
        if unfreeze_at and all(trainable is False for trainable in under):
            problem = "has no effect with a frozen encoder; leave it out, or set trainable: true"
            faults.add((*encoder_key, "unfreeze_at"), problem, "encoder.trainable")
        elif training.steps is not None and unfreeze_at >= training.steps:
            faults.add((*encoder_key, "unfreeze_at"), unfreeze_problem(unfreeze_at, training.steps), "training.steps")
    _check_label_curve(faults, recipe)
    if recipe.has_images:
        _check_augmentation(faults, recipe)
    _check_space(faults, recipe)
    _check_draws(faults, recipe)
    for item in recipe.own_methods:
        _check_entry(faults, item, recipe)
    for item in recipe.methods:
        _check_method(faults, item, recipe)


def _check_without_images(faults: Faults, recipe: Recipe) -> None:
    """Adds the keys that need images, an encoder or its text side, of data that are features."""
    data, features = recipe.data_common, recipe.features
    needing = {
        "data.on_bad_image": data.on_bad_image != "error",
        "data.intensity": data.intensity != "type",
        "data.train_augmentation": bool(data.train_augmentation),
        "features.views": features.views > 0,
        "features.cut": features.cut != "auto",
        "features.precision": features.precision != "fp32",
        "features.workers": features.workers is not None,
        "report.images": recipe.report.images,
        "cluster.name": recipe.cluster.name is not None,
    }
    why = {
        "features.precision": "which are read as float32",
        "cluster.name": "which are in this machine's memory, and their heads train here",
    }
    for key, is_set in needing.items():
        if is_set:
            faults.add(key, f"{NO_IMAGES}{', ' * (key in why)}{why.get(key, '')}; leave it out", "data.name")
    for item in recipe.methods:
        key_of_item: Key = ("methods", item.index)
        if item.trainable is not False:
            faults.add((*key_of_item, "trainable"), f"{NO_IMAGES}, so no encoder can train; leave it out", "data.name")
        if item.reads_text and item.encoder is not GIVEN_TEXT:
            problem = f"{item.label} needs class embeddings, but {NO_IMAGES}; give data.class_embeddings"
            faults.add(key_of_item, f"{problem}, or leave it out", "data.name", "data.class_embeddings")
        if item.block.prompts is not None:
            problem = f"{NO_IMAGES}, and no text encoder; leave it out"
            faults.add((*key_of_item, "prompts"), problem, "data.name")
        if item.block.train_augmentation:
            faults.add((*key_of_item, "train_augmentation"), f"{NO_IMAGES}; leave it out", "data.name")


def _check_compared_rows(faults: Faults, recipe: Recipe) -> None:
    """Adds the faulty pairs of `report.compare`."""
    rows, labels = {item.label for item in recipe.methods}, recipe.labels
    for i, pair in enumerate(recipe.report.compare):
        key: Key = ("report", "compare", i)
        unknown = [label for label in pair if label not in labels]
        for label in unknown:
            faults.add(key, f'no row "{label}"{did_you_mean(label, labels)}', "methods")
        if not unknown and (pair[0] in rows) != (pair[1] in rows):
            problem = f"{pair[0]} and {pair[1]}: one of the two names an encoder; write METHOD @ ENCODER for both"
            faults.add(key, f"{problem}, or for none")
        elif pair[0] == pair[1]:
            faults.add(key, f"compares {pair[0]} with itself; name two rows")
    seen = set[frozenset[str]]()
    for first, second in recipe.declared:
        if frozenset((first, second)) in seen:
            faults.add("report.compare", f"{first} and {second} are compared twice; keep one of the pairs")
        seen.add(frozenset((first, second)))


def _check_label_curve(faults: Faults, recipe: Recipe) -> None:
    """Adds why no model of the recipe can show what labels of a new site bring."""
    if not recipe.label_curve:
        return
    if not any(item.adapts_to_sites for item in recipe.methods):
        problem = "adapts linear heads on a frozen encoder, but no method here trains one; add erm, or leave it out"
        faults.add("label_curve", problem, "methods", "encoder.trainable")
    if recipe.protocol.name == "official":
        problem = "needs one held-out domain at a time; use leave_one_domain_out, or leave it out"
        faults.add("label_curve", problem, "protocol.name")
    if recipe.protocol.selection == ORACLE:
        problem = (
            "needs models that were picked without the site's labels, but selection: oracle reads them; use train_val"
        )
        faults.add("label_curve", problem, "protocol.selection")


def _check_augmentation(faults: Faults, recipe: Recipe) -> None:
    """Adds the faults of augmentations that no method can have, and of `features.views` without one."""
    given, views = recipe.data_common.train_augmentation, recipe.features.views
    trained = [item for item in recipe.methods if not item.is_solver]
    on_images = [item for item in trained if recipe.trains_on_images(item)]
    has_cut = any(item.is_cut for item in trained)
    inputs = "cached activations" if has_cut else "a frozen encoder"
    remedy = "leave it out, or set features.views, or trainable: true" + ", or features.cut: compute" * has_cut
    no_effect = f"has no effect with {inputs}: each image is computed only once; {remedy}"
    for item in recipe.own_methods:
        key: Key = ("methods", item.index, "train_augmentation")
        if item.is_solver and item.block.train_augmentation is not None:
            faults.add(key, f"{item.label} computes its head from the plain images; leave it out")
        elif item.block.train_augmentation and not views and not any(i.index == item.index for i in on_images):
            faults.add(key, no_effect, "encoder.trainable", "features.views")
    inherit = [item for item in trained if item.block.train_augmentation is None]
    if given and not views and not [item for item in inherit if item in on_images] and (inherit or not trained):
        faults.add("data.train_augmentation", no_effect, "encoder.trainable", "features.views")
    if not views or recipe.cached_augmentations(recipe.methods):
        return
    if not trained:
        problem = "has no effect on methods without gradient steps, which read the plain images; leave it out"
        faults.add("features.views", problem, "methods")
    elif len(on_images) == len(trained) and all(item.trainable is True for item in trained):
        problem = "has no effect with encoder.trainable: true, which augments at every step; leave it out"
        faults.add("features.views", problem, "encoder.trainable")
    elif len(inherit) == len(trained) > len(on_images):
        source = ", the default of this data set," if given is None else ""
        problem = f"none{source} gives no views to cache; set an augmentation, or leave features.views out"
        faults.add("data.train_augmentation", problem, "features.views")
    else:
        problem = "no row on cached features has an augmentation; set one, or leave it out"
        faults.add("features.views", problem, "methods")


def _check_space(faults: Faults, recipe: Recipe) -> None:
    """Adds the keys of the search space that no method of the recipe has, or that have no effect on any."""
    parts = {part.name: part for item in recipe.methods for part in item.parts}
    of_parts = (f"{name}.{key}" for name, part in parts.items() for key in part.keys)
    of_methods = METHOD_KEYS if any(item.takes_anchor for item in recipe.methods) else ()
    searchable = [*TRAINING_KEYS, *of_methods, *of_parts]
    for name in recipe.search.space:
        key: Key = ("search", "space", name)
        if name not in searchable:
            problem = f"is not a searchable hyper-parameter of this recipe's methods{did_you_mean(name, searchable)}"
            faults.add(key, problem, "methods")
        elif name in ("encoder_lr", "layer_decay") and not recipe.trains_encoders:
            faults.add(key, "has no effect with a frozen encoder; leave it out", "encoder.trainable")
        elif name in ("momentum", "beta1", "beta2") and (name == "momentum") != (recipe.training.optimizer == "sgd"):
            problem = f"has no effect on {recipe.training.optimizer}; leave it out"
            faults.add(key, problem, "training.optimizer")
    averaging = [item.averaging.name for item in recipe.methods if item.averaging is not None]
    if averaging and "patience" in recipe.search.distributions:
        problem = f"+{averaging[0]} decides itself which steps it averages; leave it out"
        faults.add("search.space.patience", problem, "methods")


def _check_draws(faults: Faults, recipe: Recipe) -> None:
    """Adds the first trial whose settings are not allowed: thousands may follow."""
    items = recipe.methods
    for trial in range(recipe.search.trials):
        try:
            draws = [recipe.search_of(item).drawn(trial) for item in items]
            for item, values in zip(items, draws, strict=True):
                draw_training(recipe.training, item, values)
            drawn = [draw_item(item, values) for item, values in zip(items, draws, strict=True)]
        except ValidationError as error:
            fault = error.errors()[0]
            problem = f"trial {trial} draws {'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
            faults.add("search.space", problem)
            return
        for item in drawn:
            if item in items or item.is_solver:  # items without drawn settings are checked by _check_method
                continue
            try:
                reason = item.anchor_fault or _parts_reason(check_algorithm(item, recipe), item, recipe)
            except UserError as error:
                reason = str(error)
            if reason:
                faults.add("search.space", f"trial {trial} of {item.label}: {reason}", *WHOLE_BATCH)
                return


def check_algorithm(item: MethodItem, recipe: Recipe) -> Algorithm:
    """Builds the method for two classes, two domains and two features, so that it checks its own settings."""
    # with epochs the number of steps is not known before the data; the plan checks these settings again
    steps, task = recipe.training.steps or sys.maxsize, Task(("a", "b"), ("a", "b"))
    setup = Setup(task, width=2, steps=steps, seed=0, loss_average=recipe.training.loss_average)
    algorithm: Algorithm = item.algorithm.build(setup)
    return algorithm


def _parts_reason(algorithm: Algorithm, item: MethodItem, recipe: Recipe) -> str:
    """Returns why the method cannot train on batches in parts (accumulation, several processes); "" if it can."""
    training, processes = recipe.training, int(os.environ.get("WORLD_SIZE", "1"))
    if item.trainable is False or processes * training.accumulation == 1:
        return ""
    adds_up = recipe.class_weights_of(item) == "none" and algorithm.parts_add_up(training.sampler == "pooled")
    if algorithm.loss_over == "part" and not adds_up:
        return (
            "partners: local averages the loss over parts of a batch, which class_weights and (in pooled "
            "batches) loss_average: domain do not allow; use partners: global"
        )
    return algorithm.parts_reason


def _check_entry(faults: Faults, item: MethodItem, recipe: Recipe) -> None:
    """Adds the faults that an entry of `methods` has under any encoder."""
    key: Key = ("methods", item.index)
    if item.averaging is not None and recipe.training.patience is not None:
        problem = f"+{item.averaging.name} decides itself which steps it averages; leave training.patience out"
        faults.add(key, problem, "training.patience")
    if item.is_solver and item.block.trainable not in (None, False):
        problem = f"{item.label} computes a head from features of the frozen encoder; leave it out"
        faults.add((*key, "trainable"), problem)
    if item.is_solver and item.block.class_weights and not item.algorithm.cls.weighs_images:
        faults.add((*key, "class_weights"), f"{item.label} weighs no images; leave it out")
    under_each = [other for other in recipe.methods if other.index == item.index]
    if item.block.prompts is not None and not any(other.may_read_text for other in under_each):
        problem = f"{item.label} uses no class embeddings; leave it out"
        problem += "" if item.is_solver else ", or set start: zero_shot"
        faults.add((*key, "prompts"), problem, "encoder.name")
    if item.block.encoder_lr is not None and all(other.trainable is False for other in under_each):
        problem = f"{item.label} trains no encoder; leave it out, or set it for a row with trainable, by its label"
        faults.add((*key, "encoder_lr"), problem, "encoder.trainable")


def _check_method(faults: Faults, item: MethodItem, recipe: Recipe) -> None:
    """Adds the faults of a method under one encoder."""
    key: Key = ("methods", item.index)
    if item.sharpness is not None and item.trainable is not False and recipe.training.mixed_precision == "fp16":
        problem = f"fp16 scales the loss, which makes the second pass of {item.sharpness.name} wrong"
        faults.add("training.mixed_precision", f"{problem}; use bf16 or no with {item.label}", key)
    if not item.is_solver:
        try:
            algorithm = check_algorithm(item, recipe)
        except UserError as error:
            faults.add(key, str(error), key, "training.steps", "training.loss_average")
        else:
            frozen_or_cut = algorithm.cut_reason if item.is_cut else ""
            if item.trainable is False:
                frozen_or_cut = algorithm.frozen_reason
            if frozen_or_cut and not recipe.has_images:
                frozen_or_cut = f"{NO_IMAGES}, and this trains or changes an encoder or images; leave it out"
            fixed_head = not any(p.requires_grad for p in algorithm.parameters())
            no_effect = "its class head is fixed, so no step can train the head alone; leave unfreeze_at out"
            unmoved = "its class head is fixed, so nothing pulls it back; leave anchor out"
            reasons: dict[tuple[Key | str, ...], str] = {
                ("encoder.trainable",): frozen_or_cut,
                (): unmoved if fixed_head and item.block.anchor else "",
                ("encoder.unfreeze_at",): no_effect if fixed_head and item.encoder_common.unfreeze_at else "",
                ("training.sampler",): algorithm.pooled_reason if recipe.training.sampler == "pooled" else "",
                (key, *WHOLE_BATCH): _parts_reason(algorithm, item, recipe),
            }
            for causes, reason in reasons.items():
                if reason:
                    faults.add(key, f"{item.label}: {reason}", *causes)
    if item.anchor_fault:
        faults.add((*key, "anchor"), item.anchor_fault)
    if item.picks_across_domains and recipe.protocol.selection == "cross_domain":
        faults.add((*key, "pick"), "protocol.selection: cross_domain does this already; leave pick out")
    normalized = item.reads_normalized or getattr(item.encoder.block, "normalize", False)
    only_skipped = all(other.skipped is not None for other in recipe.methods)
    says_more = item.skipped is None or (only_skipped and recipe.has_images)
    for setting, problem in item.text_faults(normalized) if says_more else ():
        faults.add((*key, *setting), problem, "encoder.name", "encoder.normalize")
    elsewhere = outside_text_space(getattr(item.encoder.block, "pooling", None))
    if item.reads_text and elsewhere and item.center is None:  # with one it is a skipped row
        faults.add(key, f"{item.label} needs class embeddings, but {elsewhere}", "encoder.pooling")
