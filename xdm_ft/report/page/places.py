"""Places on this machine, as a page that is handed on may name them: without the folders that lead there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any


def named(path: Path) -> Path:
    """A relative path as it is; of an absolute one only the last name."""
    return Path(path.name) if path.is_absolute() else path


def without_folders(value: Any) -> Any:
    """A recipe in which every text that is an absolute path, or one in a home folder, is `…/` and its last name."""
    if isinstance(value, Mapping):
        return {key: without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(inner) for inner in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~/")) and "\n" not in value
    return f"…/{PurePath(value).name}" if is_path else value
