"""Finds data sets of the package `wilds`, downloads them if allowed, and opens them without its side effects.

WILDS creates `root` even if it has no data to put there, has one message for several faults, prints to standard output,
switches off Pillow's limit on the number of pixels and asks the package index for newer versions of itself.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from filelock import FileLock
from PIL import Image
from pydantic import Field

from xdm_ft.runtime.errors import UserError, not_there, printable
from xdm_ft.storage.names import expand_user

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger("xdm_ft")

SERVER = "WILDS' server has served no data since April 2026 (github.com/p-lambda/wilds/issues/174)"
WildsRoot = Annotated[
    Path, Field(description="folder that contains the data set's own folder, in the layout of WILDS, or that folder")
]
Download = Annotated[bool, Field(description="true: download missing data with WILDS' downloader")]


def open_release(
    name: str,
    class_name: str,
    root: Path,
    download: bool,
    mend: Callable[[Path, DataFrame], DataFrame] = lambda file, table: table,
) -> Any:
    """Returns the WILDS data set `name` (WILDS' class `class_name`) with its official split.

    Missing data are downloaded if `download` is true, by one of several processes. WILDS sees what `mend` returns of
    each table that it reads. Raises `UserError` if data are missing, incomplete or damaged.
    """
    root = expand_user(root, "data.root")
    cls = release_class(name, class_name)
    version, release = max(cls._versions_dict.items(), key=lambda item: tuple(map(int, item[0].split("."))))
    if root.name == f"{name}_v{version}" and not (root / root.name).is_dir():
        root = root.parent
    folder = root / f"{name}_v{version}"
    marker = folder / f"RELEASE_v{version}.txt"
    digits = -9 if release["compressed_size"] < 1e10 else -10
    size = f"{round(release['compressed_size'], digits) / 1e9:.0f} GB"  # one digit: 10658709504 → "10 GB"
    if not marker.is_file():
        if download:
            _download(cls, folder, marker, size)
        else:
            remedy = (
                f"set data.root to a folder with a copy of {folder.name}/. {SERVER}; to try it, set "
                f"data.download: true (about {size})"
            )
            if folder.is_dir():
                problem = f"contains no {marker.name}, which ends a download: create it if all files are there, else"
                raise UserError(f"data.root: {printable(folder)} {problem} {remedy}")
            raise UserError(f"data.root: {printable(folder)} {not_there(folder)}; {remedy}")
    try:
        with warnings.catch_warnings(), _mend_tables(cls, mend):
            # pandas 3 returns read-only arrays; WILDS wraps them as tensors and does not write to them
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            warnings.filterwarnings("ignore", message="Minimum metadata value for CombinatorialGrouper")
            return cls(root_dir=str(root), download=False, split_scheme="official")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = printable(f"{type(error).__name__}: {error}")[:200]
        raise UserError(
            f"data.root: {folder}: WILDS cannot read its tables ({reason}); replace the .csv files by those of another "
            f"copy, and keep the images. {SERVER}"
        ) from error


@contextlib.contextmanager
def _mend_tables(cls: Any, mend: Callable[[Path, DataFrame], DataFrame]) -> Iterator[None]:
    """Context in which the module of `cls` reads each CSV file as `mend` returns it."""
    module = sys.modules[cls.__module__]
    pandas = module.pd

    def read_csv(file: Any, **settings: Any) -> DataFrame:
        return mend(Path(file), pandas.read_csv(file, **settings))

    module.pd = SimpleNamespace(**{**vars(pandas), "read_csv": read_csv})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.pd = pandas  # type: ignore[attr-defined]


def release_class(name: str, class_name: str) -> Any:
    """Returns WILDS' class `class_name` for its data set `name`, imported without lasting effects on this process."""
    limit, outdated = Image.MAX_IMAGE_PIXELS, sys.modules.get("outdated")
    # WILDS and ogb do without `outdated`. With it, importing them starts threads that ask the package index for newer
    # versions. Such a thread may warn at any later moment, or hold a lock while a worker is forked.
    sys.modules["outdated"] = None  # type: ignore[assignment]  # what makes Python's import raise ImportError
    try:
        return getattr(importlib.import_module(f"wilds.datasets.{name}_dataset"), class_name)
    finally:
        Image.MAX_IMAGE_PIXELS = limit  # which importing WILDS switches off
        del sys.modules["outdated"]
        if outdated is not None:
            sys.modules["outdated"] = outdated


def _download(cls: Any, folder: Path, marker: Path, size: str) -> None:
    """Downloads and unpacks the data into `folder`. Raises `UserError` if that fails."""
    archive = folder / "archive.tar.gz"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if marker.is_file():  # another process has downloaded it
                return
            if archive.exists():  # WILDS would unpack it even if it is incomplete
                raise UserError(
                    f"data.root: {archive} is left from an earlier download; unpack it there with `tar xzf` if "
                    "it is complete, else remove it; then run again"
                )
            logger.info("downloading about %s to %s", size, folder)
            # WILDS' downloader alone, as its constructor would also read the metadata
            unopened = cls.__new__(cls)
            unopened._version = None  # the latest
            # an archive cannot write outside its folder; Python 3.14 needs no such filter
            tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    unopened.initialize_data_dir(str(folder.parent), True)
            finally:
                del tarfile.TarFile.extraction_filter
    except OSError as error:
        raise UserError(f"data.root: {folder} cannot be written: {error.strerror or error}") from error
    if not marker.is_file():  # WILDS' downloader catches its own exceptions, so that only this file shows its success
        raise UserError(
            f"data.download: the download to {folder} failed (see WILDS' message above). {SERVER}. With a copy of "
            f"{folder.name}/, set data.root to its folder; else check network and disk ({size}, and as much again), "
            "remove the folder and run again"
        )
