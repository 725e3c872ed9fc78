"""Atomic writes: a file with its final name is always complete."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from xdm_ft.errors import UserError

UNFINISHED = ".unfinished"
UNFINISHED_TENSORS = ".tmp" + 6 * "?"  # pattern of the temporary files that safetensors itself writes


def replace_file(path: Path, write: Callable[[Path], None], size: int | None = None) -> None:
    """Replaces a file atomically. `write` fills a temporary file in the same folder, which is then renamed.

    The order is: write, fsync, rename, fsync of the folder. `size`: the bytes that it takes, if known. Raises
    `UserError` as `disk_errors` does.
    """
    with disk_errors(path, size):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            os.chmod(temporary, 0o666 & ~umask())  # mkstemp lets only the owner read the file
            sync(temporary)  # before the rename, or a crash could leave an empty file under the final name
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


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
            remedy = "free some space and run the same command to resume"
            raise UserError(f"{path}: the disk is full{needed}; {remedy}") from error
        raise UserError(f"{path}: can not be written: {error.strerror}") from error


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
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    replace_file(path, write)


def umask() -> int:
    """Returns the file mode bits that this process clears in new files."""
    # reading the umask is possible only by setting it
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Returns when the file, or the list of names in the folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
