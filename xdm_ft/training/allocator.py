"""What the C library's allocator does with memory that training has freed."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes, glibc's limit


@cache
def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next step, where it would hand it back to the system (Linux only).

    Each step on cached features allocates and frees the same blocks of a few megabytes. Handed back, they cost a page
    fault per 4 KB at the next step: gathering 6 MB took 2 to 5 ms instead of 0.2.
    """
    if not sys.platform.startswith("linux"):
        return
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):  # musl has none
        c_library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        c_library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
