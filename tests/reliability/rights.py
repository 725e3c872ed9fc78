"""A process that is subject to the permissions of files, as a user is; root is not."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION_3 = 0x20080522  # linux/capability.h
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_Header, _Data = ctypes.c_uint32 * 2, ctypes.c_uint32 * 6  # data: effective, permitted, inheritable; twice


@contextmanager
def of_a_user() -> Iterator[None]:
    """Context in which this thread, and those that it starts, can not read or write against a file's permissions."""
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root can give up its rights for a time on Linux only")
    libc, header, data = ctypes.CDLL(None, use_errno=True), _Header(_VERSION_3, 0), _Data()
    assert libc.capget(header, data) == 0
    before = data[0]
    data[0] = before & ~_OVERRIDES
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = before
        assert libc.capset(header, data) == 0
