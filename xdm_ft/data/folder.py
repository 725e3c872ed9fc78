"""Own images in folders: `<domain>/<class>/<image>`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.data.loading.files import GroupPattern, ImageFiles, groups_of, numbered
from xdm_ft.data.loading.images import extensions, printable
from xdm_ft.errors import UserError

logger = logging.getLogger("xdm_ft")


class Folder(ImageFiles):
    """Images of any format that Pillow reads, in their class folder or deeper, in the order of their paths.

    The classes are those of all domains together, sorted. Hidden files are passed over; files that are no images, or
    lie outside a class folder, are left out and counted in the log. Links are followed, though not round in circles.
    """

    def __init__(
        self,
        *,
        root: Annotated[Path, Field(description="folder that holds <domain>/<class>/<image>")],
        group: GroupPattern = None,
    ) -> None:
        root = root.expanduser()
        if not root.is_dir():
            problem = "is no folder" if root.exists() else "does not exist"
            raise UserError(f"data.root: {printable(root)} {problem}; it must hold <domain>/<class>/<image>")
        found = list(_files(str(root), "", set()))
        images = [path for path in found if path.count("/") >= 2 and _is_image(path)]
        if not images:
            raise UserError(f"data.root: {printable(root)} holds no images in <domain>/<class>/ folders{_hint(found)}")
        _log_ignored(root, found)
        absolute = os.path.abspath(root)
        self.paths = [os.path.join(absolute, path) for path in images]
        self.shown = [os.path.join(root, path) for path in images]
        self.domain_names, self.domains = numbered([path.split("/")[0] for path in images])
        self.class_names, self.labels = numbered([path.split("/")[1] for path in images])
        self.groups = None if group is None else groups_of(images, group)


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


def _is_image(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in extensions()


def _hint(found: list[str]) -> str:
    higher = [path for path in found if path.count("/") < 2 and _is_image(path)]
    if higher:
        return f"; {len(higher)} lie higher up, such as {printable(higher[0])}"
    return f"; it holds {len(found)} other files" if found else "; it is empty"


def _log_ignored(root: Path, found: list[str]) -> None:
    other = [path for path in found if not _is_image(path)]
    higher = [path for path in found if path.count("/") < 2 and _is_image(path)]
    for paths, what in ((other, "files that are no images"), (higher, "images outside a <domain>/<class> folder")):
        if paths:
            logger.warning("%s: left out %d %s, the first: %s", root, len(paths), what, printable(paths[0]))
