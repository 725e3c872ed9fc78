"""The texts of screens and reports that are kept in TOML files."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def packaged_texts(file: str) -> dict[str, dict[str, Any]]:
    """Returns the tables of a TOML file of the package. The lines of a text are joined by single spaces."""

    def joined(value: Any) -> Any:
        if isinstance(value, list):
            return [joined(text) for text in value]
        return " ".join(value.split()) if isinstance(value, str) else value

    # `files` of a room would import it: `xdm-ft explain` answers at once
    text = files("xdm_ft").joinpath(file).read_text(encoding="utf-8")
    return {name: {key: joined(value) for key, value in table.items()} for name, table in tomllib.loads(text).items()}


def glossary() -> dict[str, dict[str, str]]:
    """Returns {group: {word: meaning}}. The first group has the concepts that a reader needs to ship a model."""
    return packaged_texts("report/glossary.toml")
