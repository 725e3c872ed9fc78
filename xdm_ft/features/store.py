"""Where cached features lie: `<cache>/<key>/manifest.json` and `shard-00000.safetensors`, `shard-00001.safetensors`, …

manifest.json:

    what, key, created      what this folder is, its own name, and when it was begun (UTC)
    schema … versions       everything that the key is made of (`ingredients`)
    summary                 {"domains": {name: images}, "classes": [name, …]}
    width, batch_size       K, and the batch size of the run that began it
    complete                whether all shards are there
    unreadable              {row: why its image does not decode}
    shards                  [{"file", "rows", "xxh3"}, …] in the order of the rows
    checksum                of all the above

A shard holds `features` [rows, K] and proves itself by what is in its own header, so that an extraction that was
killed, or a manifest that was damaged, costs no finished shard. Everything is written whole or not at all, for its
user's eyes only.
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
from xdm_ft.features.shards import Grid, Shard, open_shard, write_shard
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.checksummed import Damaged, json_object
from xdm_ft.storage.digests import digest

logger = logging.getLogger("xdm_ft")

MANIFEST = "manifest.json"


def cache_folder(settings: FeatureSettings) -> Path:
    """The folder of the cache, made with access for its user only where it did not exist."""
    default = os.environ.get("XDM_FT_CACHE") or "~/.cache/xdm_ft/features"
    folder = Path(settings.dir or default).expanduser().absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"features.dir: {folder} can not be made ({error.strerror}); set features.dir or XDM_FT_CACHE"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"features.dir: {folder} can not be written; set features.dir or XDM_FT_CACHE")
    return folder


class Entry:
    """One set of features on disk, shared by every process that needs it. Shards are opened as they appear."""

    def __init__(self, cache: Path, key: str, grid: Grid, width: int, dtype: torch.dtype) -> None:
        self.folder, self.key, self.grid = cache / key, key, grid
        self.bytes_per_row = width * dtype.itemsize
        self.shards: dict[int, Shard] = {}
        self._reported: set[int] = set()
        self.manifest = self._own_manifest()

    def _own_manifest(self) -> dict[str, Any] | None:
        try:
            return read_manifest(self.folder)
        except FileNotFoundError:
            return None
        except Damaged as error:
            logger.warning("%s is damaged (%s): written again from the shards", self.folder / MANIFEST, error)
            return None

    def path(self, number: int) -> Path:
        return self.folder / shard_name(number)

    def missing(self) -> list[int]:
        """The shards that are still to be computed. Opens, and checks, those that are new."""
        return [number for number in range(len(self.grid)) if not self._opened(number)]

    def _opened(self, number: int) -> bool:
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
        """The right to compute a shard, until released or this process ends; None where it is taken or done."""
        with self._writing():
            lock = FileLock(self.folder / f"{shard_name(number)}.lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                return None
        if self._opened(number):
            lock.release()
            return None
        return lock

    def write(self, number: int, features: Tensor, unreadable: Mapping[int, str]) -> None:
        """Adds a shard (features [rows, K] in the stored precision). It is on the disk when this returns."""
        path = self.path(number)
        with self._writing():
            write_shard(path, features, unreadable, self.key, number)
        try:
            self.shards[number] = open_shard(path, self.key, number)
        except Damaged as error:
            raise UserError(f"{path}: reads back otherwise than it was written ({error}); check the disk") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """The folder is there, anew where another process has cleared the cache; a full disk is told with numbers."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            yield
        except (OSError, UserError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full() from error
            raise

    def require_space(self, besides: int = 0) -> None:
        """Raises `UserError` where the missing shards, and so many bytes besides, do not fit on the disk."""
        if self.needed + besides > shutil.disk_usage(self.folder.parent).free:
            raise self._full(besides)

    def images(self, numbers: Iterable[int]) -> int:
        """How many images these shards hold."""
        return sum(len(self.grid.span(number)) for number in numbers)

    @property
    def needed(self) -> int:
        """Bytes of the missing shards."""
        return (self.grid.rows - self.images(self.shards)) * self.bytes_per_row

    def _full(self, besides: int = 0) -> UserError:
        free = shutil.disk_usage(self.folder.parent).free
        return UserError(
            f"{self.folder}: the disk is full: {(self.needed + besides) / 1e6:,.1f} MB more are needed for features, "
            f"{free / 1e6:,.1f} MB are free; make room (xdm-ft cache prune), or set features.dir to another disk, "
            "and run the same command again"
        )

    def describe(self, about: Mapping[str, object]) -> None:
        """Writes the manifest where it is not up to date, and marks the entry as used now.

        `about` says what the features are of. Files that killed processes left are removed from a complete entry.
        """
        complete = len(self.shards) == len(self.grid)
        shards = [
            {"file": shard_name(number), "rows": len(shard.features), "xxh3": shard.digest}
            for number, shard in sorted(self.shards.items())
        ]
        current = self.manifest is not None and self.manifest["complete"] and self.manifest["shards"] == shards
        if not current:
            created = self.manifest["created"] if self.manifest else datetime.now(UTC).isoformat(timespec="seconds")
            unreadable = {str(row): reason for row, reason in self.unreadable.items()}
            state = {"complete": complete, "unreadable": unreadable, "shards": shards}
            head = {"what": "image features, cached by xdm_ft; safe to delete", "key": self.key, "created": created}
            with self._writing():
                self.manifest = _write_manifest(self.folder, {**head, **about, **state})
        if complete:
            for leftover in (*self.folder.glob("shard-*.lock"), *self.folder.glob(".shard-*")):
                leftover.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another process clears the cache; what is mapped here stays
            os.utime(self.folder / MANIFEST)

    @property
    def unreadable(self) -> dict[int, str]:
        """Row → why its image does not decode, over the shards that are there."""
        return {row: reason for _, shard in sorted(self.shards.items()) for row, reason in shard.unreadable.items()}


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an entry, checked against its checksum. Raises `Damaged`, or `FileNotFoundError`."""
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
