"""YAML → typed, frozen settings. All faults are reported together, before any data is read."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from xdm_ft.algorithms import Algorithm, Solver
from xdm_ft.encoders import TextEncoder
from xdm_ft.evaluation.encoders import with_encoder
from xdm_ft.features import FeatureSettings
from xdm_ft.protocol.splits import AUTO, LOOKS, Protocol
from xdm_ft.recipe import components
from xdm_ft.recipe.blocks import Cluster, DataCommon, EncoderCommon, ListedEncoder, MethodCommon, Output
from xdm_ft.recipe.checked import Recipe
from xdm_ft.recipe.faults import Faults, check_together
from xdm_ft.recipe.method_item import Component, MethodItem, encoder_label
from xdm_ft.recipe.method_overrides import method_names, split_name, with_method_overrides
from xdm_ft.recipe.override_keys import keys_meant
from xdm_ft.recipe.search import Search
from xdm_ft.recipe.text import Key, RecipeText, dotted, read_recipe
from xdm_ft.report import ReportSettings
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.runtime.settings import Block
from xdm_ft.training import Training

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
