"""Your own images in folders: `<domain>/<class>/<image>`."""

from __future__ import annotations

import glob
import os
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.image_files.files import (
    TREE,
    GroupPattern,
    ImageFiles,
    PathsBelow,
    count_files,
    describe_left_out,
    groups_of,
    images_below,
    index_names,
    is_image,
    kind_of,
    refuse_missing_folder,
    refuse_splits,
)
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.storage.names import expand_user


class Folder(ImageFiles):
    """Images of any format that Pillow reads, in a class folder or deeper, in the order of their paths.

    Classes are those of all domains together, sorted. Hidden files are skipped. `describe_left_out`
    names folders without any image and files that look like data; the log counts other files. Links are followed, but
    not in circles.
    """

    folder_order = True

    def __init__(
        self,
        *,
        root: Annotated[Path, Field(description="folder that contains <domain>/<class>/<image>")],
        group: GroupPattern = None,
    ) -> None:
        root = expand_user(root, "data.root")
        refuse_missing_folder(root, TREE)
        tree = images_below(root)
        images = tree.images
        if not images:
            raise UserError(
                f"data.root: {root} contains no images in <domain>/<class>/ folders; {_what_is_there(root, tree.files)}"
            )
        self.left_out = describe_left_out(root, tree)
        self.base, self.paths, self.shown = root, PathsBelow(os.path.abspath(root), images), PathsBelow(root, images)
        # per class folder instead of per image: splitting the paths of a million images takes long
        folders, counts = list[str](), list[int]()  # class folders, and how many images each has
        first = 0
        while first < len(images):
            folder = "/".join(images[first].split("/", 2)[:2]) + "/"
            # in the order of the paths, those of the folder begin here and follow each other
            end = bisect_left(images, 1, first, key=lambda path: int(not path.startswith(folder)))
            folders.append(folder)
            counts.append(end - first)
            first = end
        self.domain_names, domains = index_names([folder.split("/")[0] for folder in folders])
        self.class_names, labels = index_names([folder.split("/")[1] for folder in folders])
        refuse_splits(root, images, self.domain_names, self.class_names)
        self.domains, self.labels = domains.repeat(counts), labels.repeat(counts)
        if group is not None:
            self.group_names, self.groups = groups_of(images, group)


def _what_is_there(root: Path, files: list[str]) -> str:
    """Returns the end of the message: the files that are there instead of images in class folders."""
    higher = [path for path in files if path.count("/") < 2 and is_image(path)]
    classes = {path.split("/")[0] for path in higher if "/" in path}
    parent = root.parent if root.name not in ("", "..") else root.resolve().parent
    domains = (glob.glob(os.path.join(glob.escape(str(parent)), "*", glob.escape(name), "")) for name in classes)
    if any(len(of_class) > 1 for of_class in domains):  # another folder has a class folder of the same name
        return f"it looks like one domain of {printable(parent)}; set data.root={printable(parent)}"
    if higher:
        count = plural(len(higher), "image")
        return (
            f"it contains {count} outside class folders, such as {printable(higher[0])}; move them into class folders"
        )
    return f"it contains {count_files(Counter(map(kind_of, files)))}" if files else "it is empty"
