"""Arrays that took long to make, kept in the folder `indexes` of the cache until they are made from something else."""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from xdm_ft.errors import UserError
from xdm_ft.storage.atomic import replace_file
from xdm_ft.storage.cache_root import cache_root
from xdm_ft.storage.digests import digest

logger = logging.getLogger("xdm_ft")
Arrays = Mapping[str, np.ndarray]


def remembered(key: str, make: Callable[[], Arrays]) -> Arrays:
    """Returns what `make` returned for this key, or returns now. `key` names all that the arrays depend on.

    A folder that can not be written remembers nothing.
    """
    path = cache_root() / "indexes" / f"{digest(key, bits=128)}.npz"
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}  # each has a checksum, which is verified
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("%s is damaged (%s): making it again", path, error)
    made = make()
    try:
        replace_file(path, lambda temporary: _write(temporary, made))
    except UserError as error:
        logger.debug("%s", error)
    return made


def _write(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:  # a path would get the suffix .npz
        np.savez_compressed(file, allow_pickle=False, **arrays)
