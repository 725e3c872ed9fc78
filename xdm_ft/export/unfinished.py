"""Predictions that are not complete yet, in a file beside the one that they become.

`<out>.unfinished` is a file of JSON lines with checksums that is only appended to. The first line says what the
predictions are of; each other one holds the rows of some images and the number of images so far, and is on the disk
before the next images are done.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from xdm_ft.export.predictions import Row
from xdm_ft.export.sources import Item
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.atomic import UNFINISHED, disk_errors, replace_file, sync
from xdm_ft.storage.checksummed import Damaged, checked_line, checked_lines, end_of_last_line

SECONDS = 1.0  # between two writes: what a kill loses
LOCK_SECONDS = 3.0  # a killed command ends a moment later


class Tally:
    """Counts rows, whose first cell is the image's path and whose last one is why it has no prediction, or None."""

    def __init__(self) -> None:
        self.images = self.unreadable = 0
        self.named: dict[str, str] = {}  # the first unreadable images → why

    def add(self, rows: Iterable[Row]) -> None:
        for path, *_, reason in rows:
            self.images += 1
            if reason is not None:
                self.unreadable += 1
                if len(self.named) < NAMED_AT_MOST:
                    self.named[str(path)] = str(reason)


class Unfinished:
    """The rows so far, in a file that `open_unfinished` has locked. It is read and written through its handle alone."""

    def __init__(self, out: Path, about: Mapping[str, Any], handle: int) -> None:
        self.out, self.file, self.about = out, unfinished_file(out), dict(about)
        self.tally = Tally()
        self.is_begun = False  # whether the disk holds rows
        self._handle = handle
        self._rows: list[Row] = []
        self._due = time.monotonic() + SECONDS

    def read_begun(self) -> None:
        """Finds out whether the file holds rows. Raises `UserError` if it is damaged, or another program's."""
        lines = len(list(islice(self._lines(), 2)))
        if not lines and os.fstat(self._handle).st_size:
            raise UserError(f"{self.file}: is damaged (no line is complete); delete it to begin anew")
        self.is_begun = lines == 2

    def begin(self) -> None:
        with disk_errors(self.file):
            os.ftruncate(self._handle, 0)
            self._append(self.about)
            sync(self.file.parent)  # or a crash could lose the name of the new file

    def skip_done(self, items: Iterator[Item]) -> None:
        """Counts the rows of an earlier command, if any, and skips their images.

        Raises `UserError` if that had other options, or if its images are not the first of these.
        """
        about = next(self._lines())
        if about != self.about:
            [key, *_] = [key for key in {**self.about, **about} if about.get(key) != self.about.get(key)]
            raise UserError(
                f"{self.file}: {key} was {about.get(key)} and is {self.about.get(key)} now; use the same model and "
                "options, or delete it to begin anew"
            )
        for row in self.rows():
            item = next(items, None)
            if item is None or item.path != row[0]:
                raise UserError(
                    f"{self.file}: is of other images, or the images have changed since: its image "
                    f"{self.tally.images + 1} is {row[0]}, now it is {'missing' if item is None else item.path}; name "
                    "the same ones, or delete it to begin anew"
                )
            self.tally.add([row])
            pulse.beat()
        with disk_errors(self.file), self._reader() as file:
            os.ftruncate(self._handle, end_of_last_line(file))

    def add(self, rows: Iterable[Row]) -> None:
        """Adds a row per image. They are on the disk a second later, or after `flush`."""
        rows = list(rows)
        self.tally.add(rows)
        self._rows += rows
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._append({"count": self.tally.images, "rows": self._rows})
            self.is_begun = True
        self._rows, self._due = [], time.monotonic() + SECONDS

    def rows(self) -> Iterator[Row]:
        """Yields the rows on the disk. Raises `UserError` if some are missing, at the latest after the last one."""
        count = 0
        for line in islice(self._lines(), 1, None):
            yield from line["rows"]
            count += len(line["rows"])
            if count != line["count"]:
                raise UserError(
                    f"{self.file}: is damaged ({count} rows of {line['count']} are there); delete it to begin anew"
                )
        if count != self.tally.images:
            raise UserError(
                f"{self.file}: has {count} rows of {self.tally.images} images, since another program has changed it; "
                "delete it to begin anew"
            )

    def complete(self, write: Callable[[Path], None]) -> None:
        """Makes the file of predictions by `write(path)`, and removes this one."""
        self._refuse_lost()
        # of a command that was killed here: mkstemp's names have eight characters
        for left in self.out.parent.glob(f".{glob.escape(self.out.name)}.{8 * '?'}{UNFINISHED}"):
            left.unlink(missing_ok=True)
        replace_file(self.out, write)
        self.remove()

    def remove(self) -> None:
        with disk_errors(self.file):
            if _is_named(self.file, self._handle):
                self.file.unlink()

    def _append(self, value: Any) -> None:
        self._refuse_lost()
        line = memoryview(checked_line(value))
        with disk_errors(self.file):
            while line:
                line = line[os.write(self._handle, line) :]
            os.fsync(self._handle)

    def _refuse_lost(self) -> None:
        if not _is_named(self.file, self._handle):
            raise UserError(
                f"{self.file}: was deleted or replaced while predictions were written to it; run the same command again"
            )

    def _reader(self) -> BinaryIO:
        return open(self._handle, "rb", closefd=False)

    def _lines(self) -> Iterator[Any]:
        try:
            with self._reader() as file:
                file.seek(0)
                for number, line in enumerate(checked_lines(file), start=1):
                    if not isinstance(line, dict) or ("rows" in line) != (number > 1):
                        raise Damaged(f"line {number}: it is not where it was written")
                    yield line
        except Damaged as error:
            raise UserError(f"{self.file}: is damaged ({error}); delete it to begin anew") from error


