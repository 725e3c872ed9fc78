"""Images inside Parquet files, with columns for label and domain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from xdm_ft.data._image_tables import OWN_COLUMNS, Columns, ImageTable, load
from xdm_ft.errors import UserError, printable
from xdm_ft.storage.user_paths import expanded


class Parquet(ImageTable):
    """One Parquet file or a folder of them, in the order of their names. A column contains image files as bytes.

    `datasets` copies the data once to Arrow files in its cache (HF_HOME), and images are read from there.
    """

    def __init__(
        self,
        *,
        file: Annotated[Path, Field(description="a .parquet file, or a folder of them")],
        columns: Annotated[Columns, Field(description="names of the columns")] = OWN_COLUMNS,
    ) -> None:
        from datasets import load_dataset

        file = expanded(file, "data.file")
        if not file.exists():
            raise UserError(f"data.file: {printable(file)} does not exist; name a .parquet file or a folder of them")
        files = sorted(str(path) for path in file.glob("*.parquet")) if file.is_dir() else [str(file)]
        if not files:
            raise UserError(f"data.file: {printable(file)} contains no .parquet files; name a folder that does")
        where = printable(file)
        parts = load(
            lambda: load_dataset("parquet", data_files=files, keep_in_memory=False),
            where,
            "write the file again, or remove it",
        )
        self._fill(parts, columns, where)
