"""`xdm-ft cache`: what the feature cache holds, whether it is whole, and clearing it."""

from __future__ import annotations

import datetime
from pathlib import Path

from xdm_ft.errors import UserError
from xdm_ft.features import FeatureSettings
from xdm_ft.features.store import cache_folder
from xdm_ft.features.upkeep import Cached, entries, prune, verify

GIGABYTE = 10**9


def cache_folder_of(folder: str | None) -> Path:
    return cache_folder(FeatureSettings(dir=None if folder is None else Path(folder)))


def list_cache(folder: str | None) -> str:
    """A line per entry: key, size, last use, what it holds."""
    cache = cache_folder_of(folder)
    lines = [_line(entry) for entry in entries(cache)]
    return "\n".join(lines or [f"{cache}: nothing is cached"])


def verify_cache(folder: str | None) -> str:
    """Reads every file of the cache. Raises `UserError` with a line for each damaged or missing one."""
    cache = cache_folder_of(folder)
    found = entries(cache)
    faults = [f"{cache / entry.key}: {fault}" for entry in found for fault in verify(cache, entry.key)]
    if faults:
        raise UserError("\n".join([*faults, "a run that uses these features computes the damaged parts again"]))
    return f"{cache}: {len(found)} sets of features, all whole"


def prune_cache(folder: str | None, unused_days: float | None, max_gigabytes: float | None) -> str:
    """Removes what was not used for so many days, then the longest unused down to the size."""
    if unused_days is None and max_gigabytes is None:
        raise UserError("cache prune: say what may go: --unused-days N, --max-size GB, or both")
    max_bytes = None if max_gigabytes is None else int(max_gigabytes * GIGABYTE)
    removed = prune(cache_folder_of(folder), unused_days=unused_days, max_bytes=max_bytes)
    freed = sum(entry.bytes for entry in removed) / GIGABYTE
    return "\n".join([*(_line(entry) for entry in removed), f"{len(removed)} removed, {freed:.3f} GB freed"])


def _line(entry: Cached) -> str:
    used = datetime.datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
    manifest = entry.manifest
    what = "being written, or its manifest is damaged"
    if manifest is not None:
        encoder = manifest["encoder"]
        what = f"{encoder['component']} {encoder['model']}, {manifest['data']['images']} images"
        if "view" in manifest:
            what += f", view {manifest['view']['number']} of {manifest['view']['augmentation']}"
    return f"{entry.key}  {entry.bytes / GIGABYTE:8.3f} GB  last used {used}  {what}"
