"""Parquet files of encoded images, read in parts: the columns that name things, and one row group of images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from xdm_ft.containers.remote import REQUESTS_AT_ONCE, open_file
from xdm_ft.containers.tables import encode_names
from xdm_ft.images.dataset import FileState
from xdm_ft.runtime.errors import UserError, did_you_mean, printable

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, DataType, Table
    from pyarrow.parquet import FileMetaData, ParquetFile

GROUPS_PER_READ = 16  # row groups whose columns of names one thread reads
IMAGE_NAMES = "\0name"  # column of an index: the names of image files, where the images are structs {bytes, path}


def read_footer(address: str, state: FileState) -> FileMetaData:
    """Returns the footer of a file. Raises `UserError`, one line."""
    with _open(address, state) as file:
        return file.metadata


def read_index(address: str, state: FileState, image: str, columns: Mapping[str, str]) -> Table:
    """Returns the columns that name things, and `IMAGE_NAMES`. `columns`: {key of `data.columns`: its column}.

    Its schema's metadata are JSON: the rows of each row group, and the names of columns of the type ClassLabel. Raises
    `UserError` for a file that is damaged, has no rows, or lacks a column.
    """
    import pyarrow

    footer = read_footer(address, state)
    with _damage_in(address):
        schema = footer.schema.to_arrow_schema()
    for key, name in {"image": image, **columns}.items():
        if name not in schema.names:
            hint = did_you_mean(name, schema.names)
            raise UserError(f'data.columns.{key}: {address} has no column "{name}"{hint}')
    if not footer.num_rows:
        raise UserError(f"{address}: the file has no rows, so no images; remove it")
    names = dict.fromkeys(columns.values())
    has_paths = _have_paths(address, image, schema.field(image).type)
    cells = _read_columns(address, state, footer, [*names, *([f"{image}.path"] if has_paths else [])])
    found = {name: encode_names(cells[name], f"{printable(address)}: column {name}") for name in names}
    if has_paths:
        found[IMAGE_NAMES] = _base_names(cells[image])
    about = {
        "rows": [footer.row_group(group).num_rows for group in range(footer.num_row_groups)],
        "class_names": {name: some for name in names if (some := _class_names(schema.metadata, name)) is not None},
    }
    return pyarrow.table(found).replace_schema_metadata({"about": json.dumps(about)})


def about_index(index: Table) -> tuple[np.ndarray, dict[str, list[str]]]:
    """Returns the rows of each row group (int64 [G]) and {column: names of its ClassLabel}."""
    about = json.loads(index.schema.metadata[b"about"])
    return np.array(about["rows"], np.int64), about["class_names"]


def read_images(address: str, state: FileState, footer: FileMetaData, group: int, column: str) -> list[bytes]:
    """Returns the encoded images of a row group; b"" where there is none. Raises `UserError`, one line."""
    import pyarrow

    place = f"{address}, row group {group}"
    with _open(address, state, footer, place) as file:
        images = file.read_row_group(group, columns=[column], use_threads=False)[column]
    if pyarrow.types.is_struct(images.type):
        if images.type.get_field_index("path") >= 0:
            _refuse_paths(images, place)
        images = pyarrow.chunked_array(
            [chunk.field("bytes") for chunk in images.chunks], images.type.field("bytes").type
        )
    return [image or b"" for image in images.to_pylist()]


@contextmanager
def _open(address: str, state: FileState, footer: FileMetaData | None = None, place: str = "") -> Iterator[ParquetFile]:
    from pyarrow.parquet import ParquetFile

    with _damage_in(place or address), open_file(address, state) as source:
        # pre_buffer: the pages of a column in a row group are one request
        yield ParquetFile(source, metadata=footer, pre_buffer=True, page_checksum_verification=True)


def _read_columns(address: str, state: FileState, footer: FileMetaData, columns: list[str]) -> Table:
    import pyarrow

    def read(first: int) -> Table:
        groups = range(first, min(first + GROUPS_PER_READ, footer.num_row_groups))
        with _open(address, state, footer) as file:
            return file.read_row_groups(list(groups), columns=columns, use_threads=False)

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        return pyarrow.concat_tables(pool.map(read, range(0, footer.num_row_groups, GROUPS_PER_READ)))


def _refuse_paths(images: ChunkedArray, place: str) -> None:
    import pyarrow.compute as pc

    without, path = pc.is_null(pc.struct_field(images, "bytes")), pc.struct_field(images, "path")
    if pc.any(pc.and_(without, pc.is_valid(path))).as_py():
        named = path.filter(without)[0].as_py()
        raise UserError(
            f"{place}: it holds the path of an image ({named}) instead of its bytes; write the "
            "bytes into the file, or list the paths in a table (data.name: table)"
        )


def _base_names(images: ChunkedArray) -> ChunkedArray:
    import pyarrow
    import pyarrow.compute as pc

    paths = pc.struct_field(images, "path").cast(pyarrow.large_string()).fill_null("")
    return pc.replace_substring_regex(paths, "(?s).*/", "")


def _have_paths(address: str, image: str, kind: DataType) -> bool:
    """Whether the images are structs with a path. Raises `UserError` if they can not be encoded images."""
    from pyarrow import types

    is_struct = types.is_struct(kind)
    data = kind.field("bytes").type if is_struct and kind.get_field_index("bytes") >= 0 else kind
    if not (types.is_binary(data) or types.is_large_binary(data)):
        raise UserError(
            f'data.columns.image: {address} has {kind} in the column "{image}"; it must contain encoded '
            "image files: bytes, or a struct with bytes"
        )
    return is_struct and kind.get_field_index("path") >= 0


def _class_names(metadata: Mapping[bytes, bytes] | None, column: str) -> list[str] | None:
    """Returns the names of a column whose type is ClassLabel, as `datasets` writes it into a file."""
    about = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    feature: Any = about.get("info", {}).get("features", {}).get(column, {})
    is_label = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    return [str(name) for name in feature["names"]] if is_label else None


@contextmanager
def _damage_in(place: str) -> Iterator[None]:
    """Context for reading a file. Raises `UserError` for what is not as Parquet says."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(printable(f"{type(error).__name__}: {error}").split())[:200]
        remedy = "write the file again, or remove it"
        raise UserError(f"{place}: can not be read ({reason}); {remedy}") from error
