"""Memory: keeps what training has freed for its next step, and makes one line of an out-of-memory error."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from xdm_ft.errors import UserError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes, glibc's limit


@cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step instead of returning it to the system (Linux only).

    Each step on cached features allocates and frees the same blocks of a few megabytes. If they are returned, the next
    step has a page fault per 4 KB: gathering 6 MB took 2 to 5 ms instead of 0.2.
    """
    if not sys.platform.startswith("linux"):
        return
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):  # musl has none
        c_library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        c_library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def out_of_memory_as_user_error(what: str, remedy: str) -> Iterator[None]:
    """Raises a `UserError` of one line in place of an out-of-memory error, of the machine or of a GPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        place = _exhausted(error)
        if place is None:
            raise
        raise UserError(f"{what}: does not fit {place}; {remedy}") from error


def _exhausted(error: MemoryError | RuntimeError) -> str | None:
    """Returns a name of the memory that has run out; None: the error is another one."""
    # torch has an error type for the memory of devices only
    if isinstance(error, torch.OutOfMemoryError):
        return "the memory of the GPU"
    if isinstance(error, MemoryError) or re.search(r"DefaultCPUAllocator.*tried to allocate", str(error)):
        return "the memory of this machine"
    return None
