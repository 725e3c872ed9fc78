"""How features are stored: `<cache>/<key>/manifest.json` and `shard-00000.safetensors`, `shard-00001.safetensors`, …

manifest.json:

    what, key, created      a line for people, the key, and when the entry was created (UTC)
    schema … versions       all parts of the key (`key_parts`)
    summary                 {"domains": {name: images}, "classes": [name, …]}
    width, batch_size       K, and the batch size of the run that created the entry
    complete                whether all shards exist
    unreadable              {row: why its image does not decode}
    shards                  [{"file", "rows", "xxh3"}, …] in the order of the rows
    checksum                of all the above

A shard holds `features` [rows, K], and its header holds all that is needed to check it. So finished shards are not lost
when an extraction is killed or a manifest is damaged. Every file is written atomically. Only its user can read it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from xdm_ft.errors import UserError
from xdm_ft.features import FeatureSettings
from xdm_ft.features.shards import Shard, ShardLayout, open_shard, write_shard
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.checksummed import Damaged, json_object
from xdm_ft.storage.digests import digest

logger = logging.getLogger("xdm_ft")

MANIFEST = "manifest.json"


def cache_folder(settings: FeatureSettings) -> Path:
    """Returns the folder of the cache. Creates it, for its user only, if it does not exist.

    Raises `UserError` if it can not be created or written.
    """
    default = os.environ.get("XDM_FT_CACHE") or "~/.cache/xdm_ft/features"
    folder = Path(settings.dir or default).expanduser().absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"features.dir: {folder} can not be created ({error.strerror}); set features.dir or XDM_FT_CACHE"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"features.dir: {folder} can not be written; set features.dir or XDM_FT_CACHE")
    return folder


class Entry:
    """One set of features on disk, shared by all processes that need it. `missing` opens new shards of all of them."""

    def __init__(self, cache: Path, key: str, layout: ShardLayout, width: int, dtype: torch.dtype) -> None:
        self.folder, self.key, self.layout = cache / key, key, layout
        self.bytes_per_row = width * dtype.itemsize
        self.shards: dict[int, Shard] = {}  # number → opened and checked
        self._reported: set[int] = set()
        self.manifest: dict[str, Any] | None = None  # as read or written last
        try:
            self.manifest = read_manifest(self.folder)
        except FileNotFoundError:
            pass
        except Damaged as error:
            logger.warning("%s is damaged (%s): writing it again from the shards", self.folder / MANIFEST, error)

    def path(self, number: int) -> Path:
        return self.folder / shard_name(number)

    def missing(self) -> list[int]:
        """Returns the numbers of the shards that are still to be computed. Opens and checks those that are new."""
        return [number for number in range(len(self.layout)) if not self._open(number)]

    def _open(self, number: int) -> bool:
        """Opens a shard, unless it is open already. Returns False, with a warning, if it is damaged."""
        if number not in self.shards:
            try:
                self.shards[number] = open_shard(self.path(number), self.key, number)
            except FileNotFoundError:
                if self.manifest and self.manifest["complete"]:
                    self._report(number, "is missing")
            except Damaged as error:
                self._report(number, f"is damaged ({error})")
        return number in self.shards

    def _report(self, number: int, fault: str) -> None:
        if number not in self._reported:
            self._reported.add(number)
            logger.warning("%s %s: computing its %d images again", self.path(number), fault, self.images([number]))

    def claim(self, number: int) -> FileLock | None:
        """Returns a lock on a shard that is to be computed; None if another process has it, or the shard is finished.

        The lock is free again when it is released or when this process ends, however it ends.
        """
        with self._folder_to_write():
            lock = FileLock(self.folder / f"{shard_name(number)}.lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                return None
        if self._open(number):  # another process finished it before the lock was free
            lock.release()
            return None
        return lock

    def write(self, number: int, features: Tensor, unreadable: Mapping[int, str]) -> None:
        """Writes a shard (features [rows, K] in the stored precision) to the disk, reads it back and checks it."""
        path = self.path(number)
        with self._folder_to_write():
            write_shard(path, features, unreadable, self.key, number)
        try:
            self.shards[number] = open_shard(path, self.key, number)
        except Damaged as error:
            raise UserError(f"{path}: differs from what was written to it ({error}); check the disk") from error

    @contextmanager
    def _folder_to_write(self) -> Iterator[None]:
        """Around writing: creates the folder, which another process may have deleted, and reports a full disk."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            yield
        except (OSError, UserError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._disk_full() from error
            raise

    def require_space(self, extra_bytes: int = 0) -> None:
        """Raises `UserError` if the missing shards and `extra_bytes` do not fit on the disk."""
        if self.needed + extra_bytes > shutil.disk_usage(self.folder.parent).free:
            raise self._disk_full(extra_bytes)

    def images(self, numbers: Iterable[int]) -> int:
        """Number of images in these shards."""
        return sum(len(self.layout.span(number)) for number in numbers)

    @property
    def needed(self) -> int:
        """Bytes of the missing shards."""
        return (self.layout.rows - self.images(self.shards)) * self.bytes_per_row

    def _disk_full(self, extra_bytes: int = 0) -> UserError:
        free = shutil.disk_usage(self.folder.parent).free
        return UserError(
            f"{self.folder}: the disk is full: {(self.needed + extra_bytes) / 1e6:,.1f} MB more are needed for "
            f"features, {free / 1e6:,.1f} MB are free; make room (xdm-ft cache prune) or set features.dir to "
            "another disk, and run the same command again"
        )

    def update_manifest(self, description: Mapping[str, object]) -> None:
        """Writes the manifest if it is not up to date, and marks the entry as used now.

        `description`: the parts of the key and what else the manifest says of the features. From a complete entry, the
        lock files and temporary files that killed processes left are deleted.
        """
        complete = len(self.shards) == len(self.layout)
        shards = [
            {"file": shard_name(number), "rows": len(shard.features), "xxh3": shard.checksum}
            for number, shard in sorted(self.shards.items())
        ]
        current = self.manifest is not None and self.manifest["complete"] and self.manifest["shards"] == shards
        if not current:
            created = self.manifest["created"] if self.manifest else datetime.now(UTC).isoformat(timespec="seconds")
            unreadable = {str(row): reason for row, reason in self.unreadable.items()}
            state = {"complete": complete, "unreadable": unreadable, "shards": shards}
            head = {"what": "image features, cached by xdm_ft; safe to delete", "key": self.key, "created": created}
            with self._folder_to_write():
                self.manifest = _write_manifest(self.folder, {**head, **description, **state})
        if complete:
            for leftover in (*self.folder.glob("shard-*.lock"), *self.folder.glob(".shard-*")):
                leftover.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another process deleted the entry; what is mapped here stays readable
            os.utime(self.folder / MANIFEST)

    @property
    def unreadable(self) -> dict[int, str]:
        """Row → why its image does not decode, of all open shards."""
        return {row: reason for _, shard in sorted(self.shards.items()) for row, reason in shard.unreadable.items()}


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of an entry without its checksum. Raises `Damaged`, or `FileNotFoundError`."""
    manifest = json_object((folder / MANIFEST).read_bytes())
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise Damaged("its checksum differs")
    return manifest


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    whole = {**manifest, "checksum": _checksum(manifest)}
    replace_text(folder / MANIFEST, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    return digest(json.dumps(manifest, sort_keys=True), bits=128)
