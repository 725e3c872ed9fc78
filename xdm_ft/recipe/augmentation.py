"""`train_augmentation` of a recipe: a name, a mapping {name: settings}, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf, PlainSerializer, ValidationError

from xdm_ft.augmentations import Augmentation, Augmentations
from xdm_ft.recipe import components
from xdm_ft.runtime.errors import UserError, did_you_mean

NONE = "none"


def augmentations_of(value: Any) -> Augmentations | None:
    """Returns what a recipe's value says; None: the value is null. Raises `ValueError`."""
    if value is None or isinstance(value, Augmentations):
        return value
    if value in (NONE, [NONE]):
        return Augmentations()
    entries = value if isinstance(value, list | tuple) else [value]
    named = [pair for entry in entries for pair in _named(entry)]
    if not named:
        raise ValueError("must name an augmentation; write none for none")
    if repeated := [name for i, (name, _) in enumerate(named) if name in dict(named[:i])]:
        raise ValueError(f"names {repeated[0]} twice; keep one")
    made = [_made(name, settings) for name, settings in named]
    resizing = [augmentation for augmentation in made if augmentation.replaces_resizing]
    if len(resizing) > 1:
        names = " and ".join(augmentation.name for augmentation in resizing)
        raise ValueError(f"{names} both replace the encoder's resizing; keep one")
    # it gets the image before it is resized
    return Augmentations(sorted(made, key=lambda augmentation: not augmentation.replaces_resizing))


def _named(entry: Any) -> list[tuple[str, Any]]:
    """Returns (name, settings) of each augmentation of an entry of the list."""
    if isinstance(entry, str):
        return [(entry, {})]
    if isinstance(entry, Mapping) and all(isinstance(name, str) for name in entry):
        return [(name, {} if settings is None else settings) for name, settings in entry.items()]
    raise ValueError("must be a name, a mapping {name: settings}, or a list of them")


def _made(name: str, settings: Any) -> Augmentation:
    if name == NONE:
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
            raise ValueError(f"{name}: unknown key {key}{did_you_mean(key, list(cls.model_fields))}") from error
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{name}.{key}: {message[0].lower()}{message[1:]}") from error
    return made


def _written(augmentations: Augmentations | None) -> Any:
    """Returns the recipe's value with every default."""
    if augmentations is None:
        return None
    entries = [{of.name: of.model_dump(mode="json")} if type(of).model_fields else of.name for of in augmentations]
    return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries or NONE


TrainAugmentation = Annotated[
    InstanceOf[Augmentations] | None, BeforeValidator(augmentations_of), PlainSerializer(_written)
]
"""Type of the keys `train_augmentation`: `Augmentations`, or None."""
