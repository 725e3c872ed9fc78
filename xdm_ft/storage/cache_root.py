"""The folder of the cache: where it is, its locks, and arrays that took long to make, which are kept in it."""

from __future__ import annotations

import logging
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from filelock import SoftFileLease, Timeout

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage import digest
from xdm_ft.storage.atomic import disk_errors, file_mode, is_writable, replace_file
from xdm_ft.storage.names import expand_user

logger = logging.getLogger("xdm_ft")
_Arrays = Mapping[str, np.ndarray]

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path of s3://bucket has one slash
LOCK_SECONDS = 60.0  # without a sign of life, after which a process of another machine counts as killed
POLL_SECONDS = 0.2


def cache_root(folder: Path | None = None) -> Path:
    """Returns the folder of the cache: `folder`, $XDM_FT_CACHE or the default. Raises `UserError` for an address."""
    path = folder or os.environ.get("XDM_FT_CACHE") or "~/.cache/xdm_ft/features"
    if REMOTE.match(str(path)):
        key = "XDM_FT_CACHE" if folder is None else "features.dir"
        raise UserError(
            f"{key}: {path} is an address; the cache needs a file system with locks and atomic renames: "
            "name a folder of this machine or of a shared disk"
        )
    return expand_user(path, "features.dir")


@contextmanager
def one_at_a_time(path: Path, waiting: str = "", wait: bool = True) -> Iterator[None]:
    """Context that one process is in at a time, of those that see the lock file `path`.

    A killed process delays others on its machine by nothing, and on other machines by `LOCK_SECONDS` at most: the lock
    is a file that its holder touches, so that a file system needs no locks of its own. A process that was paused for
    longer, or whose machine was, may find itself here together with another one. Whoever must wait logs `waiting`; not
    `wait`: raises `filelock.Timeout`. Raises `UserError` if the file cannot be written.

    Not for a run directory or the file of a prediction, where two processes would do harm: their locks are of the
    system, and hold however long a process is paused. A training that a process takes (`RunDirectory.claim`) is no
    lock: it stays taken when it is finished.
    """
    with disk_errors(path):
        mode = file_mode(path.parent)
        lock = SoftFileLease(path, lease_duration=LOCK_SECONDS, mode=mode, poll_interval=POLL_SECONDS)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not wait:
                raise
            if waiting:
                logger.info("%s", waiting)
            with pulse.waiting():
                lock.acquire()
    try:
        yield
    finally:
        lock.release()


def remembered(key: str, make: Callable[[], _Arrays]) -> _Arrays:
    """Returns what `make` returned for this key, or returns now. `key` names all that the arrays depend on.

    Of processes that ask at once, one makes them and the others wait. A folder that cannot be written remembers
    nothing.
    """
    path = cache_root() / "indexes" / f"{digest(key, bits=128)}.npz"
    if (arrays := _read(path)) is not None:
        return arrays
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.debug("%s: %s", path.parent, error)
    with ExitStack() as alone:
        if is_writable(path.parent):
            try:
                alone.enter_context(one_at_a_time(path.with_suffix(".lock")))
            except UserError as error:  # a full disk, which the mode of the folder does not show
                logger.debug("%s", error)
        # another process may have made them while this one waited for the lock
        if (arrays := _read(path)) is not None:
            return arrays
        made = make()

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:  # a path would get the suffix .npz
                np.savez_compressed(file, allow_pickle=False, **made)

        try:
            # a full disk is no fault here: the arrays are at hand, and the next process makes them again
            replace_file(path, write)
        except UserError as error:
            logger.debug("%s", error)
    return made


def _read(path: Path) -> _Arrays | None:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}  # each has a checksum, which is verified
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("%s is damaged (%s): making it again", path, error)
        return None
