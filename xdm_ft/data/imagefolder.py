"""Your own images in folders, `<domain>/<class>/<image>`, read by the package `datasets`."""

from __future__ import annotations

import glob
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.image_files.files import (
    TREE,
    describe_left_out,
    images_below,
    is_image,
    refuse_missing_folder,
    refuse_splits,
)
from xdm_ft.image_files.tables import Columns, ImageTable, load
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.names import expand_user

FROM_FOLDERS = Columns(domain=None)  # imagefolder has classes and splits only, so that domains are read as splits


class ImageFolder(ImageTable):
    """One imagefolder of `datasets` per domain. `data.name: folder` reads the same images, and deeper trees too."""

    def __init__(
        self, *, root: Annotated[Path, Field(description="folder that contains <domain>/<class>/<image>")]
    ) -> None:
        from datasets import load_dataset

        root = expand_user(root, "data.root")
        refuse_missing_folder(root, TREE)
        tree, folder = images_below(root), printable(root)
        images = [path for path in tree.files if "/" in path and is_image(path)]
        if not images:
            raise UserError(f"data.root: {folder} contains no images in <domain>/<class>/ folders; {TREE}")
        domains = Counter(path.split("/")[0] for path in images)  # in the order of their names
        refuse_splits(folder, tree.images, domains, {path.split("/")[1] for path in tree.images})
        # `datasets` takes the folder of an image for its class, at any depth
        if others := [path for path in images if path.count("/") != 2]:
            raise UserError(
                f"data.root: {folder}: {printable(others[0])} ({len(others)} of {len(images)} images) is not "
                "<domain>/<class>/<image>; move it, or set data.name: folder, which reads deeper folders too"
            )
        if chained := [path for path in images if "::" in f"{root.absolute()}/{path}"]:
            raise UserError(
                f"data.root: {folder}: `datasets` cannot read a path with :: ({printable(chained[0])}); rename it, or "
                "set data.name: folder"
            )
        # numbered, as `datasets` allows fewer characters in the name of a split than a folder may have
        files = {f"domain{n}": f"{glob.escape(str(root.absolute() / name))}/**" for n, name in enumerate(domains)}
        # without these two, a first domain of one class has no labels, and a file metadata.csv replaces all of them
        of_folders = {"drop_labels": False, "metadata_filenames": ["/"], "keep_in_memory": False}
        splits = load(lambda: load_dataset("imagefolder", data_files=files, **of_folders), folder, TREE)
        parts = {name: splits[split] for name, split in zip(domains, files, strict=True)}
        for name, part in parts.items():
            if len(part) != domains[name]:  # it follows no links, unpacks archives, and knows other extensions
                raise UserError(
                    f"data.root: {folder}: `datasets` finds {len(part)} of {domains[name]} images in "
                    f"{printable(name)}; set data.name: folder, which finds all"
                )
        self._fill(parts, FROM_FOLDERS, folder)
        self.left_out = describe_left_out(root, tree)
