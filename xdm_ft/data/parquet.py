"""Images inside Parquet files, with columns for label and domain."""

from __future__ import annotations

import glob
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from xdm_ft.containers.image_tables import OWN_COLUMNS, Columns
from xdm_ft.containers.named_columns import Column, named, parts_of
from xdm_ft.containers.parquet import FileIndex, read_footer, read_images, read_index
from xdm_ft.containers.pieces import CacheSize, Piece, PiecedImages, read_files
from xdm_ft.images.dataset import Container, Pieces
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.remembered import remembered
from xdm_ft.storage.remote import FileState, is_remote, listed, states_of
from xdm_ft.storage.user_paths import expanded


class Parquet(PiecedImages):
    """One Parquet file or a folder of them, in the order of their names. A column contains image files as bytes.

    Row i is row i of the files. The columns that name things are read at the start; images are read by row group. What
    is read of a remote file at the start is remembered until the file changes.
    """

    def __init__(
        self,
        *,
        file: Annotated[
            str | Path,
            Field(description="a .parquet file, a folder of them or a glob; also https://, s3://, gs://, hf://"),
        ],
        columns: Annotated[Columns, Field(description="names of the columns")] = OWN_COLUMNS,
        cache_mb: CacheSize = 256,
    ) -> None:
        file = str(file)
        self.where, self.cache_mb = printable(file), cache_mb
        files = listed(file, ".parquet", deep=False) if is_remote(file) else _local(file)
        if not files:
            raise UserError(f"data.file: {self.where} contains no .parquet files; name a folder that does")
        states = tuple(states_of(files))
        of_names = {key: name for key, name in columns.model_dump(exclude={"image"}).items() if name is not None}
        found = read_files(partial(_index, image=columns.image, named=of_names), files, states)
        ends = np.cumsum(np.concatenate([index.rows for index in found]))
        file_of = np.repeat(np.arange(len(files)), [len(index.rows) for index in found])
        self.pieces = Pieces(ends, file_of, states)
        self.container = Container(tuple(files), columns.image, self.pieces)
        self._name_rows(found, columns)

    def _name_rows(self, found: list[FileIndex], columns: Columns) -> None:
        """Sets classes, domains, groups, splits and the names of images."""
        import pyarrow

        def numbers(name: str) -> tuple[tuple[str, ...], np.ndarray]:
            column = Column.joined([index.columns[name] for index in found])
            return named(column, self.where, name, found[0].class_names.get(name))

        self.class_names, self.labels = numbers(columns.label)
        self.domain_names, self.domains = ("train",), np.zeros(len(self.labels), np.int64)
        if columns.domain is not None:
            self.domain_names, self.domains = numbers(columns.domain)
        if columns.group is not None:
            self.groups = numbers(columns.group)[1]
        if columns.split is not None:
            self.splits = parts_of(self.where, *numbers(columns.split))
        self.image_names = None
        if any(index.image_names is not None for index in found):
            unnamed = pyarrow.scalar("", pyarrow.large_string())
            self.image_names = pyarrow.chunked_array(
                pyarrow.repeat(unnamed, int(index.rows.sum())) if index.image_names is None else index.image_names
                for index in found
            )

    def name(self, row: int) -> str:
        return f"{self.where}, {self.name_in_data(row)}"

    def name_in_data(self, row: int) -> str:
        name = self.image_names[int(row)].as_py() if self.image_names is not None else ""
        return f"row {row}" + (f" ({printable(name)})" if name else "")

    def read_piece(self, number: int) -> Piece:
        file = int(self.pieces.file_of[number])
        address, state = self.container.files[file], self.pieces.states[file]
        footer = self.own.footers.get(file, partial(read_footer, address, state))
        return read_images(address, state, footer, self.pieces.in_file(number), self.container.column)


def _local(file: str) -> list[str]:
    """Returns the files that a path of this machine names, sorted."""
    path = expanded(file, "data.file")
    if path.is_dir():
        return sorted(str(found) for found in path.absolute().glob("*.parquet"))
    if path.exists():
        return [str(path.absolute())]
    found = sorted(str(Path(one).absolute()) for one in glob.glob(str(path)))
    if not found:
        where = printable(file)
        raise UserError(f"data.file: {where} does not exist; name a .parquet file or a folder of them")
    return found


def _index(address: str, state: FileState, image: str, named: dict[str, str]) -> FileIndex:
    """Returns the index of a file: a remembered one if the file is remote."""
    if not is_remote(address):
        return read_index(address, state, image, named)
    key = repr(["parquet", 1, address, state, image, named])
    return FileIndex.read(remembered(key, lambda: read_index(address, state, image, named).arrays()))
