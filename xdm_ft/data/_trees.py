"""Finds the images in a tree of folders."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from xdm_ft.data._images import extensions
from xdm_ft.errors import UserError, printable

logger = logging.getLogger("xdm_ft")

TREE = "it must contain <domain>/<class>/<image>"  # the end of a message about `data.root`


def refuse_missing_folder(root: Path, remedy: str) -> None:
    """Raises `UserError` if `data.root` is not a folder; `remedy` ends the message and says what to do."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise UserError(f"data.root: {printable(root)} {problem}; {remedy}")


def images_below(root: Path) -> tuple[list[str], list[str]]:
    """Returns the images in the folders `<domain>/<class>/` of `root` or deeper, and all files found.

    Paths are relative to `root`, with slashes, in the order of their names. Hidden files are skipped. Links are
    followed, but not in circles. The log counts the other files and the images in other folders.
    """
    found = list(_files(str(root), "", set()))
    images = [path for path in found if path.count("/") >= 2 and is_image(path)]
    if images:
        _log_ignored(root, found)
    return images, found


def _files(folder: str, below: str, visited: set[tuple[int, int]]) -> Iterator[str]:
    """Yields the files in `folder` and deeper, in the order of their names, as paths from the root, with slashes.

    `below` is the path of `folder` from the root, "" or with a slash at its end. Folders in `visited` (device, inode)
    are skipped.
    """
    try:
        status = os.stat(folder)
        with os.scandir(folder) as scan:
            entries = sorted((entry for entry in scan if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"data.root: {printable(folder)} can not be read: {error.strerror}") from error
    identity = (status.st_dev, status.st_ino)
    if identity in visited:
        return
    visited.add(identity)
    # Above a class folder `visited` has the parents only, to which a link may lead back: two domains may link to the
    # same images. Within a class it has every folder read, as folders that link to each other would repeat
    # exponentially.
    in_class = below.count("/") >= 2  # domain/class/
    for entry in entries:
        # os.path.isdir: for a link that points to itself `entry.is_dir` raises
        if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
            yield from _files(entry.path, f"{below}{entry.name}/", visited if in_class else set(visited))
        else:
            yield below + entry.name


def is_image(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in extensions()


def _log_ignored(root: Path, found: list[str]) -> None:
    other = [path for path in found if not is_image(path)]
    higher = [path for path in found if path.count("/") < 2 and is_image(path)]
    for paths, what in ((other, "files that are not images"), (higher, "images outside a <domain>/<class> folder")):
        if paths:
            logger.warning("%s: ignored %d %s, the first: %s", root, len(paths), what, printable(paths[0]))
