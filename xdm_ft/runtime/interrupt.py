"""SIGINT, SIGTERM and SIGHUP: a training saves its state before it stops; all other work ends at once.

The handler raises nothing: an exception between any two instructions may appear inside an import or a destructor, where
it breaks other things or is swallowed. It either requests a stop, or ends the process: files are complete whenever a
process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

ONE_PRESS_SECONDS = 2.0  # a launcher forwards Ctrl-C to processes that have already received it from the terminal
RESUME = "run the same command to resume"
SIGHUP = getattr(signal, "SIGHUP", None)  # None: on Windows
STOPPING = tuple(filter(None, (signal.SIGINT, signal.SIGTERM, SIGHUP)))
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. `saved` names the unfinished work that was saved; it is empty if there was none."""

    def __init__(self, saved: str = "") -> None:
        self.signal = _received.signal or signal.SIGTERM  # None: another process received the signal
        self.saved = saved
        super().__init__(saved)

    @property
    def status(self) -> int:
        """The exit status by a shell's convention: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.signal

    def __str__(self) -> str:
        if self.saved:
            return f"interrupted; saved: {self.saved}; {RESUME}"
        return f"interrupted; finished work is kept; {_received.resume}" if _received.resume else "interrupted"


@dataclass
class _Received:
    """The signal that this process has received, and how it reacts to signals."""

    signal: signal.Signals | None = None
    at: float = 0.0  # time.monotonic()
    process: int = 0  # id of the one that reacts: loader workers inherit the handlers by a fork and must ignore signals
    prints: bool = True  # whether it prints a message before it ends
    resume: str = ""  # how the work is resumed; empty: it is not
    deferred: int = 0  # number of `deferred` contexts that are open
    ending: list[Callable[[], object]] = field(default_factory=list)  # functions of open `before_exit` contexts


_received = _Received()


def stop_requested() -> bool:
    """Whether a signal has asked this process to save its state and stop."""
    return _received.signal is not None


def request_stop(wanted: bool = True) -> None:
    """Asks the work of this process to save its state and stop, as a signal does; not `wanted`: no longer asks it."""
    _received.signal = signal.SIGTERM if wanted else None


def handle(resumable: bool = False, prints: bool = True) -> None:
    """Makes SIGINT, SIGTERM and SIGHUP end this process, with one line on standard error if `prints`; see `deferred`.

    SIGHUP stays ignored if it is, as `nohup` leaves it. `resumable`: whether the line says that the same command
    resumes. A forked process must call this for itself.
    """
    global _received
    prints = prints and os.environ.get("RANK", "0") == "0"  # one line of all processes of a run
    _received = _Received(process=os.getpid(), prints=prints, resume=RESUME if resumable else "")
    for number in STOPPING:
        if number != SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows, where no process is forked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # `block_signals` where this process was forked


@contextmanager
def block_signals() -> Iterator[None]:
    """Context in which these signals wait. A process that is forked inside keeps them waiting until `handle`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handle_signals(resumable: bool) -> Iterator[None]:
    """Context of `handle`. The earlier handlers come back at the end, unless a stop has been requested.

    Outside the main thread it changes nothing, because Python sets signal handlers in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    handle(resumable)
    try:
        yield
    finally:
        if not stop_requested():
            _received.resume = ""
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Context for work that checks `stop_requested` between its steps, then saves and raises `Interrupted`.

    A first signal only requests the stop; a second SIGINT ends the process without saving. If the work ends without a
    check, `Interrupted` is raised at the end.
    """
    _received.deferred += 1
    try:
        yield
    finally:
        _received.deferred -= 1
    if stop_requested():
        raise Interrupted


def how_to_resume() -> str:
    """Returns what the user does to go on with work that has stopped."""
    return _received.resume or RESUME


@contextmanager
def announce_resume(remedy: str) -> Iterator[None]:
    """Context of work that is kept: the line of a signal or a full disk ends with `remedy`, how to resume it."""
    before, _received.resume = _received.resume, remedy
    try:
        yield
    finally:
        _received.resume = before


@contextmanager
def before_exit(function: Callable[[], object]) -> Iterator[None]:
    """Context in which a signal that ends the process at once calls `function` first, inner contexts before outer."""
    _received.ending.append(function)
    try:
        yield
    finally:
        _received.ending.remove(function)


def print_nothing() -> None:
    """Lets a signal end this process without a line, as another process has said why the run ends."""
    _received.prints = False


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the process `parent`, which forked it, ends by whatever (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _received.process:
        return
    if _received.signal is None:
        _received.signal, _received.at = signal.Signals(number), time.monotonic()
        if _received.deferred == 0:
            _exit(number, str(Interrupted()))
        return
    launched = "LOCAL_WORLD_SIZE" in os.environ
    if number == signal.SIGINT and not (launched and time.monotonic() - _received.at < ONE_PRESS_SECONDS):
        _received.ending.clear()
        again = f"interrupted again; stopped without saving; {_received.resume}"
        _exit(number, again if _received.resume else "interrupted again")


def _exit(number: int, message: str) -> None:
    try:
        for function in reversed(_received.ending):
            function()
        if _received.prints:
            end_of_bar = "\n" if os.isatty(2) else ""
            # os.write, as the signal may have interrupted a print, whose buffer cannot be entered twice
            with suppress(OSError):
                os.write(2, f"{end_of_bar}xdm-ft: {message}\n".encode())
    finally:
        os._exit(128 + number)
