"""How features are stored: one row per image, for ever.

`<cache>/<key>/` is the store of one encoder, preprocessing, precision and view. It holds

    manifest.json           what the features are: a line for people, the key with all of its parts, when it was begun
                            (UTC), the width K, and a checksum of all this
    shard-<hash>.safetensors, …   features with the hashes of their images' contents; `xdm_ft.features.shards`
    claim-<id>              of a process that computes features: the contents that it computes, locked while it lives

A data set is a list of contents: order, names, domains and labels of images are no part of a store, and data sets that
share images share their features. Shards are only ever added, so a killed process loses at most the shards that it was
computing. Every file is written atomically. Claims, the manifest and pruning are under one lock, `<cache>/store.lock`,
which no process holds for long.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache_key import key_of
from xdm_ft.features.claims import Claim, living_claims, locked
from xdm_ft.features.manifest import MANIFEST, read_manifest, write_manifest
from xdm_ft.features.shards import ContentIndex, Contents, Shard, open_shard, write_shard
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.progress import Progress, progress, pulse
from xdm_ft.storage.atomic import disk_errors, remove_unfinished
from xdm_ft.storage.cache_root import cache_root
from xdm_ft.storage.checksummed import Damaged

logger = logging.getLogger("xdm_ft")

SHARDS = "shard-*.safetensors"
DECODED = "decoded"  # folder of the cache with the stores of `xdm_ft.features.decoding`
WAIT_SECONDS = 0.5  # between checks whether another process has finished a shard
WHAT = "image features, cached by xdm_ft; safe to delete"


def cache_folder(settings: FeatureSettings) -> Path:
    """Returns the folder of the cache. Creates it, for its user only, if it does not exist.

    Raises `UserError` if it can not be created or read. A folder that can only be read serves what is cached there.
    """
    folder = cache_path(settings)
    remedy = "set features.dir or XDM_FT_CACHE to a folder of your own"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"features.dir: {folder} can not be created ({error.strerror}); {remedy}") from error
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        raise UserError(f"features.dir: {folder} can not be read; {remedy}")
    return folder


def cache_path(settings: FeatureSettings) -> Path:
    """Returns the path of the cache's folder, which may not exist."""
    return cache_root(settings.dir).absolute()


def is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


