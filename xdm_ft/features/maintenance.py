"""Listing, checking and clearing the cache."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from xdm_ft.features.shards import open_shard
from xdm_ft.features.store import MANIFEST, read_manifest, shard_name
from xdm_ft.storage.checksummed import Damaged

SECONDS_PER_DAY = 86400.0
_CLEARED = ".cleared-"


class Cached(NamedTuple):
    """One set of features in the cache."""

    key: str
    manifest: dict[str, Any] | None  # None where it is damaged or not there yet
    bytes: int
    last_used: float  # seconds since 1970


def entries(cache: Path) -> list[Cached]:
    """What the cache holds, last used first. A folder that does not exist holds nothing."""
    folders = [folder for folder in _folders(cache) if re.fullmatch("[0-9a-f]{32}", folder.name)]
    return sorted((_cached(folder) for folder in folders), key=lambda entry: -entry.last_used)


def _folders(cache: Path) -> list[Path]:
    return [folder for folder in cache.iterdir() if folder.is_dir()] if cache.is_dir() else []


def _cached(folder: Path) -> Cached:
    try:
        manifest = read_manifest(folder)
    except (FileNotFoundError, Damaged):
        manifest = None
    stamped = folder / MANIFEST
    last_used = (stamped if stamped.exists() else folder).stat().st_mtime
    return Cached(folder.name, manifest, sum(file.stat().st_size for file in folder.iterdir()), last_used)


def verify(cache: Path, key: str) -> list[str]:
    """Reads all files of an entry; a line for each that is damaged or missing. A run that uses it mends them."""
    folder, faults = cache / key, []
    shards = {int(path.name[6:11]): path for path in folder.glob("shard-*.safetensors")}
    try:
        manifest = read_manifest(folder)
        if manifest["complete"]:
            shards.update((number, folder / shard_name(number)) for number in range(len(manifest["shards"])))
    except FileNotFoundError:
        faults.append(f"{MANIFEST} is missing")
    except Damaged as error:
        faults.append(f"{MANIFEST} is damaged ({error})")
    for number, path in sorted(shards.items()):
        try:
            open_shard(path, key, number)
        except FileNotFoundError:
            faults.append(f"{path.name} is missing")
        except Damaged as error:
            faults.append(f"{path.name} is damaged ({error})")
    return faults


def prune(
    cache: Path,
    *,
    unused_days: float | None = None,
    max_bytes: int | None = None,
    referenced: Collection[str] | None = None,
) -> list[Cached]:
    """Removes entries not used for `unused_days` and those whose key is not `referenced`, then the longest unused until
    `max_bytes` remain; returns them.

    An entry that a process is computing stays. One that a process has open may go: what is mapped stays readable.
    """
    for leftover in _folders(cache):
        if leftover.name.startswith(_CLEARED):
            shutil.rmtree(leftover)
    removed = []

    def unwanted(entry: Cached) -> bool:
        too_old = unused_days is not None and time.time() - entry.last_used > unused_days * SECONDS_PER_DAY
        return too_old or (referenced is not None and entry.key not in referenced)

    kept = sum(entry.bytes for entry in entries(cache))
    for entry in sorted(reversed(entries(cache)), key=unwanted, reverse=True):  # then the longest unused first
        too_much = max_bytes is not None and kept > max_bytes
        if (unwanted(entry) or too_much) and not _in_work(cache / entry.key):
            # renamed first: a process that dies here leaves no half-deleted entry under its name
            gone = (cache / entry.key).rename(cache / f"{_CLEARED}{entry.key}")
            shutil.rmtree(gone)
            kept -= entry.bytes
            removed.append(entry)
    return removed


def _in_work(folder: Path) -> bool:
    for path in folder.glob("shard-*.lock"):
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            return True
    return False
