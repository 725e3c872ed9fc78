"""Folders of images: what lies in them, in the order of their names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from xdm_ft.data._images import extensions, printable
from xdm_ft.errors import UserError

logger = logging.getLogger("xdm_ft")


def images_below(root: Path) -> tuple[list[str], list[str]]:
    """The images in `<domain>/<class>/` folders of `root`, class folder or deeper, and every file found.

    Paths start at the root, have slashes and come in the order of their names. Hidden files are passed over. Links are
    followed, though not round in circles. Files that are no images or lie elsewhere are counted in the log.
    """
    found = list(_files(str(root), "", set()))
    images = [path for path in found if path.count("/") >= 2 and is_image(path)]
    if images:
        _log_ignored(root, found)
    return images, found


def _files(folder: str, below: str, read: set[tuple[int, int]]) -> Iterator[str]:
    """The files in `folder` and deeper, in the order of their names; as paths from the root, with slashes.

    `below` is the folder's own path from the root. Folders in `read` (device, inode) are passed over: those above, to
    which a link may lead back, and those of the same class that were read, whose links to each other might multiply.
    """
    try:
        status = os.stat(folder)
        with os.scandir(folder) as scan:
            entries = sorted((entry for entry in scan if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"data.root: {printable(folder)} can not be read: {error.strerror}") from error
    identity = (status.st_dev, status.st_ino)
    if identity in read:
        return
    read.add(identity)
    in_class = below.count("/") >= 2  # domain/class/
    for entry in entries:
        # a link that leads round in a circle is no folder, but `entry.is_dir` would raise
        if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
            yield from _files(entry.path, f"{below}{entry.name}/", read if in_class else set(read))
        else:
            yield below + entry.name


def is_image(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in extensions()


def _log_ignored(root: Path, found: list[str]) -> None:
    other = [path for path in found if not is_image(path)]
    higher = [path for path in found if path.count("/") < 2 and is_image(path)]
    for paths, what in ((other, "files that are no images"), (higher, "images outside a <domain>/<class> folder")):
        if paths:
            logger.warning("%s: left out %d %s, the first: %s", root, len(paths), what, printable(paths[0]))
