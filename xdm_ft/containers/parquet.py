"""Parquet files of encoded images, read in parts: the footer, the columns that name things, one row group of images."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xdm_ft.containers.named_columns import Column, column_of, one_array
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.storage.remote import FileInParts, FileState, read_range, read_ranges

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, LargeStringArray
    from pyarrow.parquet import FileMetaData

TAIL_BYTES = 1 << 16  # read first of a file, for its footer
NEAR_BYTES = 1 << 14
GROUPS_AT_ONCE = 256  # row groups of which columns are read together


@dataclass(frozen=True)
class RowGroup:
    """The encoded images of a row group."""

    images: ChunkedArray  # of bytes

    @property
    def nbytes(self) -> int:
        return int(self.images.nbytes)

    def __getitem__(self, place: int) -> bytes:
        return self.images[place].as_py() or b""  # b"" does not decode and is reported as such


class FileIndex(NamedTuple):
    """What is kept of a file in memory."""

    rows: np.ndarray  # int64 [G], of every row group
    columns: dict[str, Column]
    class_names: dict[str, list[str]]  # column → its names, if its type is ClassLabel of `datasets`
    image_names: LargeStringArray | None  # the names of image files in a struct {bytes, path}

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns all of it as arrays; `FileIndex.read` of them is the index again."""
        about = json.dumps({"columns": list(self.columns), "class_names": self.class_names})
        found = {"rows": self.rows, "about": np.frombuffer(about.encode(), np.uint8)}
        for name, column in self.columns.items():
            found |= column.arrays(name)
        if self.image_names is not None:
            _, ends, texts = self.image_names.buffers()
            found["names.ends"] = np.frombuffer(ends, np.int64)[: len(self.image_names) + 1]
            found["names.texts"] = np.frombuffer(texts or b"", np.uint8)
        return found

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray]) -> FileIndex:
        import pyarrow

        about, names = json.loads(arrays["about"].tobytes()), None
        if "names.ends" in arrays:
            buffers = (pyarrow.py_buffer(arrays["names.ends"]), pyarrow.py_buffer(arrays["names.texts"]))
            names = pyarrow.LargeStringArray.from_buffers(len(arrays["names.ends"]) - 1, *buffers)
        columns = {name: Column.read(arrays, name) for name in about["columns"]}
        return cls(arrays["rows"], columns, about["class_names"], names)


