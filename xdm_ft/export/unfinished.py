"""Predictions that are not complete yet, in a file beside the one that they become.

`<out>.unfinished` is a file of JSON lines with checksums. The first says what the predictions are of; each other line
holds the rows of some images, and is on the disk before the next images are done.
"""

from __future__ import annotations

import fcntl
import glob
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from xdm_ft.data._images import NAMED_AT_MOST
from xdm_ft.errors import UserError, printable
from xdm_ft.export.predictions import Row
from xdm_ft.export.sources import Item
from xdm_ft.progress import pulse
from xdm_ft.storage.atomic import UNFINISHED, disk_errors, replace_file
from xdm_ft.storage.checksummed import Damaged, append_lines, read_lines

SECONDS = 1.0  # between two writes: what a kill loses
LOCK_SECONDS = 3.0  # the decoding processes of a killed command end a moment after it


class Tally:
    """What was done so far."""

    def __init__(self) -> None:
        self.images = self.predicted = self.unreadable = 0
        self.named: dict[str, str] = {}  # the first unreadable images → why
        self._names = xxhash.xxh3_64()  # of all images, in order

    def add(self, items: Iterable[Item], unreadable: Mapping[int, str]) -> None:
        for place, item in enumerate(items):
            self.images += 1
            self._names.update(os.fsencode(item.path) + b"\0")
            if place in unreadable:
                self.unreadable += 1
                if len(self.named) < NAMED_AT_MOST:
                    self.named[item.path] = unreadable[place]
            else:
                self.predicted += 1

    def to_json(self) -> dict[str, Any]:
        counts = {"images": self.images, "predicted": self.predicted, "unreadable": self.unreadable}
        return counts | {"named": self.named, "names": self._names.hexdigest()}

    def passed(self, items: Iterator[Item], earlier: Mapping[str, Any], file: Path) -> None:
        """Passes the images of an earlier command. Raises `UserError` if they are not the first of these ones."""
        for item in islice(items, earlier["images"]):
            self._names.update(os.fsencode(item.path) + b"\0")
            self.images += 1
        if self.to_json()["names"] != earlier["names"]:
            raise UserError(
                f"{file}: is of other images, or the images have changed since: its {earlier['images']} are not the "
                "first of the ones that are named now; name the same ones, or delete it to begin anew"
            )
        self.predicted, self.unreadable = earlier["predicted"], earlier["unreadable"]
        self.named = dict(earlier["named"])


class Unfinished:
    """The rows so far, on the disk."""

    def __init__(self, out: Path, about: Mapping[str, Any]) -> None:
        self.out, self.file, self.about = out, unfinished_file(out), dict(about)
        self.tally = Tally()
        self._rows: list[Row] = []
        self._due = time.monotonic() + SECONDS

    def is_begun(self) -> bool:
        """Whether it holds rows. Raises `UserError` if it is damaged."""
        return len(list(islice(self._lines(), 2))) == 2

    def begin(self) -> None:
        with disk_errors(self.file):
            os.truncate(self.file, 0)
        append_lines(self.file, [self.about])

    def earlier(self) -> dict[str, Any] | None:
        """Returns what an earlier command has done; None if nothing. Raises `UserError` if it was another one."""
        lines = self._lines()
        about, last = next(lines, None), None
        for line in lines:
            last = line["tally"]
            pulse.beat()
        if last is None:
            return None
        if about != self.about:
            differing = [key for key in self.about if (about or {}).get(key) != self.about[key]]
            was, now = ((one or {}).get(differing[0]) if differing else "?" for one in (about, self.about))
            raise UserError(
                f"{self.file}: {differing[0] if differing else 'its format'} was {was} and is {now} now; use the same "
                "model and options, or delete it to begin anew"
            )
        return dict(last)

    def add(self, items: list[Item], unreadable: Mapping[int, str], rows: Iterable[Row]) -> None:
        """Adds the rows of images. They are on the disk a second later, or after `flush`."""
        self.tally.add(items, unreadable)
        self._rows += rows
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        append_lines(self.file, [{"tally": self.tally.to_json(), "rows": self._rows}])
        self._rows, self._due = [], time.monotonic() + SECONDS

    def rows(self) -> Iterator[Row]:
        """Yields all rows. Raises `UserError` if the file is damaged."""
        for line in islice(self._lines(), 1, None):
            yield from line["rows"]

    def _lines(self) -> Iterator[Any]:
        try:
            yield from read_lines(self.file)
        except Damaged as error:
            raise UserError(f"{self.file}: is damaged ({error}); delete it to begin anew") from error

    def complete(self, write: Callable[[Path], None]) -> None:
        """Makes the file of predictions by `write(path)`, and removes this one."""
        for left in self.out.parent.glob(f".{glob.escape(self.out.name)}.*{UNFINISHED}"):
            left.unlink(missing_ok=True)  # of a command that was killed here
        replace_file(self.out, write)
        self.remove()

    def remove(self) -> None:
        with disk_errors(self.file):
            self.file.unlink(missing_ok=True)


def unfinished_file(out: Path) -> Path:
    return out.with_name(f"{out.name}{UNFINISHED}")


def refuse_taken(out: Path, resume: bool) -> None:
    """Raises `UserError` if there is such a file already, or predictions that are not to be resumed."""
    file = unfinished_file(out)
    with disk_errors(out):
        if out.exists() and not (resume and file.exists()):
            raise UserError(f"{printable(out)}: exists already; name another file, or delete it")


@contextmanager
def opened(out: Path, about: Mapping[str, Any], resume: bool) -> Iterator[Unfinished]:
    """Yields the unfinished file of `out`, which no other process writes to. Without rows it is removed at the end.

    Raises `UserError` if `out` exists, if it can not be written, or if there are earlier rows and not `resume`.
    """
    found = Unfinished(out, about)
    refuse_taken(out, resume)
    with disk_errors(found.file):
        found.file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(found.file, os.O_RDWR | os.O_CREAT, 0o666)
    is_begun = False
    try:
        _lock(handle, found.file)
        is_begun = found.is_begun()
        if is_begun and not resume:
            raise UserError(
                f"{found.file}: unfinished predictions of an earlier command; add --resume to continue them, or "
                "delete it"
            )
        if not is_begun:
            found.begin()
        yield found
    finally:
        if not is_begun and not found.tally.images:
            found.remove()
        os.close(handle)


def _lock(handle: int, file: Path) -> None:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"{file}: another command is writing to it; wait for it, or name another file"
                ) from error
            time.sleep(0.05)
