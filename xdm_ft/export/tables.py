"""Rows as CSV, JSON lines or Parquet. They are never all in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Literal

from xdm_ft.export.predictions import Row
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.csv_cells import csv_line

Format = Literal["csv", "jsonl", "parquet"]
ROWS_AT_ONCE = 4096


def format_of(out: Path | None) -> Format:
    """Returns the format that a file's name asks for; csv without a file. Raises `UserError` for another suffix."""
    formats: dict[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
    suffix = ".csv" if out is None else out.suffix.lower()
    if suffix not in formats:
        remedy = "end it in .csv, .jsonl or .parquet, or add --format"
        raise UserError(f"--out {out}: the name asks for no known format; {remedy}")
    return formats[suffix]


def header_of(columns: Collection[str], format_: Format) -> bytes:
    return line_of(columns, list(columns), "csv") if format_ == "csv" else b""


def line_of(columns: Iterable[str], row: Row, format_: Format) -> bytes:
    """Returns a row as a line. A name that is not UTF-8 has its own bytes in CSV, and escapes (\\udc80) in JSON."""
    if format_ == "csv":
        return csv_line(columns, row).encode("utf-8", "surrogateescape")
    return f"{json.dumps(dict(zip(columns, row, strict=True)), allow_nan=False)}\n".encode()


def write_table(path: Path, columns: Mapping[str, type], rows: Iterable[Row], format_: Format) -> None:
    """Writes a file of the columns {name: type of its cells}. Raises `OSError`."""
    if format_ == "parquet":
        _write_parquet(path, columns, iter(rows))
        return
    with path.open("wb") as file:
        file.write(header_of(columns, format_))
        file.writelines(line_of(columns, row, format_) for row in rows)


def _write_parquet(path: Path, columns: Mapping[str, type], rows: Iterator[Row]) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    types = {str: pyarrow.string(), float: pyarrow.float32(), bool: pyarrow.bool_(), int: pyarrow.int64()}
    schema = pyarrow.schema([(name, types[type_]) for name, type_ in columns.items()])
    with ParquetWriter(path, schema) as writer:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            cells = [[_utf8(cell) for cell in column] for column in zip(*some, strict=True)]
            arrays = [pyarrow.array(column, field.type) for column, field in zip(cells, schema, strict=True)]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def _utf8(cell: object) -> object:
    """Bytes that are not UTF-8, which Parquet refuses in texts, become \\x80."""
    return os.fsencode(cell).decode("utf-8", "backslashreplace") if isinstance(cell, str) else cell
