"""SIGINT and SIGTERM: a training saves its state before it stops; all other work stops at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

ONE_PRESS_SECONDS = 2.0  # a launcher forwards Ctrl-C to processes that have already received it from the terminal


T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work. `saved` names the unfinished work that was saved; it is empty if there was none."""

    def __init__(self, saved: str = "") -> None:
        self.signal = _received.signal or signal.SIGTERM  # None: another process received the signal
        self.saved = saved
        super().__init__(saved)

    @property
    def status(self) -> int:
        """The exit status by a shell's convention: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal

    def __str__(self) -> str:
        if self.saved:
            return f"interrupted; saved: {self.saved}; run the same command to resume"
        return "interrupted; finished work is kept; run the same command to resume"


class _Received:
    """The signal that this process has received, and how it reacts to signals."""

    signal: signal.Signals | None = None
    at = 0.0  # time.monotonic()
    process = 0  # id of the process that reacts: loader workers inherit the handlers by a fork and must ignore signals
    prints = True  # whether a second SIGINT prints a message
    deferred = 0  # number of `deferred` contexts that are open

    def reset(self, prints: bool) -> None:
        self.signal, self.process, self.prints, self.deferred = None, os.getpid(), prints, 0


_received = _Received()


def stop_requested() -> bool:
    """Whether a signal has asked this process to save its state and stop."""
    return _received.signal is not None


@contextmanager
def handled() -> Iterator[None]:
    """Context in which SIGINT and SIGTERM raise `Interrupted`, and a second SIGINT exits without saving.

    Outside the main thread it changes nothing, because Python sets signal handlers in the main thread only. The earlier
    handlers come back at the end, unless a signal has arrived.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.reset(prints=True)
    before = {number: signal.signal(number, _handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if not stop_requested():
            for number, handler in before.items():
                signal.signal(number, handler)


def handled_here() -> None:
    """Makes a process that was forked inside `handled` handle its own signals, without messages."""
    _received.reset(prints=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _handle)


@contextmanager
def deferred() -> Iterator[None]:
    """Context for work that checks `stop_requested` between its steps, then saves and raises `Interrupted`.

    A signal raises nothing inside. If the work ends without a check, `Interrupted` is raised at the end.
    """
    _received.deferred += 1
    try:
        yield
    finally:
        _received.deferred -= 1
    if stop_requested():
        raise Interrupted


def surviving(items: Iterable[T]) -> Iterator[T]:
    """Yields the items of a data loader. After a stop request, an exception of the loader ends the items instead.

    The signal that requests the stop has then ended the loader's workers too.
    """
    try:
        yield from items
    except Exception:  # its type depends on where the worker died: torch's RuntimeError, or OSError or EOFError
        if not stop_requested():
            raise


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _received.process:
        return
    if _received.signal is not None:
        launched = "LOCAL_WORLD_SIZE" in os.environ
        if number == signal.SIGINT and not (launched and time.monotonic() - _received.at < ONE_PRESS_SECONDS):
            if _received.prints:
                # os.write, as the signal may have interrupted a print, whose buffer can not be entered twice
                os.write(2, b"xdm-ft: interrupted again; stopped without saving; run the same command to resume\n")
            os._exit(128 + number)
        return
    _received.signal, _received.at = signal.Signals(number), time.monotonic()
    # a signal to the whole process group also ends loader workers; torch's own handler of SIGCHLD would then raise in
    # the middle of a step
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    if _received.deferred == 0:
        raise Interrupted
