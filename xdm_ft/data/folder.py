"""Your own images in folders: `<domain>/<class>/<image>`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.data._files import Below, GroupPattern, ImageFiles, groups_of, numbered
from xdm_ft.data._trees import TREE, images_below, is_image, refuse_missing_folder
from xdm_ft.errors import UserError, plural, printable
from xdm_ft.storage.user_paths import expanded


class Folder(ImageFiles):
    """Images of any format that Pillow reads, in a class folder or deeper, in the order of their paths.

    Classes are those of all domains together, sorted. Hidden files are skipped. Files that are not images, or are
    outside a class folder, are ignored and counted in the log. Links are followed, but not in circles.
    """

    folder_order = True

    def __init__(
        self,
        *,
        root: Annotated[Path, Field(description="folder that contains <domain>/<class>/<image>")],
        group: GroupPattern = None,
    ) -> None:
        root = expanded(root, "data.root")
        refuse_missing_folder(root, TREE)
        images, found = images_below(root)
        if not images:
            raise UserError(
                f"data.root: {printable(root)} contains no images in <domain>/<class>/ folders; {_found(found)}"
            )
        self.base, self.paths, self.shown = root, Below(os.path.abspath(root), images), Below(root, images)
        # slices, as Python's garbage collector takes longer for a million lists than `split` does
        self.domain_names, self.domains = numbered([path[: path.index("/")] for path in images])
        after = (path.index("/") + 1 for path in images)
        inside = [path[first : path.index("/", first)] for path, first in zip(images, after, strict=True)]
        self.class_names, self.labels = numbered(inside)
        self.groups = None if group is None else groups_of(images, group)


def _found(found: list[str]) -> str:
    """Returns the end of the message: the files that are there instead of images in class folders."""
    higher = [path for path in found if path.count("/") < 2 and is_image(path)]
    if higher:
        count = plural(len(higher), "image")
        return f"it contains {count} in higher folders, such as {printable(higher[0])}; move them into class folders"
    return f"it contains {plural(len(found), 'other file')}" if found else "it is empty"
