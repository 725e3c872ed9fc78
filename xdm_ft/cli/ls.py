"""`xdm-ft ls`: lists recipes, methods, heads, data sets or encoders, one per line."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from xdm_ft.algorithms import Algorithm, Method, Solver
from xdm_ft.cli.answer import Answer
from xdm_ft.recipe import components
from xdm_ft.recipe.text import recipe_folder


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


@dataclass(frozen=True)
class Listing(Answer):
    what: str
    entries: list[Entry]

    def text(self) -> str:
        return _table([tuple(cell for cell in _cells(self.what, one) if cell is not None) for one in self.entries])

    def to_json(self) -> list[Any]:
        return self.entries


def listing(what: str) -> Listing:
    if what == "recipes":
        return Listing(
            what, [Entry(path.stem, _first_comment(path.read_text(encoding="utf-8"))) for path in _recipes()]
        )
    if what == "methods":
        return Listing(what, [*_methods(), *_add_ons()])
    prefixed = what == "heads"  # the keys of a method's head begin with its name
    return Listing(what, [_entry(what, name, prefix=f"{name}." * prefixed) for name in components.names(what)])


def _recipes() -> list[Path]:
    return sorted(recipe_folder().glob("*.yaml"))


def _methods() -> Iterator[Entry]:
    for name in components.names("algorithms"):
        cls = components.find("algorithms", name)
        yield replace(_entry("algorithms", name), works_on=_works_on(cls), holds=_holds(cls))


def _works_on(cls: type[Method]) -> str:
    if not issubclass(cls, Algorithm):
        return "cached"
    return "end to end" if cls.frozen_reason else "cached / end to end"


def _holds(cls: type[Method]) -> str | None:
    if not issubclass(cls, Solver):
        return None
    if components.find("heads", cls.head_kind).training_features:
        return "its head holds the features of all training images"
    return "its head holds the mean feature of each class" if cls.class_means else None


def _add_ons() -> Iterator[Entry]:
    for folder in components.ADD_ONS:
        for name in components.names(folder):
            entry = _entry(folder, name, prefix=f"{name}.")
            yield replace(entry, name=f"…+{name}", works_on="cached / end to end")


def _entry(folder: str, name: str, prefix: str = "") -> Entry:
    cls = components.find(folder, name)
    fields = components.settings_model(cls, prefix=prefix).model_fields
    settings = (
        Setting(
            key, field.description or "", field.is_required(), None if field.is_required() else _plain(field.default)
        )
        for key, field in fields.items()
    )
    return Entry(name, _summary(cls), getattr(cls, "source", None), settings=tuple(settings))


def _cells(what: str, entry: Entry) -> tuple[str | None, ...]:
    """Returns the cells of a line. Methods have no room for `about`."""
    if what == "recipes":
        return entry.name, entry.about
    about = None if what == "methods" else entry.about
    works_on = "; ".join(filter(None, (entry.works_on, entry.holds))) or None
    return entry.name, about, entry.source, works_on, _settings(entry)


def _settings(entry: Entry) -> str:
    """Returns `key=default (meaning and unit)` of every constructor key; a required key has no default."""
    return "; ".join(
        f"{one.key}{'' if one.required else f'={_in_yaml(one.default)}'} ({one.meaning})" for one in entry.settings
    )


def _in_yaml(default: object) -> str:
    text: str = yaml.safe_dump(default, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.split("\n")[0]  # PyYAML writes a line "..." after a single scalar


def _plain(default: object) -> object:
    from xdm_ft.runtime.settings import Block

    if isinstance(default, Block):
        return default.model_dump(mode="json", exclude_defaults=True)
    if isinstance(default, Path):
        return str(default)
    return list(default) if isinstance(default, tuple) else default


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").split("\n")[0]


def _first_comment(text: str) -> str:
    return text.split("\n")[0].removeprefix("#").strip()


def _table(cells: Iterable[tuple[str, ...]]) -> str:
    rows = list(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
