"""Images inside Parquet files, with columns for label and domain."""

from __future__ import annotations

import glob
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from xdm_ft.containers.image_tables import OWN_COLUMNS, Columns
from xdm_ft.containers.parquet import IMAGE_NAMES, about_index, read_footer, read_images, read_index
from xdm_ft.containers.pieces import CacheSize, PiecedImages, read_files
from xdm_ft.containers.remote import is_remote, list_files, states_of
from xdm_ft.containers.tables import join_tables, name_columns, remembered_table
from xdm_ft.images.dataset import Container, FileState, Pieces
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.names import expand_user

if TYPE_CHECKING:
    from pyarrow import Table


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
        files = list_files(file, ".parquet", deep=False) if is_remote(file) else _local(file)
        if not files:
            raise UserError(f"data.file: {self.where} contains no .parquet files; name a folder that does")
        states = tuple(states_of(files))
        of_names = {key: name for key, name in columns.model_dump(exclude={"image"}).items() if name is not None}
        found = read_files(partial(_index, image=columns.image, columns=of_names), files, states)
        rows, class_names = zip(*map(about_index, found), strict=True)
        file_of = np.repeat(np.arange(len(files)), [len(groups) for groups in rows])
        self.pieces = Pieces(np.cumsum(np.concatenate(rows)), file_of, states)
        self.container = Container(tuple(files), columns.image, self.pieces)
        table = join_tables(found, self.where)
        self.domain_names, self.domains = ("train",), np.zeros(len(table), np.int64)
        name_columns(self, table, self.where, columns.model_dump(exclude={"image"}), class_names[0])
        self.image_names = table[IMAGE_NAMES] if IMAGE_NAMES in table.column_names else None

    def name(self, row: int) -> str:
        return f"{self.where}, {self.name_in_data(row)}"

    def name_in_data(self, row: int) -> str:
        name = self.image_names[int(row)].as_py() if self.image_names is not None else None
        return f"row {row}" + (f" ({printable(name)})" if name else "")

    def read_piece(self, number: int) -> list[bytes]:
        file = int(self.pieces.file_of[number])
        address, state = self.container.files[file], self.pieces.states[file]
        footer = self.own.footers.get(file, partial(read_footer, address, state))
        return read_images(address, state, footer, self.pieces.in_file(number), self.container.column)


def _local(file: str) -> list[str]:
    """Returns the files that a path of this machine names, sorted."""
    path = expand_user(file, "data.file")
    if path.is_dir():
        return sorted(str(found) for found in path.absolute().glob("*.parquet"))
    if path.exists():
        return [str(path.absolute())]
    found = sorted(str(Path(one).absolute()) for one in glob.glob(str(path)))
    if not found:
        where = printable(file)
        raise UserError(f"data.file: {where} does not exist; name a .parquet file or a folder of them")
    return found


def _index(address: str, state: FileState, image: str, columns: dict[str, str]) -> Table:
    """Returns the index of a file: a remembered one if the file is remote."""
    if not is_remote(address):
        return read_index(address, state, image, columns)
    key = repr(["parquet", 2, address, state, image, columns])
    return remembered_table(key, lambda: read_index(address, state, image, columns))
