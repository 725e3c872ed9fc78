"""Own images in folders, `<domain>/<class>/<image>`, as `datasets` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.data._image_tables import Columns, ImageTable, load
from xdm_ft.data._images import printable
from xdm_ft.errors import UserError

FROM_FOLDERS = Columns(domain=None)  # imagefolder itself knows classes and splits, no domains


class ImageFolder(ImageTable):
    """What `datasets` calls an imagefolder, one per domain. `folder` reads the same without it, deeper trees too."""

    def __init__(
        self, *, root: Annotated[Path, Field(description="folder that holds <domain>/<class>/<image>")]
    ) -> None:
        from datasets import load_dataset

        root = root.expanduser()
        inside = sorted(root.iterdir()) if root.is_dir() else []
        domains = [path for path in inside if path.is_dir() and not path.name.startswith(".")]
        where = printable(root)
        if not domains:
            raise UserError(f"data.root: {where} holds no folders; it must hold <domain>/<class>/<image>")
        # the names of domains need not be names of splits, which `datasets` restricts
        files = {f"domain{number}": f"{path.absolute()}/**" for number, path in enumerate(domains)}
        remedy = "it must hold <domain>/<class>/<image>"
        found = load(lambda: load_dataset("imagefolder", data_files=files), where, remedy)
        parts = {path.name: found[split] for path, split in zip(domains, files, strict=True)}
        self._take(parts, FROM_FOLDERS, where)
