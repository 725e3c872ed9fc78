"""Own images in folders: `<domain>/<class>/<image>`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.data._files import GroupPattern, ImageFiles, groups_of, numbered
from xdm_ft.data._images import printable
from xdm_ft.data._trees import images_below, is_image
from xdm_ft.errors import UserError


class Folder(ImageFiles):
    """Images of any format that Pillow reads, in their class folder or deeper, in the order of their paths.

    The classes are those of all domains together, sorted. Hidden files are passed over; files that are no images, or
    lie outside a class folder, are left out and counted in the log. Links are followed, though not round in circles.
    """

    folder_order = True

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
        images, found = images_below(root)
        if not images:
            raise UserError(f"data.root: {printable(root)} holds no images in <domain>/<class>/ folders{_hint(found)}")
        absolute = os.path.abspath(root)
        self.paths = [os.path.join(absolute, path) for path in images]
        self.shown = [os.path.join(root, path) for path in images]
        self.domain_names, self.domains = numbered([path.split("/")[0] for path in images])
        self.class_names, self.labels = numbered([path.split("/")[1] for path in images])
        self.groups = None if group is None else groups_of(images, group)


def _hint(found: list[str]) -> str:
    higher = [path for path in found if path.count("/") < 2 and is_image(path)]
    if higher:
        return f"; {len(higher)} lie higher up, such as {printable(higher[0])}"
    return f"; it holds {len(found)} other files" if found else "; it is empty"
