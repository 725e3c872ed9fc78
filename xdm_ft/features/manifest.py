"""The file that says what a store of features holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.checksummed import Damaged, json_object
from xdm_ft.storage.digests import digest

MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a store without its checksum. Raises `Damaged`, or `FileNotFoundError`."""
    path = folder / MANIFEST
    try:
        manifest = json_object(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from error
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise Damaged("its checksum differs")
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    whole = {**manifest, "checksum": _checksum(manifest)}
    replace_text(folder / MANIFEST, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def _checksum(manifest: Mapping[str, Any]) -> str:
    return digest(json.dumps(manifest, sort_keys=True), bits=128)