def unfinished_file(out: Path) -> Path:
    return out.with_name(f"{out.name}{UNFINISHED}")


def refuse_taken(out: Path, resume: bool) -> None:
    """Raises `UserError` if there is such a file already, without unfinished predictions that are to be resumed."""
    with disk_errors(out):
        if out.exists() and not (resume and unfinished_file(out).exists()):
            raise UserError(f"{printable(out)}: exists already; name another file, or delete it")


@contextmanager
def open_unfinished(out: Path, about: Mapping[str, Any], resume: bool) -> Iterator[Unfinished]:
    """Yields the unfinished file of `out`, which no other process writes to. Without rows it is removed at the end.

    Raises `UserError` if `out` exists, if it can not be written, or if there are earlier rows and not `resume`.
    """
    refuse_taken(out, resume)
    handle = _lock(unfinished_file(out))
    try:
        found = Unfinished(out, about, handle)
        found.read_begun()
        if found.is_begun and not resume:
            raise UserError(
                f"{found.file}: unfinished predictions of an earlier command; add --resume to continue them, or "
                "delete it"
            )
        try:
            if not found.is_begun:
                refuse_taken(out, resume=False)  # the command that held the lock may have completed it
                found.begin()
            yield found
        finally:
            if not found.is_begun:
                found.remove()
    finally:
        os.close(handle)


def _lock(file: Path) -> int:
    """Returns a handle of the file, which is made if there is none, and locked until it is closed.

    Raises `UserError` for a link or what is no file, and if another process keeps the lock.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        handle = _open(file)
        with disk_errors(file), suppress(BlockingIOError):
            # a lock of this process, not `flock`: those that decode images inherit the handle and outlive a kill
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(file, handle):  # not if the command that held the lock has removed its file
                return handle
        os.close(handle)
        if time.monotonic() > until:
            raise UserError(f"{file}: another command is writing to it; wait for it, or name another file")
        time.sleep(0.05)


def _open(file: Path) -> int:
    remedy = "delete it, or name another file"
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{file}: is a symbolic link; {remedy}") from error
            raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise UserError(f"{file}: is no regular file; {remedy}")
    return handle


def _is_named(file: Path, handle: int) -> bool:
    """Whether the path names the open file, and not another one or none."""
    try:
        return os.path.samestat(os.lstat(file), os.fstat(handle))
    except FileNotFoundError:
        return False
