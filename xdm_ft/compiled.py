"""C sources of the package, compiled on demand by the system's compiler for the machine's own processor.

Nothing depends on it: who asks for a library must do without where there is no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from xdm_ft.errors import UserError
from xdm_ft.storage.atomic import replace_file

COMPILERS = ("cc", "gcc", "clang")  # the first that there is, unless the environment variable CC names one
# no contraction: a product and a sum round twice on every processor, as in torch
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-lm",
)
SECONDS = 60  # that a compiler may take
ELEMENTS_PER_THREAD = 1 << 17  # about 0.1 ms of work; a thread takes 0.05 ms to start on it

logger = logging.getLogger("xdm_ft")


class NotCompiled(Exception):
    """Its text says why."""


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """The library of a C source; None where it can not be had, which is logged once."""
    try:
        return ctypes.CDLL(str(compiled(source)))
    except (NotCompiled, OSError, UserError) as error:
        logger.info("%s is not compiled (%s): the same is computed by PyTorch, more slowly", source.name, error)
        return None


def compiled(source: Path) -> Path:
    """The compiled file, found in the user's cache or made there; processes that make it at once replace each other's.

    Raises `NotCompiled`, `OSError` or `UserError`.
    """
    command = compiler()
    version = _output([*command, "--version"])
    parts = (source.read_text(), *command, *FLAGS, version, platform.machine(), _processor())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    path = private_folder() / f"{source.stem}-{key}.so"
    if not path.exists():
        replace_file(path, lambda temporary: _compile([*command, str(source), *FLAGS, "-o", str(temporary)]))
    return path


def compiler() -> list[str]:
    """The command of the compiler. Raises `NotCompiled` without one."""
    named = shlex.split(os.environ.get("CC", ""))
    found = [name for name in ([named[0]] if named else COMPILERS) if shutil.which(name)]
    if not found:
        raise NotCompiled(f"no C compiler, none of {', '.join([named[0]] if named else COMPILERS)}")
    return named or found[:1]


def private_folder() -> Path:
    """Where compiled files lie. What is loaded from there runs: raises `NotCompiled` if others may write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "xdm_ft" / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise NotCompiled(f"{folder} is not this user's alone; remove it")
    return folder


def share(function: Callable[..., int], items: int, elements: int, *arguments: Tensor | float) -> set[int]:
    """Calls a function of a library for items 0 … `items`−1, on as many threads as PyTorch has; what it returned.

    Its first arguments are the first item and the one after the last, then come `arguments`, a tensor by its address.
    `elements` says how many numbers an item is, as too little work is not worth a thread.
    """
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    parts = min(1 + items * elements // ELEMENTS_PER_THREAD, items)
    if parts > 1:
        parts = min(parts, torch.get_num_threads())
    if parts <= 1:
        return {function(0, items, *values)}
    ends = [items * part // parts for part in range(parts + 1)]
    return set(_pool(parts, os.getpid()).map(lambda first, last: function(first, last, *values), ends, ends[1:]))


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """One of each process, as threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="xdm_ft")


def _compile(command: list[str]) -> None:
    _output(command)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(str(error)) from error
    if done.returncode:
        raise NotCompiled(f"{command[0]} exits with {done.returncode}: {' '.join(done.stderr.split())[:200]}")
    return done.stdout


def _processor() -> str:
    """What -march=native depends on: the cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name"))))
