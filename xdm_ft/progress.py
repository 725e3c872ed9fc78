"""Progress of long work on standard error: a bar with rate and time left on a terminal, sparse lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG_EVERY_SECONDS = 30.0
logger = logging.getLogger("xdm_ft")


class Progress:
    """`advance(n, note)` after each piece of work."""

    def __init__(self, description: str, total: int, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self.skipped = 0
        self.started = self.last_line = time.monotonic()

    def skip(self, n: int) -> None:
        """So much was done before."""
        self.done += n
        self.skipped += n

    def advance(self, n: int = 1, note: str = "") -> None:
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
        self.bar.initial += n
        self.bar.last_print_n += n
        self.bar.n += n

    def advance(self, n: int = 1, note: str = "") -> None:
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update(n)


@contextmanager
def progress(description: str, total: int, unit: str, shown: bool = True) -> Iterator[Progress]:
    """A bar on a terminal, a line every 30 seconds elsewhere; nothing where `shown` is false (other ranks)."""
    if shown and sys.stderr.isatty():
        bar = _Bar(description, total, unit)
        try:
            yield bar
        finally:
            bar.bar.close()
    else:
        quiet = Progress(description, total, unit)
        if not shown:
            quiet.last_line = float("inf")
        yield quiet
