"""Progress of long work on standard error: a bar with rate and remaining time on a terminal, a few lines in a log.

Every finished piece of work is also counted, so that other processes of the run notice when this one hangs.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from xdm_ft.runtime.errors import printable
from xdm_ft.runtime.terminal import with_bar

LOG_EVERY_SECONDS = 30.0
BAR_AFTER_SECONDS = 0.5  # work that takes less shows no bar
logger = logging.getLogger("xdm_ft")


class Pulse:
    """Counts the pieces of work that this process and the processes forked from it have finished."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)  # anonymous and shared: forked processes write to the same 8 bytes
        self.waits = 0  # number of `waiting` contexts that are open

    def beat(self) -> None:
        """Counts one piece. Two processes at the same instant may count one piece only: readers look for a change."""
        self._memory[:] = (self.count + 1).to_bytes(8, "little")

    @property
    def count(self) -> int:
        return int.from_bytes(self._memory[:], "little")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context for what may take long without work in this process: a wait for another process, a download."""
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1


pulse = Pulse()


class Progress:
    """Writes a line to the log every 30 seconds. Call `advance(n, note)` after each piece of work.

    `total` None: it is not known.
    """

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self.skipped = 0
        self.started = self.last_line = time.monotonic()

    def skip(self, n: int) -> None:
        """Counts `n` units as done by an earlier run: they are part of the total, not of the rate."""
        self.done += n
        self.skipped += n

    def advance(self, n: int = 1, note: str = "") -> None:
        pulse.beat()
        self.done += n
        now = time.monotonic()
        if now - self.last_line >= LOG_EVERY_SECONDS:
            self.last_line = now
            rate = (self.done - self.skipped) / (now - self.started)
            of = "" if self.total is None else f" of {self.total}"
            left = f", {duration((self.total - self.done) / rate)} left" if self.total is not None and rate else ""
            logger.info(
                "%s: %d%s %s, %.1f/s%s%s",
                self.description, self.done, of, self.unit, rate, left, f", {note}" if note else "",
            )  # fmt: skip


class _Bar(Progress):
    def __init__(self, description: str, total: int | None, unit: str) -> None:
        super().__init__(description, total, unit)
        from tqdm import tqdm

        self.bar = tqdm(
            total=total,
            desc=printable(description),
            unit=f" {unit}",
            file=sys.stderr,
            dynamic_ncols=True,
            leave=False,
            delay=BAR_AFTER_SECONDS,
        )

    @property
    def _is_visible(self) -> bool:
        return bool(self.bar.last_print_t >= self.bar.start_t + self.bar.delay)

    def clear(self) -> None:
        if self._is_visible:
            self.bar.clear()

    def refresh(self) -> None:
        if self._is_visible:
            self.bar.refresh()

    def skip(self, n: int) -> None:
        # tqdm takes the rate from n − initial, and its recent rate from n − last_print_n
        self.bar.initial += n
        self.bar.last_print_n += n
        self.bar.n += n

    def advance(self, n: int = 1, note: str = "") -> None:
        pulse.beat()
        self.bar.set_postfix_str(printable(note), refresh=False)
        self.bar.update(n)


def unseen() -> Progress:
    """Returns a progress that is shown nowhere."""
    silent = Progress("", None, "")
    silent.last_line = float("inf")
    return silent


def shows_bars() -> bool:
    """Whether standard error is a terminal on which bars are wanted: not with `--quiet`, nor with tqdm's variable."""
    wanted = logger.level <= logging.INFO and os.environ.get("TQDM_DISABLE", "0") in ("", "0")
    return wanted and sys.stderr.isatty()


def duration(seconds: float) -> str:
    """Returns a time as a reader says it: "40 s", "3 min", "2.5 h", "4 days"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    if hours < 48:
        return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    return f"{hours / 24:.0f} days"


@contextmanager
def progress(description: str, total: int | None, unit: str, shown: bool = True) -> Iterator[Progress]:
    """Context that yields a `Progress`: a bar on a terminal, else log lines; nothing if not `shown` (other ranks).

    A logger whose level is above INFO (`--quiet`) has neither.
    """
    if shown and shows_bars():
        bar = _Bar(description, total, unit)
        try:
            with with_bar(bar):
                yield bar
        finally:
            bar.bar.close()
    else:
        yield Progress(description, total, unit) if shown else unseen()
