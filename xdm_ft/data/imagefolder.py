"""Your own images in folders, `<domain>/<class>/<image>`, read by the package `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.containers.files import TREE, images_below, left_out, refuse_missing_folder
from xdm_ft.containers.tables import Columns, ImageTable, load
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
        tree, where = images_below(root), printable(root)
        domains = [root / name for name in dict.fromkeys(path.split("/")[0] for path in tree.images)]
        if not domains:
            raise UserError(f"data.root: {where} contains no images in <domain>/<class>/ folders; {TREE}")
        # numbered, as `datasets` allows fewer characters in the name of a split than a folder may have
        files = {f"domain{number}": f"{path.absolute()}/**" for number, path in enumerate(domains)}
        splits = load(lambda: load_dataset("imagefolder", data_files=files, keep_in_memory=False), where, TREE)
        parts = {path.name: splits[split] for path, split in zip(domains, files, strict=True)}
        self._fill(parts, FROM_FOLDERS, where)
        self.left_out = left_out(root, tree)
