"""Listing, checking and pruning the cache. Only folders whose manifest is ours are touched, and only files of ours."""

from __future__ import annotations

import os
import time
from collections.abc import Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout
from safetensors import SafetensorError, safe_open

from xdm_ft.features.cache import MANIFEST, SHARDS, WHAT, lock_file, open_shard, read_manifest
from xdm_ft.features.key import SCHEMA, key_of
from xdm_ft.images.loader import DTYPES
from xdm_ft.storage.atomic import UNFINISHED, UNFINISHED_TENSORS, disk_errors
from xdm_ft.storage.cache_root import one_at_a_time
from xdm_ft.storage.lines import Damaged

SECONDS_PER_DAY = 86400.0
OURS = (SHARDS, f".*{UNFINISHED}", UNFINISHED_TENSORS)  # files of a store besides its manifest


@dataclass(frozen=True)
class File:
    """A shard as one sees it without opening it."""

    path: Path
    bytes: int
    last_used: float  # seconds since 1970
    is_own: bool  # of the user who asks


@dataclass(frozen=True)
class Cached:
    """A store of the cache."""

    folder: Path
    manifest: dict[str, Any]
    files: list[File]

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def is_outdated(self) -> bool:
        """Whether another version wrote it, so that nothing reads it."""
        return bool(self.manifest["schema"] != SCHEMA)

    @property
    def plain_key(self) -> str:
        """The key of its plain view, by which runs refer to all views of features."""
        others = ("what", "key", "width", "created", "view")  # as `Store` writes it
        return key_of({name: part for name, part in self.manifest.items() if name not in others})

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def last_used(self) -> float:
        return max((file.last_used for file in self.files), default=0.0)

    def images(self) -> int:
        """Reads the header of every shard; a damaged one counts nothing."""
        count = 0
        for file in self.files:
            with suppress(SafetensorError, OSError), safe_open(file.path, framework="numpy") as shard:
                count += shard.get_slice("features").get_shape()[0]
        return count


def stores(cache: Path) -> list[Cached]:
    """The stores of the cache, last used first; none if the folder does not exist."""
    cached_stores = []
    for folder in cache.iterdir() if cache.is_dir() else ():
        try:
            manifest = read_manifest(folder) if folder.is_dir() and not folder.is_symlink() else {}
        except (FileNotFoundError, Damaged):
            continue  # of another program; or one of ours, which the next run that uses it repairs
        if manifest.get("what") != WHAT:
            continue
        files = []
        for path in folder.glob(SHARDS):
            with suppress(FileNotFoundError):  # pruned since it was listed
                status = path.lstat()
                files.append(File(path, status.st_size, status.st_mtime, _is_own(status)))
        cached_stores.append(Cached(folder, manifest, files))
    return sorted(cached_stores, key=lambda store: -store.last_used)


def verify(store: Cached) -> list[str]:
    """Reads all files of a store and returns one line for each that is damaged.

    Nothing is repaired: the next run that uses the store does that.
    """
    faults = []
    for file in sorted(store.files, key=lambda file: file.path):
        try:
            open_shard(file.path, store.key, store.manifest["width"], DTYPES[store.manifest["precision"]]).check()
        except FileNotFoundError:
            continue  # pruned since it was listed
        except Damaged as error:
            faults.append(f"{file.path.name} is damaged ({error})")
    return faults


def prune(
    cache: Path,
    *,
    unused_days: float | None = None,
    max_bytes: int | None = None,
    referenced: Set[str] | None = None,
) -> list[File]:
    """Deletes shards and returns them: those not used for `unused_days`, those of features whose key is not in
    `referenced`, nor that of their plain view, and then those not used for longest, until at most `max_bytes` remain.
    None: the limit does not apply.

    Stores for which a process computes features now, and files of other users, are kept. A shard that a process only
    reads may be deleted: files that are mapped into memory stay readable. Raises `UserError` without permission.
    """
    removed, locked = list[File](), set[Path]()
    with ExitStack() as locks:
        for store in stores(cache):
            with suppress(Timeout):  # a run fills it
                locks.enter_context(one_at_a_time(lock_file(store.folder), wait=False))
                locked.add(store.folder)
        # read again: before it was locked, a run may have used a store, and another prune may have removed it
        unlocked = [store for store in stores(cache) if store.folder in locked]
        unwanted = {
            file.path
            for store in unlocked
            for file in store.files
            if (unused_days is not None and time.time() - file.last_used > unused_days * SECONDS_PER_DAY)
            or (referenced is not None and referenced.isdisjoint((store.key, store.plain_key)))
        }
        files = [file for store in unlocked for file in store.files if file.is_own]
        # all stores count for the limit, also those that this prune may not touch
        kept = sum(store.bytes for store in stores(cache))
        for file in sorted(files, key=lambda file: (file.path not in unwanted, file.last_used)):
            if file.path in unwanted or (max_bytes is not None and kept > max_bytes):
                with disk_errors(file.path):
                    file.path.unlink(missing_ok=True)
                kept -= file.bytes
                removed.append(file)
        for store in unlocked:
            _remove_if_empty(store.folder)
    return removed


def _is_own(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()  # Windows tells no owner


def _remove_if_empty(folder: Path) -> None:
    """Removes a store without shards, unless it is another user's or there are files in it that are not ours."""
    if not _is_own(folder.stat()) or any(folder.glob(SHARDS)):
        return
    with disk_errors(folder):
        for pattern in OURS:
            for left in folder.glob(pattern):
                left.unlink()
        if [path.name for path in folder.iterdir()] == [MANIFEST]:
            (folder / MANIFEST).unlink()
            folder.rmdir()
