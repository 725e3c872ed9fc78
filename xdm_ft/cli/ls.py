"""`xdm-ft ls`: lists recipes, benchmarks, methods, heads, data sets or encoders, one per line, or describes one."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xdm_ft.cli import CommandResult, columns
from xdm_ft.recipe.components import ADD_ONS, find, names, settings_model
from xdm_ft.recipe.text import in_yaml, recipe_folder
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.runtime.settings import Block

OWN_IMAGES = (
    "clip_folder", "adaptation", "adaptation_timm", "augmentation", "encoders", "all_methods", "timm_folder",
    "frozen_search", "features", "demo",
)  # fmt: skip
"""The recipes for a user's own images, by what one asks first. The others are published benchmarks and ablations."""


WIDTH = 100  # characters of a line


def main(arguments: argparse.Namespace) -> CommandResult:
    return listing(arguments.what, arguments.name)


@dataclass(frozen=True)
class Setting:
    key: str
    meaning: str  # with the unit
    required: bool
    default: Any  # None if the setting is required


@dataclass(frozen=True)
class Listing:
    name: str
    about: str
    group: str | None = None  # of recipes
    source: str | None = None  # of methods and heads: the paper
    works_on: str | None = None  # of methods: cached features, training end to end, or both
    holds: str | None = None  # of methods: what of the training images their head holds
    settings: tuple[Setting, ...] = ()


def listing(subject: str, name: str | None = None) -> CommandResult:
    """Returns a line per entry, or all that is known of the one with this name. Raises `UserError` if there is none."""
    if subject in ("recipes", "benchmarks") and name is None:
        return _recipes(only_benchmarks=subject == "benchmarks")
    if subject in ("recipes", "benchmarks"):
        entries = _recipes(only_benchmarks=False).document
    elif subject == "methods":
        entries = list(_methods())
    else:
        entries = [_entry(subject, name, prefix=f"{name}." if subject == "heads" else "") for name in names(subject)]
    if name is not None:
        known = {entry.name.removeprefix("…+"): entry for entry in entries}
        if name not in known:
            raise UserError(f"ls {subject}: no {name}{did_you_mean(name, [*known])}")
        return CommandResult([known[name]], _details(known[name]))
    rows = [
        tuple(filter(None, (entry.name, entry.works_on, entry.source if subject == "methods" else entry.about)))
        for entry in entries
    ]
    lines = [line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in columns(rows, numbers=False)]
    return CommandResult(entries, [*lines, "", f"All of one, with its settings: xdm-ft ls {subject} NAME"])


def _details(entry: Listing) -> list[str]:
    works_on = entry.works_on and f"works on: {entry.works_on}"
    what = entry.about, entry.source, works_on, entry.holds
    settings = [
        (f"  {setting.key}{'' if setting.required else f'={in_yaml(setting.default)}'}", setting.meaning)
        for setting in entry.settings
    ]
    return [
        entry.name,
        *(f"  {line}" for line in what if line),
        *(columns(settings, numbers=False) if settings else ()),
    ]


def _recipes(only_benchmarks: bool) -> CommandResult:
    """As text either the recipes for own images or the benchmarks; the document of `ls recipes` has both."""
    texts = {
        path.stem: path.read_text(encoding="utf-8").split("\n")[0].removeprefix("#").strip()
        for path in sorted(recipe_folder().glob("*.yaml"))
    }
    own = [Listing(name, texts.pop(name), "own images") for name in OWN_IMAGES]
    others = [Listing(name, text, "benchmarks") for name, text in texts.items()]
    lines = columns([(entry.name, entry.about) for entry in (others if only_benchmarks else own)], numbers=False)
    if only_benchmarks:
        return CommandResult(others, lines)
    use = "xdm-ft run RECIPE data.root=DIR starts one; xdm-ft cp RECIPE FILE copies it."
    more = "Published benchmarks and ablations: xdm-ft ls benchmarks"
    return CommandResult([*own, *others], ["Your own images", *lines, "", use, more])


def _methods() -> Iterator[Listing]:
    from xdm_ft.algorithms import Algorithm, Solver  # which needs torch; the other lists do not wait for it

    for name in names("algorithms"):
        cls, works_on, holds = find("algorithms", name), "cached", None
        if issubclass(cls, Algorithm):
            works_on = "end to end" if cls.frozen_reason else "cached / end to end"
        elif issubclass(cls, Solver):
            if find("heads", cls.head_kind).training_features:
                holds = "its head holds the features of all training images"
            elif cls.class_means:
                holds = "its head holds the mean feature of each class"
        yield replace(_entry("algorithms", name), works_on=works_on, holds=holds)
    for folder in ADD_ONS:
        for name in names(folder):
            entry = _entry(folder, name, prefix=f"{name}.")
            yield replace(entry, name=f"…+{name}", works_on="cached / end to end")


def _entry(folder: str, name: str, prefix: str = "") -> Listing:
    cls, settings = find(folder, name), []
    for key, field in settings_model(cls, prefix=prefix).model_fields.items():
        required = field.is_required()
        default = None if required else field.default
        if isinstance(default, Block):
            default = default.model_dump(mode="json", exclude_defaults=True)
        elif isinstance(default, Path):
            default = str(default)
        elif isinstance(default, tuple):
            default = list(default)
        settings.append(Setting(key, field.description or "", required, default))
    summary = (inspect.getdoc(cls) or "").split("\n")[0]
    source = getattr(cls, "source", None) if folder in ("algorithms", *ADD_ONS) else None  # of others no paper
    return Listing(name, summary, source=source, settings=tuple(settings))
