"""Data sets that the package `datasets` reads: Arrow tables on disk with a column of encoded image files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from xdm_ft.containers.tables import encode_names, name_columns, parts_of
from xdm_ft.images.dataset import Container
from xdm_ft.images.decode import EncodedImages
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.runtime.settings import Block
from xdm_ft.storage.names import expand_user

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


class Columns(Block):
    """The names of the table's columns."""

    image: Annotated[str, Field(description="column of the images: encoded image files as bytes")] = "image"
    label: Annotated[str, Field(description="column of the class: text or an integer")] = "label"
    domain: Annotated[
        str | None, Field(description="column of the domain; null: each split of the data is a domain")
    ] = "domain"
    group: Annotated[
        str | None, Field(description="column of the patient, slide or sequence; null: images are independent")
    ] = None
    split: Annotated[
        str | None, Field(description="column with train, val or test; null: the data has no split of its own")
    ] = None


OWN_COLUMNS = Columns()


def load(read: Callable[[], DatasetDict], where: str, remedy: str) -> DatasetDict:
    """Returns what `read` loads with `datasets`. Raises `UserError`, one line that ends with `remedy`."""
    from datasets.config import HF_DATASETS_CACHE
    from datasets.exceptions import DatasetsError

    expand_user(HF_DATASETS_CACHE, "HF_HOME")  # `datasets` would write to a folder of the name ~
    try:
        return read()
    except (DatasetsError, OSError, ValueError) as error:  # Arrow raises ValueError for a damaged Parquet file
        cause = error.__cause__ or error
        reason = " ".join(printable(f"{type(cause).__name__}: {cause}").split())[:200]
        raise UserError(f"{where}: can not be read ({reason}); {remedy}") from error


class ImageTable(EncodedImages):
    """Row i is row i of the table. Images are decoded here, not by `datasets`: pixels equal those of `Folder`."""

    table: Dataset  # the image column only
    column: str
    where: str  # name of the data for messages

    def _fill(self, parts: Mapping[str, Dataset], columns: Columns, where: str, use_splits: bool = False) -> None:
        """Concatenates `parts`, {name of the split: table}. Raises `UserError` if a column is missing or has gaps."""
        import pyarrow
        from datasets import ClassLabel, concatenate_datasets
        from datasets import Image as ImageFeature

        self.where, self.column = where, columns.image
        wanted = [name for name in columns.model_dump().values() if name is not None]
        for key, name in columns.model_dump().items():
            for part in parts.values():
                if name is not None and name not in part.column_names:
                    hint = did_you_mean(name, part.column_names)
                    raise UserError(f'data.columns.{key}: {where} has no column "{name}"{hint}')
        try:
            table = concatenate_datasets([part.select_columns(wanted) for part in parts.values()])
        except ValueError as error:
            raise UserError(f"{where}: the splits have different types of columns: {error}") from error
        if isinstance(table.features[columns.image], ImageFeature):
            table = table.cast_column(columns.image, ImageFeature(decode=False))  # else reading a row decodes it
        self.table = table.select_columns([columns.image])
        files = tuple(part["filename"] for part in table.cache_files)
        self.container = Container(files, columns.image) if files else None
        of_part = np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])
        self.domain_names, self.domains = tuple(printable(name) for name in parts), of_part
        names = {name: feature.names for name, feature in table.features.items() if isinstance(feature, ClassLabel)}
        cells = {name: encode_names(table.data.column(name), f"{where}: column {name}") for name in wanted[1:]}
        name_columns(self, pyarrow.table(cells), where, columns.model_dump(exclude={"image"}), names)
        if use_splits and columns.split is None:
            self.splits = parts_of(where, tuple(parts), of_part)

    def name(self, row: int) -> str:
        return f"{self.where}, {self.name_in_data(row)}"

    def name_in_data(self, row: int) -> str:
        value = self.table[int(row)][self.column]
        path = value.get("path") if isinstance(value, dict) else None
        return f"row {row}" + (f" ({printable(os.path.basename(path))})" if path else "")

    def content(self, row: int) -> str | bytes:
        value = self.table[int(row)][self.column]
        if isinstance(value, dict):
            return value["bytes"] if value["bytes"] is not None else os.path.abspath(value["path"] or "")
        return value if isinstance(value, bytes) else b""  # b"" does not decode and is reported as such
