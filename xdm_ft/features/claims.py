"""Which process computes what: the claims in a store's folder, and the lock of the cache."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from xdm_ft.features.shards import Contents
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import disk_errors

LOCK_SECONDS = 60.0  # at most, for another process that claims images


class Claim:
    """A locked file with the contents that this process computes. Made and changed while the cache is locked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"claim-{uuid.uuid4().hex}"
        self._lock = FileLock(self.path, mode=file_mode(folder))
        with disk_errors(self.path):
            self._lock.acquire(timeout=0)

    def add(self, contents: Contents) -> None:
        with disk_errors(self.path), self.path.open("ab") as file:
            file.write(contents.tobytes())

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
        self._lock.release()


def living_claims(folder: Path, own: Path | None = None) -> Iterator[Contents]:
    """Yields what each living process claims in a store's folder, except in the file `own`. Removes other claims.

    The cache must be locked.
    """
    for path in folder.glob("claim-*"):
        if path == own:
            continue
        try:
            with disk_errors(path), FileLock(path, timeout=0):
                path.unlink()  # its process was killed
        except Timeout:
            claimed = path.read_bytes()
            yield np.frombuffer(claimed[: len(claimed) // 16 * 16], "S16")  # whole hashes, should its disk have filled


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Context in which no other process claims images or prunes. Raises `UserError` if it must wait for a minute."""
    path = cache / "store.lock"
    lock = FileLock(path, timeout=LOCK_SECONDS, mode=file_mode(cache))
    try:
        with disk_errors(path):
            lock.acquire()
    except Timeout as error:
        raise UserError(
            f"{path}: another process has held this lock for {LOCK_SECONDS:.0f} s; stop it, or set features.dir"
        ) from error
    try:
        yield
    finally:
        lock.release()


def file_mode(folder: Path) -> int:
    """Returns the permissions of a file that processes share: those for whom the folder is may read and write it."""
    return folder.stat().st_mode & 0o666
