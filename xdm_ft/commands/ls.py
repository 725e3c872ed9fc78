"""`xdm-ft ls`: lists recipes, methods, heads, data sets or encoders, one per line."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import yaml

from xdm_ft.algorithms import Algorithm, Method
from xdm_ft.recipe import components
from xdm_ft.recipe.text import recipe_folder


def listing(what: str) -> str:
    if what == "recipes":
        return _table([(path.stem, _first_comment(path.read_text(encoding="utf-8"))) for path in _recipes()])
    if what == "methods":
        return _table([*_methods(), *_add_ons()])
    if what == "heads":
        return _table(_heads())
    rows = [(name, _summary(components.find(what, name)), _settings(what, name)) for name in components.names(what)]
    return _table(rows)


def _recipes() -> list[Path]:
    return sorted(recipe_folder().glob("*.yaml"))


def _methods() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in components.names("algorithms"):
        cls = components.find("algorithms", name)
        rows.append((name, cls.source, _works_on(cls), _settings("algorithms", name)))
    return rows


def _works_on(cls: type[Method]) -> str:
    if not issubclass(cls, Algorithm):
        return "cached"
    return "end to end" if cls.frozen_reason else "cached / end to end"


def _heads() -> Iterable[tuple[str, ...]]:
    for name in components.names("heads"):
        cls = components.find("heads", name)
        yield name, _summary(cls), cls.source, _settings("heads", name, prefix=f"{name}.")


def _add_ons() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for folder in components.ADD_ONS:
        for name in components.names(folder):
            cls = components.find(folder, name)
            rows.append((f"…+{name}", cls.source, "cached / end to end", _settings(folder, name, prefix=f"{name}.")))
    return rows


def _settings(folder: str, name: str, prefix: str = "") -> str:
    """Returns `key=default (meaning and unit)` of every constructor key; a required key has no default."""
    fields = components.settings_model(components.find(folder, name), prefix=prefix).model_fields
    return "; ".join(
        f"{key}{'' if field.is_required() else f'={_in_yaml(field.default)}'} ({field.description})"
        for key, field in fields.items()
    )


def _in_yaml(default: object) -> str:
    text: str = yaml.safe_dump(_plain(default), default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.split("\n")[0]  # PyYAML writes a line "..." after a single scalar


def _plain(default: object) -> object:
    from xdm_ft.settings import Block

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