def read_footer(address: str, state: FileState) -> FileMetaData:
    """Returns the footer of a file. Raises `UserError`, one line."""
    import pyarrow
    from pyarrow.parquet import read_metadata

    tail = read_range(address, max(0, state.size - TAIL_BYTES), state.size, state.size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if len(tail) < length <= state.size:
        tail = read_range(address, state.size - length, state.size, state.size)
    with _damage(address):
        return read_metadata(pyarrow.BufferReader(tail))


def read_index(address: str, state: FileState, image: str, named: Mapping[str, str]) -> FileIndex:
    """Returns the index of a file. `named`: {key of `data.columns`: its column}; `image`: the column of the images.

    Raises `UserError` for a file that is damaged, has no rows, or lacks a column.
    """
    metadata = read_footer(address, state)
    with _damage(address):
        schema = metadata.schema.to_arrow_schema()
    for key, name in {"image": image, **named}.items():
        if name not in schema.names:
            hint = did_you_mean(name, schema.names)
            raise UserError(f'data.columns.{key}: {printable(address)} has no column "{name}"{hint}')
    if not metadata.num_rows:
        raise UserError(f"{printable(address)}: the file has no rows, so no images; remove it")
    with_path = _has_path(address, image, schema.field(image).type)
    read = list(dict.fromkeys(named.values())) + ([f"{image}.path"] if with_path else [])
    parts: dict[str, list[Column]] = {name: [] for name in named.values()}
    names, first = list[Any](), 0
    for table in _tables(address, state, metadata, read):
        for name, some in parts.items():
            some.append(column_of(table[name], f"{printable(address)}: row {{}}, column {name}", first))
        if with_path:
            names.append(_base_names(table[image]))
        first += len(table)
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    of_classes = {name: found for name in parts if (found := _class_names(schema.metadata, name)) is not None}
    columns = {name: Column.joined(some) for name, some in parts.items()}
    return FileIndex(np.array(rows, np.int64), columns, of_classes, one_array(names) if names else None)


def read_images(address: str, state: FileState, footer: FileMetaData, group: int, column: str) -> RowGroup:
    """Returns the images of a row group, by one request. Raises `UserError`, one line."""
    import pyarrow

    place = f"{address}, row group {group}"
    start, stop = _span(footer, group, column)
    window = _Window(address, state, {start: read_range(address, start, stop, state.size)})
    with _damage(place):
        found = window.opened(footer).read_row_group(group, columns=[column], use_threads=False)[column]
    if pyarrow.types.is_struct(found.type):
        if found.type.get_field_index("path") >= 0:
            _refuse_paths(found, place)
        found = pyarrow.chunked_array([chunk.field("bytes") for chunk in found.chunks], found.type.field("bytes").type)
    return RowGroup(found)


def _refuse_paths(images: ChunkedArray, place: str) -> None:
    import pyarrow.compute as pc

    without, path = pc.is_null(pc.struct_field(images, "bytes")), pc.struct_field(images, "path")
    if pc.any(pc.and_(without, pc.is_valid(path))).as_py():
        named = path.filter(without)[0].as_py()
        raise UserError(
            f"{printable(place)}: it holds the path of an image ({printable(named)}) instead of its bytes; write the "
            "bytes into the file, or list the paths in a table (data.name: table)"
        )


def _span(metadata: FileMetaData, group: int, column: str) -> tuple[int, int]:
    """Returns the bytes (start, stop) of a column in a row group: all leaves of it."""
    about = metadata.row_group(group)
    leaves = [about.column(leaf) for leaf in range(about.num_columns)]
    spans = []
    for leaf in leaves:
        if leaf.path_in_schema == column or leaf.path_in_schema.startswith(f"{column}."):
            first = leaf.data_page_offset
            if leaf.has_dictionary_page and leaf.dictionary_page_offset is not None:
                first = min(first, leaf.dictionary_page_offset)
            spans.append((first, first + leaf.total_compressed_size))
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def _tables(address: str, state: FileState, metadata: FileMetaData, columns: Sequence[str]) -> Iterator[Any]:
    """Yields tables of these columns, of some row groups after the other."""
    for first in range(0, metadata.num_row_groups, GROUPS_AT_ONCE):
        groups = range(first, min(first + GROUPS_AT_ONCE, metadata.num_row_groups))
        spans = _merged([_span(metadata, group, column) for group in groups for column in columns])
        parts = dict(zip((start for start, _ in spans), read_ranges(address, spans, state.size), strict=True))
        with _damage(address):
            yield (
                _Window(address, state, parts)
                .opened(metadata)
                .read_row_groups(list(groups), columns=list(columns), use_threads=False)
            )


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the spans sorted, those that nearly touch as one: a request takes longer than a few more bytes."""
    found = list[tuple[int, int]]()
    for start, stop in sorted(spans):
        if found and start - found[-1][1] <= NEAR_BYTES:
            start, stop = found[-1][0], max(stop, found.pop()[1])
        found.append((start, stop))
    return found


class _Window(FileInParts):
    """A file of which some ranges are in memory; others are read when they are needed."""

    def __init__(self, address: str, state: FileState, parts: Mapping[int, bytes]) -> None:
        """`parts`: {first byte: the bytes from there}."""
        super().__init__(address, state)
        self.starts, self.parts = sorted(parts), parts

    def opened(self, metadata: FileMetaData) -> Any:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        file = pyarrow.PythonFile(self, mode="r")
        return ParquetFile(file, metadata=metadata, pre_buffer=False, page_checksum_verification=True)

    def read(self, size: int = -1) -> bytes:
        start = self.place
        self.place = self.length if size < 0 else min(start + size, self.length)
        number = bisect_right(self.starts, start) - 1
        if number >= 0:
            first = self.starts[number]
            part = self.parts[first]
            if self.place <= first + len(part):
                whole = len(part) == self.place - start
                return part if whole else part[start - first : self.place - first]
        return read_range(self.address, start, self.place, self.length)


def _base_names(images: ChunkedArray) -> ChunkedArray:
    import pyarrow
    import pyarrow.compute as pc

    paths = pc.struct_field(images, "path").cast(pyarrow.large_string()).fill_null("")
    return pc.replace_substring_regex(paths, "(?s).*/", "")


def _has_path(address: str, image: str, kind: Any) -> bool:
    """Whether the images are structs with a path. Raises `UserError` if they can not be encoded images."""
    import pyarrow

    struct = pyarrow.types.is_struct(kind)
    data = kind.field("bytes").type if struct and kind.get_field_index("bytes") >= 0 else kind
    if not (pyarrow.types.is_binary(data) or pyarrow.types.is_large_binary(data)):
        raise UserError(
            f'data.columns.image: {printable(address)} has {kind} in the column "{image}"; it must contain encoded '
            "image files: bytes, or a struct with bytes"
        )
    return struct and kind.get_field_index("path") >= 0


def _class_names(metadata: Mapping[bytes, bytes] | None, column: str) -> list[str] | None:
    """Returns the names of a column whose type is ClassLabel, as `datasets` writes it into a file."""
    about = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    feature = about.get("info", {}).get("features", {}).get(column, {})
    is_label = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    return [str(name) for name in feature["names"]] if is_label else None


@contextmanager
def _damage(place: str) -> Iterator[None]:
    """Context for parsing what was read. Raises `UserError` for what is not as Parquet says."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(printable(f"{type(error).__name__}: {error}").split())[:200]
        remedy = "write the file again, or remove it"
        raise UserError(f"{printable(place)}: can not be read ({reason}); {remedy}") from error
