"""`xdm-ft ls`: lists recipes, methods, heads, data sets or encoders, one per line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdm_ft.cli.answer import Answer, columns

if TYPE_CHECKING:
    from xdm_ft.algorithms import Method

HELP = "list recipes, methods, heads, data sets or encoders, one per line"
EXAMPLES = ("xdm-ft ls methods", "xdm-ft ls methods --json")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("what", nargs="?", choices=["recipes", "methods", "heads", "data", "encoders"], default="recipes")


def main(arguments: argparse.Namespace) -> Answer:
    return listing(arguments.what)


@dataclass(frozen=True)
class Setting:
    key: str
    meaning: str  # with the unit
    required: bool
    default: Any  # None if the setting is required


@dataclass(frozen=True)
class Entry:
    name: str
    about: str
    source: str | None = None  # of methods and heads: the paper
    works_on: str | None = None  # of methods: cached features, training end to end, or both
    holds: str | None = None  # of methods: what of the training images their head holds
    settings: tuple[Setting, ...] = ()


def listing(what: str) -> Answer:
    entries = list(_recipes() if what == "recipes" else _methods() if what == "methods" else _components(what))
    rows = [tuple(cell for cell in _cells(what, entry) if cell is not None) for entry in entries]
    return Answer(entries, columns(rows, numbers=False))


def _recipes() -> Iterator[Entry]:
    from xdm_ft.recipe.text import recipe_folder

    for path in sorted(recipe_folder().glob("*.yaml")):
        first_comment = path.read_text(encoding="utf-8").split("\n")[0].removeprefix("#").strip()
        yield Entry(path.stem, first_comment)


def _components(folder: str) -> Iterator[Entry]:
    from xdm_ft.recipe import components

    for name in components.names(folder):
        yield _entry(folder, name, prefix=f"{name}." if folder == "heads" else "")


def _methods() -> Iterator[Entry]:
    from xdm_ft.algorithms import Algorithm
    from xdm_ft.recipe import components

    for name in components.names("algorithms"):
        cls = components.find("algorithms", name)
        works_on = "cached"
        if issubclass(cls, Algorithm):
            works_on = "end to end" if cls.frozen_reason else "cached / end to end"
        yield replace(_entry("algorithms", name), works_on=works_on, holds=_holds(cls))
    for folder in components.ADD_ONS:
        for name in components.names(folder):
            entry = _entry(folder, name, prefix=f"{name}.")
            yield replace(entry, name=f"…+{name}", works_on="cached / end to end")


def _holds(cls: type[Method]) -> str | None:
    from xdm_ft.algorithms import Solver
    from xdm_ft.recipe import components

    if not issubclass(cls, Solver):
        return None
    if components.find("heads", cls.head_kind).training_features:
        return "its head holds the features of all training images"
    return "its head holds the mean feature of each class" if cls.class_means else None


def _entry(folder: str, name: str, prefix: str = "") -> Entry:
    from xdm_ft.recipe import components

    cls = components.find(folder, name)
    settings = tuple(
        Setting(key, field.description or "", required, None if required else _plain(field.default))
        for key, field in components.settings_model(cls, prefix=prefix).model_fields.items()
        for required in [field.is_required()]
    )
    summary = (inspect.getdoc(cls) or "").split("\n")[0]
    return Entry(name, summary, getattr(cls, "source", None), settings=settings)


def _plain(default: object) -> object:
    from xdm_ft.runtime.settings import Block

    if isinstance(default, Block):
        return default.model_dump(mode="json", exclude_defaults=True)
    if isinstance(default, Path):
        return str(default)
    return list(default) if isinstance(default, tuple) else default


def _cells(what: str, entry: Entry) -> tuple[str | None, ...]:
    """Returns the cells of a line. Methods have no room for `about`."""
    from xdm_ft.recipe.text import in_yaml

    if what == "recipes":
        return entry.name, entry.about
    about = None if what == "methods" else entry.about
    works_on = "; ".join(filter(None, (entry.works_on, entry.holds))) or None
    settings = (
        f"{one.key}{'' if one.required else f'={in_yaml(one.default)}'} ({one.meaning})" for one in entry.settings
    )
    return entry.name, about, entry.source, works_on, "; ".join(settings)
