"""Atomic writes: a file with its final name is always complete."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import how_to_resume

ON_WINDOWS = sys.platform == "win32"  # it neither renames nor removes a file that is open, and opens no folder
UNFINISHED = ".unfinished"
UNFINISHED_TENSORS = ".tmp" + 6 * "?"  # pattern of the temporary files that safetensors itself writes
SYNCS_AT_ONCE = 16
TAKEN = "exists already; name another file, or delete it"

Replace = Callable[[Path, Callable[[Path], object], int | None], None]
"""`replace_file`, or `Together.add`."""


def replace_file(path: Path, write: Callable[[Path], object], size: int | None = None) -> None:
    """Replaces a file atomically. `write` fills a temporary file in the same folder, which is then renamed.

    `size`: the bytes that it takes, if known. Raises `UserError` as `disk_errors` does.
    """
    with Together() as files:
        files.add(path, write, size)
        files.replace()


class Together:
    """Files that are replaced together, each of them atomically: written one after the other, then made safe at once.

    A disk joins fsyncs that it receives at the same time: 96 files in 32 folders took 0.08 seconds, and one after the
    other 0.6. At the end of the context, temporary files that were not renamed are removed.
    """

    def __init__(self, new: bool = False) -> None:
        """`new`: `replace` makes all of the files or none, and raises `UserError` for one that exists by then."""
        self._new = new
        self._written: list[tuple[Path, Path, int | None]] = []  # temporary file, its final path and size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for temporary, _, _ in self._written:
            temporary.unlink(missing_ok=True)

    def add(self, path: Path, write: Callable[[Path], object], size: int | None = None) -> None:
        """Writes the temporary file of `path`; arguments and errors are those of `replace_file`."""
        with disk_errors(path, size):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
            os.close(handle)
            self._written.append((Path(name), path, size))
            write(Path(name))
            os.chmod(name, 0o666 & ~umask())  # mkstemp lets only the owner read the file

    def drop_unchanged(self) -> None:
        """Leaves the files alone that have the content which was added for them."""
        for temporary, path, size in [*self._written]:
            with disk_errors(path, size):
                if path.is_file() and filecmp.cmp(temporary, path, shallow=False):
                    self._written.remove((temporary, path, size))
                    temporary.unlink()

    def replace(self) -> None:
        """Replaces the files that were added, and returns when they are on the disk."""

        def sync_for(synced: Path, path: Path, size: int | None) -> None:
            with disk_errors(path, size):
                sync(synced)

        if self._written:
            with ThreadPoolExecutor(min(SYNCS_AT_ONCE, len(self._written))) as pool:
                # before the renames, or a crash could leave an empty file under its final name
                list(pool.map(sync_for, *zip(*self._written, strict=True)))
                with ExitStack() as undo:
                    for _, path, size in self._written if self._new else ():
                        with disk_errors(path, size):
                            _reserve(path)
                        undo.callback(path.unlink, missing_ok=True)
                    for temporary, path, size in self._written:
                        with disk_errors(path, size):
                            os.replace(temporary, path)
                    undo.pop_all()
                # a rename is a change of its folder: until that is on the disk, a crash brings the old file back
                folders = {path.parent: (path.parent, path, size) for _, path, size in self._written}
                list(pool.map(sync_for, *zip(*folders.values(), strict=True)))
        self._written = []


def _reserve(path: Path) -> None:
    """Makes an empty file, which of several processes one can. Raises `UserError` if the file exists."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        raise UserError(f"{path}: {TAKEN}") from None


@contextmanager
def disk_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """Context for writing `path`, of `size` bytes if known. Raises `UserError` for every error of the disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not an error of the system: filelock's Timeout
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = "" if size is None else f" ({size / 1e6:,.1f} MB are needed for it)"
            raise UserError(f"{path}: the disk is full{needed}; free some space and {how_to_resume()}") from error
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def order_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file in place: the library writes it in an order that varies."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "sorting keeps the length"
        file.seek(8)
        file.write(text.ljust(length))  # padded with spaces, which the format allows, so that no tensor moves


def remove_unfinished(folder: Path) -> None:
    """Removes the temporary files of killed processes, at any depth. No process may be writing to the folder."""
    for pattern in (f".*{UNFINISHED}", UNFINISHED_TENSORS):
        for left in folder.rglob(pattern):
            if not left.is_dir():
                left.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    replace_file(path, lambda temporary: temporary.write_bytes(content))


def is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def file_mode(folder: Path) -> int:
    """Returns the mode bits for a file that the folder's users share: who may write it, may write the file."""
    return folder.stat().st_mode & 0o666


def umask() -> int:
    """Returns the file mode bits that this process clears in new files."""
    mask = os.umask(0o077)  # reading it is possible only by setting it
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Returns when the file, or the list of names in the folder, is on the disk."""
    if ON_WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if ON_WINDOWS else os.O_RDONLY)  # Windows syncs what it may write
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
