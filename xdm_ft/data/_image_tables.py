"""Data sets that `datasets` reads: tables in Arrow files on disk, whose image column holds whole image files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from PIL import Image
from pydantic import Field

from xdm_ft.data import ImageDataset
from xdm_ft.data._files import numbered
from xdm_ft.data._images import decode, printable
from xdm_ft.errors import UserError, did_you_mean
from xdm_ft.settings import Block

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}


class Columns(Block):
    """Which column of the table holds what."""

    image: Annotated[str, Field(description="image files, as bytes")] = "image"
    label: Annotated[str, Field(description="class, a text or a number")] = "label"
    domain: Annotated[str | None, Field(description="domain; null: each split of the data is a domain")] = "domain"
    group: Annotated[str | None, Field(description="patient, slide, sequence; null: images are independent")] = None
    split: Annotated[str | None, Field(description="train, val or test; null: the data comes without")] = None


OWN_COLUMNS = Columns()


def load(read: Callable[[], DatasetDict], where: str, remedy: str) -> DatasetDict:
    """What `datasets` reads, its faults in one line."""
    from datasets.exceptions import DatasetsError

    try:
        return read()
    except (DatasetsError, OSError, ValueError) as error:  # a damaged Parquet file is a ValueError of Arrow's
        cause = error.__cause__ or error
        reason = " ".join(printable(f"{type(cause).__name__}: {cause}").split())[:200]
        raise UserError(f"{where}: can not be read ({reason}); {remedy}") from error


class ImageTable(ImageDataset):
    """Row i is row i of the table. Images are decoded by us, not by `datasets`: the same pixels as from a folder."""

    table: Dataset  # of the image column alone
    column: str
    where: str

    def _take(self, parts: Mapping[str, Dataset], columns: Columns, where: str, use_splits: bool = False) -> None:
        """`parts` by the name of their split, one after the other. Raises `UserError` where columns do not fit."""
        from datasets import Image as ImageFeature
        from datasets import concatenate_datasets

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
            raise UserError(f"{where}: its splits have different columns: {printable(error)}") from error
        if isinstance(table.features[columns.image], ImageFeature):
            table = table.cast_column(columns.image, ImageFeature(decode=False))
        self.table = table.select_columns([columns.image])
        self.class_names, self.labels = self._numbered(table, columns.label)
        part_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])
        if columns.domain is None:
            self.domain_names, self.domains = tuple(printable(name) for name in parts), part_of
        else:
            self.domain_names, self.domains = self._numbered(table, columns.domain)
        if columns.group is not None:
            self.groups = self._numbered(table, columns.group)[1]
        if columns.split is not None:
            self.splits = self._parts_of(*self._numbered(table, columns.split))
        elif use_splits:
            self.splits = self._parts_of(tuple(parts), part_of)

    def _numbered(self, table: Dataset, column: str) -> tuple[tuple[str, ...], np.ndarray]:
        """The values that occur, in the order of the data's own list of them, else sorted; and each row's number."""
        from datasets import ClassLabel

        values, feature = list(table[column]), table.features[column]
        known = range(len(feature.names)) if isinstance(feature, ClassLabel) else None
        for row, value in enumerate(values):
            if value is None or (known is not None and value not in known):
                raise UserError(f"{self.where}: row {row}, column {column}: no value")
        if not all(isinstance(value, int) for value in values):
            return numbered([str(value) for value in values])
        present, numbers = np.unique(np.array(values, dtype=np.int64), return_inverse=True)
        names = [feature.names[i] if isinstance(feature, ClassLabel) else str(i) for i in present.tolist()]
        return tuple(printable(name) for name in names), numbers

    def _parts_of(self, names: tuple[str, ...], numbers: np.ndarray) -> np.ndarray:
        for name in names:
            if name not in PARTS:
                raise UserError(f'{self.where}: no split "{name}"{did_you_mean(name, list(PARTS))}')
        return np.array([PARTS[name] for name in names])[numbers]

    def image(self, row: int) -> Image.Image:
        content = self.content(row)
        return decode(content if isinstance(content, bytes) else Path(content), self.name(row))

    def name(self, row: int) -> str:
        value = self._value(row)
        path = value.get("path") if isinstance(value, dict) else None
        return f"{self.where}, row {row}" + (f" ({printable(os.path.basename(path))})" if path else "")

    def content(self, row: int) -> str | bytes:
        value = self._value(row)
        if isinstance(value, dict):
            return value["bytes"] if value["bytes"] is not None else os.path.abspath(value["path"] or "")
        return value if isinstance(value, bytes) else b""  # no bytes: an image that does not decode

    def _value(self, row: int) -> Any:
        return self.table[int(row)][self.column]
