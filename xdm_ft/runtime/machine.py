"""Cores, devices and memory: malloc settings, peak memory, and out-of-memory as a `UserError`."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from xdm_ft.runtime.errors import UserError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("xdm_ft")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_LARGEST_KEPT = 1 << 30  # bytes
_LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes, the limit of glibc before 2.35


def cores() -> int:
    """Returns the number of cores that this process may use."""
    # a container or a queue may allow it fewer cores than the machine has; macOS and Windows cannot say
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """Returns this process's share of the machine's cores."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def on_cpu_by_request() -> bool:
    """Whether the launcher forbids the GPU: by the values of its variable that Accelerate reads as true."""
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes", "y", "on", "t")


def on_gpu() -> bool:
    """Whether runs compute on a GPU."""
    import torch

    return not on_cpu_by_request() and torch.cuda.is_available()


def cpu_has_bf16() -> bool:
    """Returns whether the processor multiplies bfloat16 numbers itself; else bf16 may be slower than fp32."""
    import torch

    file = Path("/proc/cpuinfo")
    if hasattr(torch.cpu, "get_capabilities"):  # an older torch has none
        has = {name for name, value in torch.cpu.get_capabilities().items() if value}
    else:
        has = set(file.read_text(encoding="utf-8").split()) if file.exists() else set()
    return not has.isdisjoint({"amx_bf16", "avx512_bf16", "bf16"})  # the last one is ARM's name


@cache
def warn_of_slow_bf16(setting: str, float32: str) -> None:
    """Logs once if the processor only emulates the bf16 that `setting` asks for; `float32`: its word for that."""
    if not cpu_has_bf16():
        problem = "this processor emulates bf16, in which ViTs take 2 to 3 times as long"
        logger.warning("%s: %s; use %s if numbers need not equal those of a run in bf16", setting, problem, float32)


@cache
def retain_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step instead of returning it to the system (Linux only).

    Each step on cached features, and each pass of an encoder, allocates and frees the same blocks, of up to hundreds of
    megabytes. If they are returned, the next step has a page fault per 4 KB: half of the time of a pass of 64 images.
    """
    if not sys.platform.startswith("linux"):
        return
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):  # musl has none
        if not c_library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT):
            c_library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        c_library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def libraries_left_out() -> Iterator[None]:
    """Context in which garbage collection skips the objects that exist at its start: libraries have many (0.8 s)."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # for the caller; also, Triton prints at exit what was never collected


class PeakMemory:
    """The memory that this process takes at most from now on, above what it takes now. Not that of its workers.

    On a GPU it is what torch allocates there, else resident memory, which Linux alone measures, on machines with many
    cores with an error of tens of megabytes. The first model of a process also pays for what libraries set up once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, 0
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
            self.start = torch.cuda.memory_allocated(device)
        elif sys.platform.startswith("linux"):
            # what an earlier model freed is still resident: taking it again would count as nothing
            gc.collect()
            c_library = ctypes.CDLL(None)
            if hasattr(c_library, "malloc_trim"):  # musl has none
                c_library.malloc_trim(0)
            try:
                Path("/proc/self/clear_refs").write_bytes(b"5")  # resets VmHWM; see proc(5)
            except OSError:
                self.start = -1  # a sandbox forbids it
            else:
                self.start = _resident("VmRSS")

    @property
    def peak(self) -> int | None:
        """Bytes; None: this system does not tell."""
        if self.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self.device) - self.start
        if self.start <= 0:
            return None
        return max(0, _resident("VmHWM") - self.start)


def _resident(name: str) -> int:
    """Returns a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def out_of_memory_as_user_error(activity: str, remedy: str) -> Iterator[None]:
    """Raises a `UserError` of one line in place of an out-of-memory error, of the machine or of a GPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        import torch

        # torch has an error type for the memory of devices only
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        on_cpu = isinstance(error, MemoryError) or re.search(r"DefaultCPUAllocator.*tried to allocate", str(error))
        if not on_gpu and not on_cpu:
            raise
        memory = "the memory of the GPU" if on_gpu else "the memory of this machine"
        raise UserError(f"{activity}: does not fit {memory}; {remedy}") from error
