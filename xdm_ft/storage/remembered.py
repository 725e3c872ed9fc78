"""Arrays that took long to make, kept in the folder `indexes` of the cache until they are made from something else."""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.atomic import replace_file
from xdm_ft.storage.cache_root import cache_root
from xdm_ft.storage.digests import digest

logger = logging.getLogger("xdm_ft")
Arrays = Mapping[str, np.ndarray]


def remembered(key: str, make: Callable[[], Arrays]) -> Arrays:
    """Returns what `make` returned for this key, or returns now. `key` names all that the arrays depend on.

    Of processes that ask at once, one makes them and the others wait. A folder that can not be written remembers
    nothing.
    """
    path = cache_root() / "indexes" / f"{digest(key, bits=128)}.npz"
    if (found := _read(path)) is not None:
        return found
    with _alone(path.with_suffix(".lock")):
        if (found := _read(path)) is not None:
            return found
        made = make()
        try:
            replace_file(path, lambda temporary: _write(temporary, made))
        except UserError as error:
            logger.debug("%s", error)
    return made


def _read(path: Path) -> Arrays | None:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}  # each has a checksum, which is verified
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("%s is damaged (%s): making it again", path, error)
        return None


def _write(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:  # a path would get the suffix .npz
        np.savez_compressed(file, allow_pickle=False, **arrays)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Context that one process is in at a time. It is no lock in a folder that can not be written."""
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pulse.waiting():
            lock.acquire()
    except OSError as error:
        logger.debug("%s: %s", path, error)
    try:
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)
        lock.release()
