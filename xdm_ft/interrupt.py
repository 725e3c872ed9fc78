"""SIGINT and SIGTERM: while a model trains they wait until its state is saved, elsewhere they end the work at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

ONE_PRESS_SECONDS = 2.0  # a launcher passes an interrupt on to processes that the terminal has told already


T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """The work ends here, as a signal asked for. `saved` says what of it was saved beyond what is finished."""

    def __init__(self, saved: str = "") -> None:
        self.signal = _asked.signal or signal.SIGTERM  # told by another process
        self.saved = saved
        super().__init__(saved)

    @property
    def status(self) -> int:
        """The exit status: 130 or 143, as a shell has it."""
        return 128 + self.signal

    def __str__(self) -> str:
        if self.saved:
            return f"interrupted; saved: {self.saved}; the same command goes on from there"
        return "interrupted; what is finished is kept, and the same command goes on from there"


class _Asked:
    """What this process has been asked."""

    signal: signal.Signals | None = None
    at = 0.0
    process = 0  # that handles signals; the workers that it forks leave them to it
    speaks = True
    waits = 0  # how many `deferred` are entered

    def begin(self, speaks: bool) -> None:
        self.signal, self.process, self.speaks, self.waits = None, os.getpid(), speaks, 0


_asked = _Asked()


def stop_requested() -> bool:
    """Whether a signal has asked this process to save and leave."""
    return _asked.signal is not None


@contextmanager
def handled() -> Iterator[None]:
    """Around the work: SIGINT and SIGTERM raise `Interrupted`, a second SIGINT leaves without saving.

    In another thread than the main one signals are left as they are. Once interrupted they stay handled to the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.begin(speaks=True)
    before = {number: signal.signal(number, _handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if not stop_requested():
            for number, handler in before.items():
                signal.signal(number, handler)


def handled_here() -> None:
    """In a process forked to work inside `handled`: from now on its signals are its own. It leaves without a word."""
    _asked.begin(speaks=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _handle)


@contextmanager
def deferred() -> Iterator[None]:
    """Around work that looks at `stop_requested` between its steps, and then saves and raises `Interrupted`."""
    _asked.waits += 1
    try:
        yield
    finally:
        _asked.waits -= 1
    if stop_requested():
        raise Interrupted


def surviving(items: Iterable[T]) -> Iterator[T]:
    """The items of a data loader; they end where the signal that asks to stop has ended its workers too."""
    try:
        yield from items
    except Exception:  # of torch, or of a connection, as it happens
        if not stop_requested():
            raise


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _asked.process:
        return
    if _asked.signal is not None:
        launched = "LOCAL_WORLD_SIZE" in os.environ
        if number == signal.SIGINT and not (launched and time.monotonic() - _asked.at < ONE_PRESS_SECONDS):
            if _asked.speaks:
                os.write(2, b"xdm-ft: interrupted again; left at once, the same command goes on from what was saved\n")
            os._exit(128 + number)
        return
    _asked.signal, _asked.at = signal.Signals(number), time.monotonic()
    # a signal to the whole process group ends loader workers, of which torch would complain in the middle of a step
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    if _asked.waits == 0:
        raise Interrupted
