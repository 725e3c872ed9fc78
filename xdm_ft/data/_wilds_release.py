"""Data sets that the `wilds` package reads: found, downloaded where allowed, and opened without its side effects.

WILDS makes `root` even where it then finds nothing there, gives one message for several faults, prints to standard
output and switches off Pillow's guard against decompression bombs; hence the care.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock
from PIL import Image
from pydantic import Field

from xdm_ft.data._images import printable
from xdm_ft.errors import UserError

logger = logging.getLogger("xdm_ft")

Root = Annotated[Path, Field(description="folder that holds the data set's own folder, as WILDS lays it out")]
Download = Annotated[bool, Field(description="download the data by WILDS' own downloader where they are missing")]


def open_release(name: str, class_name: str, root: Path, download: bool) -> Any:
    """The WILDS data set `name` (WILDS' class `class_name`), official split. Raises `UserError` where it is not whole.

    Downloads only with `download`, once however many processes ask.
    """
    root = root.expanduser()
    with _own_pixel_limit():
        cls = getattr(importlib.import_module(f"wilds.datasets.{name}_dataset"), class_name)
    version, release = max(cls._versions_dict.items(), key=lambda item: tuple(map(int, item[0].split("."))))
    folder = root / f"{name}_v{version}"
    marker = folder / f"RELEASE_v{version}.txt"
    size = _about(release["compressed_size"])
    if not marker.is_file():
        if not download:
            raise UserError(_missing(name, folder, marker, size))
        _download(cls, folder, marker, size)
    try:
        with warnings.catch_warnings():
            # pandas 3 hands out read-only arrays, which WILDS wraps as tensors and does not write
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            warnings.filterwarnings("ignore", message="Minimum metadata value for CombinatorialGrouper")
            return cls(root_dir=str(root), download=False, split_scheme="official")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = printable(f"{type(error).__name__}: {error}")[:200]
        raise UserError(
            f"data.root: {printable(folder)} is incomplete or damaged ({reason}); remove it and download it again"
        ) from error


def _missing(name: str, folder: Path, marker: Path, size: str) -> str:
    command = f"python -m wilds.download_datasets --root_dir {printable(folder.parent)} --datasets {name}"
    remedy = f"set data.download: true, or run `{command}` (about {size})"
    if not folder.is_dir():
        return f"data.root: {printable(folder)} does not exist; {remedy}"
    return (
        f"data.root: {printable(folder)} exists but lacks {marker.name}, so its download was not finished; "
        f"remove the folder, then {remedy}"
    )


def _about(size: int) -> str:
    """Bytes to one digit: 10658709504 → "10 GB"."""
    return f"{round(size, -9 if size < 1e10 else -10) / 1e9:.0f} GB"


def _download(cls: Any, folder: Path, marker: Path, size: str) -> None:
    """WILDS' downloader swallows its own exceptions: whether it worked is told by what it leaves behind."""
    archive = folder / "archive.tar.gz"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if marker.is_file():  # another process was first
                return
            if archive.exists():  # WILDS would take a part of it for the whole
                raise UserError(
                    f"data.root: {printable(archive)} is left of an earlier download; if it is whole, unpack it there "
                    f"by `tar xzf`, else remove it, and run again"
                )
            logger.info("downloading about %s to %s", size, folder)
            unopened = cls.__new__(cls)
            unopened._version = None  # the latest
            with contextlib.redirect_stdout(sys.stderr), _plain_members_only():
                unopened.initialize_data_dir(str(folder.parent), True)
    except OSError as error:
        raise UserError(f"data.root: {printable(folder)} can not be written: {error.strerror or error}") from error
    if not marker.is_file():
        raise UserError(
            f"data.download: the download to {printable(folder)} failed, WILDS' message is above; check network and "
            f"free space on the disk (the archive of {size} and its content), remove the folder and run again"
        )


@contextlib.contextmanager
def _plain_members_only() -> Iterator[None]:
    """Archives unpacked within can not write outside their folder. Python 3.14 does so by itself."""
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    try:
        yield
    finally:
        del tarfile.TarFile.extraction_filter


@contextlib.contextmanager
def _own_pixel_limit() -> Iterator[None]:
    limit = Image.MAX_IMAGE_PIXELS
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit
