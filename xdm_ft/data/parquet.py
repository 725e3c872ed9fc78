"""Images inside Parquet files, with columns for label and domain: names are read at the start, images by row group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from xdm_ft.image_files import CacheSize, PiecedImages, open_files
from xdm_ft.image_files.files import beside
from xdm_ft.image_files.remote import REQUESTS_AT_ONCE, is_remote, list_files, open_file
from xdm_ft.image_files.tables import (
    OWN_COLUMNS,
    Columns,
    encode_names,
    is_of_class,
    join_tables,
    name_columns,
    no_column,
    remember_table,
    soft_labels_not_read,
)
from xdm_ft.images import Container, FileState, Pieces
from xdm_ft.runtime.errors import UserError, printable

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import FileMetaData, ParquetFile

GROUPS_PER_READ = 16  # row groups whose columns of names one thread reads
IMAGE_NAMES = "\0name"  # column of an index: the names of image files, where the images are structs {bytes, path}


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
        files = list_files(file, ".parquet", deep=False)
        if not files:
            raise UserError(f"data.file: {self.where} contains no .parquet files; name a folder that does")
        named = columns.model_dump(exclude={"image"})
        of_names = {key: name for key, name in named.items() if name is not None}

        def index_of(address: str, state: FileState) -> Table:
            def read() -> Table:
                return _read_index(address, state, columns.image, of_names)

            key = repr(["parquet", 3, address, state, columns.image, of_names])
            return remember_table(key, read) if is_remote(address) else read()

        states, indexes = open_files(files, index_of)
        described = [json.loads(index.schema.metadata[b"about"]) for index in indexes]
        file_of = np.repeat(np.arange(len(files)), [len(of_file["rows"]) for of_file in described])
        ends = np.cumsum(np.concatenate([np.array(of_file["rows"], np.int64) for of_file in described]))
        self.pieces = Pieces(ends, file_of, states)
        self.container = Container(tuple(files), columns.image, self.pieces)
        table = join_tables(indexes, self.where)
        self.domain_names, self.domains = ("train",), np.zeros(len(table), np.int64)
        name_columns(self, table, self.where, named, described[0]["class_names"])
        unread = dict.fromkeys(chain(*(of_file["soft_labels"] for of_file in described)))
        self.left_out = (*beside(file, files), *soft_labels_not_read(self.where, unread))
        self.image_names = table[IMAGE_NAMES] if IMAGE_NAMES in table.column_names else None

    def name(self, row: int) -> str:
        return f"{self.where}, {self.name_in_data(row)}"

    def name_in_data(self, row: int) -> str:
        name = self.image_names[int(row)].as_py() if self.image_names is not None else None
        return f"row {row}" + (f" ({printable(name)})" if name else "")

    def read_piece(self, number: int) -> list[bytes]:
        """Returns the encoded images of a row group; b"" where there is none."""
        import pyarrow
        import pyarrow.compute as pc

        file, group = int(self.pieces.file_of[number]), self.pieces.in_file(number)
        address, state, column = self.container.files[file], self.pieces.states[file], self.container.column
        footer = self.memory.footers.get(file, partial(_read_footer, address, state))
        part = f"{address}, row group {group}"
        with _open(address, state, footer, part) as source:
            images = source.read_row_group(group, columns=[column], use_threads=False)[column]
        if pyarrow.types.is_struct(images.type):
            content = pc.struct_field(images, "bytes")
            if images.type.get_field_index("path") >= 0:
                path = pc.struct_field(images, "path")
                path = path.filter(pc.and_(pc.is_null(content), pc.is_valid(path)))
                if len(path):
                    raise UserError(
                        f"{part}: it holds the path of an image ({path[0].as_py()}) instead of its bytes; write the "
                        "bytes into the file, or list the paths in a table (data.name: table)"
                    )
            images = content
        return [image or b"" for image in images.to_pylist()]


def _read_index(address: str, state: FileState, image: str, columns: Mapping[str, str]) -> Table:
    """Returns the columns that name things, and `IMAGE_NAMES`. `columns`: {key of `data.columns`: its column}.

    Its schema's metadata are JSON: the rows of each row group, the names of columns of the type ClassLabel, and the
    columns p:CLASS. Raises `UserError` for a file that is damaged, has no rows, or lacks a column.
    """
    import pyarrow
    import pyarrow.compute as pc

    footer = _read_footer(address, state)
    with _damage_in(address):
        schema = footer.schema.to_arrow_schema()
    for key, name in {"image": image, **columns}.items():
        if schema.names.count(name) > 1:
            raise UserError(f"{address}: two columns have the name {name}; keep one")
        if name not in schema.names:
            raise no_column(key, address, name, schema.names)
    if not footer.num_rows:
        raise UserError(f"{address}: the file has no rows, so no images; remove it")
    names = list(dict.fromkeys(columns.values()))
    kind = schema.field(image).type
    is_struct = pyarrow.types.is_struct(kind)
    data = kind.field("bytes").type if is_struct and kind.get_field_index("bytes") >= 0 else kind
    if not (pyarrow.types.is_binary(data) or pyarrow.types.is_large_binary(data)):
        raise UserError(
            f'data.columns.image: {address} has {kind} in the column "{image}"; it must contain encoded '
            "image files: bytes, or a struct with bytes"
        )
    paths = [f"{image}.path"] if is_struct and kind.get_field_index("path") >= 0 else []

    def read(first: int) -> Table:
        groups = range(first, min(first + GROUPS_PER_READ, footer.num_row_groups))
        with _open(address, state, footer) as source:
            return source.read_row_groups(list(groups), columns=[*names, *paths], use_threads=False)

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        cells = pyarrow.concat_tables(pool.map(read, range(0, footer.num_row_groups, GROUPS_PER_READ)))
    index = {name: encode_names(cells[name], f"{printable(address)}: column {name}") for name in names}
    if paths:
        path = pc.struct_field(cells[image], "path").cast(pyarrow.large_string()).fill_null("")
        index[IMAGE_NAMES] = pc.replace_substring_regex(path, "(?s).*/", "")
    # `datasets` writes the types of columns into a file
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    labels = {
        name: [str(label) for label in features[name]["names"]]
        for name in names
        if isinstance(features.get(name), dict) and features[name].get("_type") == "ClassLabel"
    }
    rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    about = {
        "rows": rows,
        "class_names": labels,
        "soft_labels": [name for name in schema.names if is_of_class(name)],
    }
    return pyarrow.table(index).replace_schema_metadata({"about": json.dumps(about)})


def _read_footer(address: str, state: FileState) -> FileMetaData:
    with _open(address, state) as file:
        return file.metadata


@contextmanager
def _open(address: str, state: FileState, footer: FileMetaData | None = None, part: str = "") -> Iterator[ParquetFile]:
    from pyarrow.parquet import ParquetFile

    with _damage_in(part or address), open_file(address, state) as source:
        # pre_buffer: the pages of a column in a row group are one request
        yield ParquetFile(source, metadata=footer, pre_buffer=True, page_checksum_verification=True)


@contextmanager
def _damage_in(part: str) -> Iterator[None]:
    """Context for reading a file. Raises `UserError` for what is not as Parquet says."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(printable(f"{type(error).__name__}: {error}").split())[:200]
        remedy = "write the file again, or remove it"
        raise UserError(f"{part}: cannot be read ({reason}); {remedy}") from error
