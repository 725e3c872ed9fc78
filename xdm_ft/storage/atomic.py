"""Files that are never half-written under their final name."""

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
NOT_WRITABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """`write` fills a temporary file in the same folder, which then takes the final name: write, fsync, rename, fsync
    of the folder. Raises `UserError` as `refusals` does."""
    with refusals(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            os.chmod(temporary, 0o666 & ~_umask())
            sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Around the writing of `path`: a full disk, or a place where nothing can be written, is a `UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{path}: the disk is full; make room and run the same command again") from error
        if error.errno in NOT_WRITABLE:
            raise UserError(f"{path}: can not be written: {error.strerror}") from error
        raise


def order_metadata(path: Path) -> None:
    """Makes the bytes of a safetensors file a function of its content: the library's order of metadata varies."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the same text in another order"
        file.seek(8)
        file.write(text.ljust(length))


def sweep(folder: Path) -> None:
    """Removes what killed processes have left unfinished in a folder, at any depth, that no process writes to."""
    for left in folder.rglob(f".*{UNFINISHED}"):
        left.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    replace_file(path, write)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Waits until the disk has the file, or the names in the folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