class Store:
    """The features of M different images on disk, shared by all processes that need them."""

    def __init__(
        self, cache: Path, parts: Mapping[str, Any], contents: Contents, width: int, dtype: torch.dtype
    ) -> None:
        """`parts`: all that determines the features, as `key_parts` returns it. `contents` [M]: no two are equal."""
        self.key, self._parts = key_of(parts), parts
        self.cache, self.folder, self.contents = cache, cache / self.key, contents
        self.width, self.dtype = width, dtype
        self.shards: list[Shard] = []  # that hold some of the images
        self.shard_of = np.full(len(contents), -1, np.int32)  # [M], −1: not computed yet
        self.row_of = np.zeros(len(contents), np.int64)  # [M], row of the shard
        cut = cut_in(parts)
        self.what = "features" if cut is None else f"activations before {cut}"
        self.instead = "" if cut is None else ", or features.cut: compute in a new run"
        self._about = {"what": WHAT, "key": self.key, **parts, "width": width}
        self._wanted = ContentIndex(contents)
        self._seen: set[str] = set()  # names of shards that were opened, or are damaged
        self._damaged: dict[Path, Damaged] = {}
        self._claim: Claim | None = None
        self._claimed = np.zeros(len(contents), bool)  # [M], by this process

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled is the same store, of which nothing has been read."""
        return Store, (self.cache, self._parts, self.contents, self.width, self.dtype)

    def part(self, numbers: np.ndarray) -> ClaimedPart:
        """Returns the store of these images, for whom the process that has claimed them lets compute them."""
        return ClaimedPart(self.cache, self._parts, self.contents[numbers], self.width, self.dtype)

    @property
    def claim_file(self) -> Path:
        """The file that says what this process has claimed: a process that sees it sees this folder."""
        assert self._claim is not None, "something is claimed"
        return self._claim.path

    def missing(self) -> np.ndarray:
        """Returns the numbers (int64, in 0…M−1) of the images that are still to be computed. Opens new shards."""
        self._open([path for path in sorted(self.folder.glob(SHARDS)) if path.name not in self._seen])
        return np.flatnonzero(self.shard_of < 0)

    def open(self, names: Iterable[str]) -> None:
        """Opens these shards of another machine. A network disk may list them only a minute after they were written."""
        paths = [self.folder / name for name in names if name not in self._seen]
        self._open([path for path in paths if path.exists()])

    def _open(self, paths: Sequence[Path]) -> None:
        """Takes the missing images from these shards. All are looked up at once, as one by one takes much longer."""
        shards = list[Shard]()
        for path in paths:
            self._seen.add(path.name)
            with suppress(FileNotFoundError):  # pruned since it was listed
                try:
                    shards.append(open_shard(path, self.key, self.width, self.dtype))
                except Damaged as error:
                    self._damaged[path] = error
        for shard, numbers in zip(shards, self._wanted.find_each([shard.contents for shard in shards]), strict=True):
            self._take(shard, numbers)

    def _take(self, shard: Shard, numbers: np.ndarray) -> None:
        """Takes the missing images from a shard; `numbers` [n] are its images' here, −1: not of this data set."""
        rows = np.flatnonzero(numbers >= 0)
        rows = rows[self.shard_of[numbers[rows]] < 0]
        if not len(rows):
            return
        try:
            shard.check()
        except Damaged as error:
            self._damaged[shard.path] = error
            return
        self.shard_of[numbers[rows]], self.row_of[numbers[rows]] = len(self.shards), rows
        self.shards.append(shard)
        with suppress(OSError):  # `cache prune` goes by this time; another user's shard can not be touched
            os.utime(shard.path)

    @property
    def bytes_needed(self) -> int:
        """Bytes of the missing features."""
        return int((self.shard_of < 0).sum()) * self.width * self.dtype.itemsize

    def require_space(self, extra_bytes: int = 0) -> None:
        """Raises `UserError` if the missing features and `extra_bytes` do not fit on the disk."""
        if self.bytes_needed + extra_bytes > shutil.disk_usage(self.cache).free:
            raise self._disk_full(extra_bytes)

    def _disk_full(self, extra_bytes: int = 0) -> UserError:
        free = shutil.disk_usage(self.cache).free
        return UserError(
            f"{self.folder}: the disk is full: {(self.bytes_needed + extra_bytes) / 1e6:,.1f} MB more are needed for "
            f"{self.what}, {free / 1e6:,.1f} MB are free; make room (xdm-ft cache prune) or set features.dir to "
            f"another disk{self.instead}, and run the same command again"
        )

    def unclaimed(self) -> np.ndarray:
        """Returns the numbers of the missing images that no living process computes."""
        with self._locked():
            return self._unclaimed()

    def _unclaimed(self) -> np.ndarray:
        missing, claimed = self.missing(), self._claimed.copy()
        for theirs in living_claims(self.folder, None if self._claim is None else self._claim.path):
            numbers = self._wanted.find(theirs)
            claimed[numbers[numbers >= 0]] = True
        return missing[~claimed[missing]]

    def claim(self, count: int) -> np.ndarray:
        """Returns the numbers of at most `count` missing images that this process is to compute; none if none is free.

        They stay claimed until they are written, `release` is called, or this process ends, however it ends.
        """
        with self._locked():
            self._write_manifest()
            self._remove_damaged()
            numbers = self._unclaimed()[:count]
            if len(numbers):
                self._claim = self._claim or Claim(self.folder)
                self._claim.add(self.contents[numbers])
                self._claimed[numbers] = True
        return numbers

    def release(self) -> None:
        """Lets other processes compute what this one has claimed and not written."""
        if self._claim is not None:
            with self._locked():
                self._claim.release()
                self._claimed[:] = False
                if not list(living_claims(self.folder)):
                    remove_unfinished(self.folder)  # of killed processes
            self._claim = None

    def write(self, numbers: np.ndarray, features: Tensor, unreadable: Mapping[int, str]) -> Path:
        """Writes a shard (features [n,K] in the stored precision) and returns its path. Another thread may call this.

        `unreadable`: row of `features` → why its image does not decode.
        """
        with self._writing():
            return write_shard(self.folder, self.key, self.contents[numbers], features, unreadable)

    def add(self, path: Path, numbers: np.ndarray) -> None:
        """Reads a shard back that `write` has written, and checks it."""
        self._open([path])
        if path in self._damaged or (self.shard_of[numbers] < 0).any():
            fault = self._damaged.get(path, "it is gone")
            raise UserError(f"{path}: differs from what was written to it ({fault}); check the disk")

    def unreadable(self) -> dict[int, str]:
        """Number of an image → why it does not decode."""
        found: dict[int, str] = {}
        for place, shard in enumerate(self.shards):
            if shard.unreadable:
                numbers = np.flatnonzero(self.shard_of == place)
                of_row = dict(zip(self.row_of[numbers].tolist(), numbers.tolist(), strict=True))
                found |= {of_row[row]: reason for row, reason in shard.unreadable.items() if row in of_row}
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Context in which no other process claims images or prunes. Creates the store's folder."""
        with locked(self.cache):
            with self._writing():
                if not self.folder.exists():
                    self.folder.mkdir()
                    self.folder.chmod(self.cache.stat().st_mode & 0o777)  # for whom the cache is
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context for writing to the folder. Raises `UserError` for a full disk or without permission."""
        try:
            with disk_errors(self.folder):
                yield
        except UserError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._disk_full() from error
            raise

    def _write_manifest(self) -> None:
        try:
            manifest = read_manifest(self.folder)
            if all(manifest.get(key) == value for key, value in json.loads(json.dumps(self._about)).items()):
                return
            logger.warning("%s describes other features: writing it again", self.folder / MANIFEST)
        except FileNotFoundError:
            pass
        except Damaged as error:
            logger.warning("%s is damaged (%s): writing it again", self.folder / MANIFEST, error)
        with self._writing():
            write_manifest(self.folder, {**self._about, "created": datetime.now(UTC).isoformat(timespec="seconds")})

    def _remove_damaged(self) -> None:
        """Removes shards that are damaged, unless another process has written them again."""
        for path in list(self._damaged):
            error = self._damaged.pop(path)
            self._open([path])
            if path in self._damaged:
                logger.warning("%s is damaged (%s): removing it, and computing its images again", path, error)
                del self._damaged[path]
                with disk_errors(path):
                    path.unlink(missing_ok=True)
            self._seen.discard(path.name)  # it may be written again


class ClaimedPart(Store):
    """Some images of a store, which another process has claimed for this one: it needs no lock.

    It does not read the features of other images.
    """

    def unclaimed(self) -> np.ndarray:
        missing = self.missing()
        return missing[~self._claimed[missing]]

    def claim(self, count: int) -> np.ndarray:
        numbers = self.unclaimed()[:count]
        self._claimed[numbers] = True
        return numbers

    def release(self) -> None:
        self._claimed[:] = False


def complete(store: Store, run: Callable[[Progress], int], what: str, show: bool) -> int:
    """Computes what a store lacks, or waits for processes that do. Returns how many images this process computed.

    `run` computes the missing images that no other process computes, and returns their number. `what`: for the bar.
    """
    computed_here, wait_logged, missing = 0, False, len(store.missing())
    if not missing:
        return 0
    with progress(what, missing, "images", show) as bar:
        while missing:
            computed = run(bar)
            computed_here += computed
            still_missing = len(store.missing())
            by_others = missing - still_missing - computed
            if by_others:
                bar.advance(by_others, "another process helps")
            elif still_missing and not computed:
                if not wait_logged:
                    logger.info("%s: waiting for another process to compute %s", what, plural(still_missing, "image"))
                wait_logged = True
                with pulse.waiting():
                    time.sleep(WAIT_SECONDS)
            missing = still_missing
    return computed_here


def cut_in(parts: Mapping[str, Any]) -> str | None:
    """Returns the module above the cut whose activations the store of this key or manifest holds; None: features."""
    cut: str | None = parts["encoder"].get("cut") if "encoder" in parts else None
    return cut
