"""The folder of the cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.user_paths import expanded

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path of s3://bucket has one slash


def cache_root(folder: Path | None = None) -> Path:
    """Returns the folder of the cache: `folder`, $XDM_FT_CACHE or the default. Raises `UserError` for an address."""
    path = folder or os.environ.get("XDM_FT_CACHE") or "~/.cache/xdm_ft/features"
    if REMOTE.match(str(path)):
        key = "XDM_FT_CACHE" if folder is None else "features.dir"
        raise UserError(
            f"{key}: {printable(path)} is an address; the cache needs a file system with locks and atomic renames: "
            "name a folder of this machine or of a shared disk"
        )
    return expanded(path, "features.dir")
