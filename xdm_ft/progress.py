"""Progress of long work on standard error: a bar with rate and remaining time on a terminal, a few lines in a log.

Every finished piece of work is also counted, so that other processes of the run notice when this one hangs.
"""

from __future__ import annotations

import logging
import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG_EVERY_SECONDS = 30.0
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
    """Writes a line to the log every 30 seconds. Call `advance(n, note)` after each piece of work."""

    def __init__(self, description: str, total: int, unit: str) -> None:
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
            left = (self.total - self.done) / rate
            logger.info(
                "%s: %d of %d %s, %.1f/s, %.0f s left%s",
                self.description, self.done, self.total, self.unit, rate, left, f", {note}" if note else "",
            )  # fmt: skip


class _Bar(Progress):
    def __init__(self, description: str, total: int, unit: str) -> None:
        super().__init__(description, total, unit)
        from tqdm import tqdm

        self.bar = tqdm(total=total, desc=description, unit=f" {unit}", file=sys.stderr, dynamic_ncols=True)

    def skip(self, n: int) -> None:
        # tqdm takes the rate from n − initial, and its recent rate from n − last_print_n
        self.bar.initial += n
        self.bar.last_print_n += n
        self.bar.n += n

    def advance(self, n: int = 1, note: str = "") -> None:
        pulse.beat()
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update(n)


@contextmanager
def progress(description: str, total: int, unit: str, shown: bool = True) -> Iterator[Progress]:
    """Context that yields a `Progress`: a bar on a terminal, else log lines; nothing if not `shown` (other ranks)."""
    if shown and sys.stderr.isatty():
        bar = _Bar(description, total, unit)
        try:
            yield bar
        finally:
            bar.bar.close()
    else:
        lines = Progress(description, total, unit)
        if not shown:
            lines.last_line = float("inf")
        yield lines
