"""kernel.c, compiled."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from xdm_ft.compiled import library, share

SOURCE = Path(__file__).with_name("kernel.c")


@cache
def kernel() -> Any:
    """The library, typed: an int is an int64, a tensor its address. None where there is no compiler."""
    found = library(SOURCE)
    if found is not None:
        integer: Any = ctypes.c_int64
        address: Any = ctypes.c_void_p
        found.dividers.argtypes = [integer] * 3 + [address, integer, address]
        found.masks.argtypes = [integer] * 5 + [address] * 3 + [integer, address]
        found.mix.argtypes = [integer] * 4 + [address] * 8
        found.draw.argtypes = [integer] * 3 + [address, integer] + [address] * 4 + [integer, address] + [integer] * 3
        found.draw.argtypes += [address] * 6
    return found


def call(function: Any, items: int, elements: int, *arguments: Any) -> None:
    """`share`, where a function of kernel.c says by a number that it could not go on."""
    codes = share(function, items, elements, *arguments)
    if 1 in codes:
        raise IndexError("a class, domain or place in the batch is out of range")
    if 2 in codes:
        raise MemoryError("no memory for the scores of one sample")
