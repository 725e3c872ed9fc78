"""The states of image files, by which a change of a file is noticed without opening it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from xdm_ft.containers.files import ImageFiles
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.images.decode import OF_THE_MACHINE
from xdm_ft.images.loader import image_loader, loaded, own_cores
from xdm_ft.runtime.progress import pulse

ROWS_AT_ONCE = 1 << 14  # that a process looks at; the hash of the paths depends on it
_NO_FILE = (-1, -1, -1)


class Stamp(NamedTuple):
    """The state of a file by which a change is noticed."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class FileStates:
    """The states of N images that are files, and the hashes of those that are none."""

    stamps: np.ndarray  # int64 [N,3], the `Stamp` of each file; −1 for an image that is none, or has no state
    digests: dict[int, bytes]  # row → xxh3_128 of an image that is no file
    unreadable: dict[int, str]  # row → why its file has no state
    paths: bytes  # hash of the paths of all files


def file_states(dataset: ImageDataset) -> FileStates:
    """Returns the states of all images. Most of that time is spent in Python, so processes divide a long list."""
    blocks = [range(first, min(first + ROWS_AT_ONCE, len(dataset))) for first in range(0, len(dataset), ROWS_AT_ONCE)]
    workers = min(own_cores(), len(blocks)) if len(blocks) > 1 and isinstance(dataset, ImageFiles) else 0
    loader = image_loader(_StatesOf(dataset), workers, torch.device("cpu"), batch_size=None, sampler=blocks)
    found = FileStates(np.empty((len(dataset), 3), np.int64), {}, {}, b"")
    paths = xxhash.xxh3_128()
    for rows, of_block in zip(blocks, loaded(loader, "image files", "run the same command again"), strict=True):
        found.stamps[rows.start : rows.stop] = of_block.stamps
        found.digests.update(of_block.digests)
        found.unreadable.update(of_block.unreadable)
        paths.update(of_block.paths)
        pulse.beat()
    return FileStates(found.stamps, found.digests, found.unreadable, paths.digest())


@dataclass(frozen=True)
class _StatesOf(Dataset[FileStates]):
    """Item `rows` is the states of these images."""

    dataset: ImageDataset

    def __getitem__(self, rows: range) -> FileStates:
        stamps, paths = list[int](), list[str]()
        digests, unreadable = dict[int, bytes](), dict[int, str]()
        for row in rows:
            content = self.dataset.content(row)
            if isinstance(content, bytes):
                digests[row] = xxhash.xxh3_128_digest(content)
                stamps += _NO_FILE
                continue
            try:
                status = regular(content)
                stamps += (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                paths.append(absolute(content))
            except (OSError, ValueError) as error:  # ValueError: a path with a null byte
                unreadable[row] = reason(error)
                stamps += _NO_FILE
        # \0 is in no path
        hashed = xxhash.xxh3_128_digest(os.fsencode("\0".join(paths)))
        return FileStates(np.array(stamps, np.int64).reshape(-1, 3), digests, unreadable, hashed)


def absolute(path: str) -> str:
    return path if path.startswith(os.sep) else os.path.abspath(path)


def regular(path: str) -> os.stat_result:
    """Returns the status of a file. Raises `ValueError` if it is not a regular one, or `OSError`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")  # opening a pipe would block for ever
    return status


def reason(error: Exception) -> str:
    """Why a file can not be read. Raises `error` again if the machine is at fault (too many open files, no memory)."""
    if isinstance(error, OSError):
        if error.errno in OF_THE_MACHINE:
            raise error
        return error.strerror or str(error)
    return str(error)
