"""Images inside Parquet files, with columns for label and domain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.data._image_tables import OWN_COLUMNS, Columns, ImageTable, load
from xdm_ft.data._images import printable
from xdm_ft.errors import UserError


class Parquet(ImageTable):
    """One Parquet file or a folder of them, in the order of their names. Image files lie in a column, as bytes.

    `datasets` keeps a copy as Arrow files in its own cache (HF_HOME), made once: images are read from there.
    """

    def __init__(
        self,
        *,
        file: Annotated[Path, Field(description="a .parquet file, or a folder of them")],
        columns: Annotated[Columns, Field(description="which column holds what")] = OWN_COLUMNS,
    ) -> None:
        from datasets import load_dataset

        file = file.expanduser()
        if not file.exists():
            raise UserError(f"data.file: {printable(file)} does not exist; name a .parquet file or a folder of them")
        files = sorted(str(path) for path in file.glob("*.parquet")) if file.is_dir() else [str(file)]
        if not files:
            raise UserError(f"data.file: {printable(file)} holds no .parquet files; name the folder that does")
        where = printable(file)
        parts = load(lambda: load_dataset("parquet", data_files=files), where, "write it again, or remove it")
        self._take(parts, columns, where)
