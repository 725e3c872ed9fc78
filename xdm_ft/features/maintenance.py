"""Listing, checking and pruning the cache."""

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
_BEING_DELETED = ".cleared-"  # beginning of the name of a folder whose deletion has begun


class Cached(NamedTuple):
    """One set of features in the cache."""

    key: str
    manifest: dict[str, Any] | None  # None if it is damaged or not written yet
    bytes: int
    last_used: float  # seconds since 1970


def entries(cache: Path) -> list[Cached]:
    """The entries of the cache, last used first; none if the folder does not exist."""
    folders = [folder for folder in _folders(cache) if re.fullmatch("[0-9a-f]{32}", folder.name)]
    return sorted((_cached(folder) for folder in folders), key=lambda entry: -entry.last_used)


def _folders(cache: Path) -> list[Path]:
    return [folder for folder in cache.iterdir() if folder.is_dir()] if cache.is_dir() else []


def _cached(folder: Path) -> Cached:
    try:
        manifest = read_manifest(folder)
    except (FileNotFoundError, Damaged):
        manifest = None
    manifest_path = folder / MANIFEST
    # each use sets the manifest's time of modification (`Entry.update_manifest`)
    last_used = (manifest_path if manifest_path.exists() else folder).stat().st_mtime
    return Cached(folder.name, manifest, sum(file.stat().st_size for file in folder.iterdir()), last_used)


def verify(cache: Path, key: str) -> list[str]:
    """Reads all files of an entry and returns one line for each damaged or missing file.

    Nothing is repaired: the next run that uses the entry does that.
    """
    folder, faults = cache / key, []
    # not only those of the manifest, which may be missing or damaged itself
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
    """Deletes entries and returns them: those not used for `unused_days`, those whose key is not in `referenced`, and
    then those not used for longest, until at most `max_bytes` remain. None: that limit does not apply.

    An entry that a process is computing is kept. One that a process only reads may be deleted: files that are mapped
    into memory stay readable.
    """
    for leftover in _folders(cache):
        if leftover.name.startswith(_BEING_DELETED):
            shutil.rmtree(leftover)
    removed = []

    def unwanted(entry: Cached) -> bool:
        too_old = unused_days is not None and time.time() - entry.last_used > unused_days * SECONDS_PER_DAY
        return too_old or (referenced is not None and entry.key not in referenced)

    kept = sum(entry.bytes for entry in entries(cache))
    for entry in sorted(reversed(entries(cache)), key=unwanted, reverse=True):
        # sorted() is stable: unwanted entries come first, and within both groups those not used for longest
        too_much = max_bytes is not None and kept > max_bytes
        if (unwanted(entry) or too_much) and not _is_being_computed(cache / entry.key):
            # renamed first: if this process is killed while deleting, no incomplete entry stays under the key
            renamed = (cache / entry.key).rename(cache / f"{_BEING_DELETED}{entry.key}")
            shutil.rmtree(renamed)
            kept -= entry.bytes
            removed.append(entry)
    return removed


def _is_being_computed(folder: Path) -> bool:
    """Whether a process has locked one of the shards. Lock files of killed processes are not locked any more."""
    for path in folder.glob("shard-*.lock"):
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            return True
    return False
