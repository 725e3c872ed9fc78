"""JSON in files: objects, and files of lines, with checksums that show a run damage in its own files; and lines of CSV.

A spreadsheet computes a cell that begins with =, +, -, @, a tab or an end of line as a formula, so such a text begins
with an apostrophe, which a spreadsheet takes for "this is text", and such a path with `./`. So does a path that begins
with a blank, which readers drop.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from xdm_ft.storage import digest, json_digest, sorted_json
from xdm_ft.storage.atomic import disk_errors, sync

TOO_DEEP = "its brackets are nested too deeply"


class Damaged(Exception):
    """A file does not hold what was written to it. The text says what is wrong."""

    @property
    def fault(self) -> str:
        """What to say of the file, after its path."""
        return f"is damaged ({self})"


class OtherRun(Damaged):
    """A file is whole, but its content is not what the records of this run say."""

    fault = "is of another run"


class OtherVersion(Damaged):
    """A file is whole, but its content is not what this version writes. The text says what does not fit."""

    @property
    def fault(self) -> str:
        return f"was edited, or made by another version of xdm_ft ({self})"


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file that `with_checksum` made, without the checksum. Raises `Damaged`."""
    with open_regular_file(path) as file:
        content = json_object(file.read())
    checksum = content.pop("checksum", None)
    if checksum != json_digest(content):
        raise Damaged("its checksum differs" if checksum else "it has no checksum")
    return content


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with the key `checksum`, of all other keys."""
    rest = {name: inner for name, inner in value.items() if name != "checksum"}
    return {**rest, "checksum": json_digest(rest)}


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Appends JSON values to a file of lines, and returns when they are on the disk.

    No other process may write the file. An incomplete last line, left by a killed process, is cut off first. Raises
    `UserError` if the file cannot be written.
    """
    text = b"".join(map(seal_line, values))
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        created = not path.exists()
        with path.open("ab+") as file:
            file.truncate(_end_of_last_line(file))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if created:
            sync(path.parent)  # or a crash could lose the name of the new file


def seal_line(value: Any) -> bytes:
    """Returns a line of JSON: the value and its checksum."""
    return json.dumps({"value": value, "xxh3": json_digest(value)}, allow_nan=False).encode() + b"\n"


def _end_of_last_line(file: BinaryIO) -> int:
    """Returns the number of bytes up to the last newline, inclusive. Moves the position in the file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - 4096)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def read_lines(path: Path) -> Iterator[Any]:
    """Yields the values of a file of lines; an incomplete last line is ignored. Raises `Damaged`."""
    with open_regular_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # a kill cut it short
                return
            try:
                content = json_object(line)
                if "value" not in content or content.get("xxh3") != digest(sorted_json(content["value"], is_read=True)):
                    raise Damaged("its checksum differs")
            except Damaged as error:
                raise Damaged(f"line {number}: {error}") from error
            except RecursionError as error:
                raise Damaged(f"line {number}: {TOO_DEEP}") from error
            yield content["value"]


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Yields an open file. Raises `Damaged`, also for what is not a file, as reading a pipe may never end."""
    if not path.is_file():
        raise Damaged("it is a folder" if path.is_dir() else "it is not a file")
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise Damaged(one_line(error)) from error


def json_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises `Damaged` for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Damaged(f"it is not JSON: {one_line(error)}") from error
    except RecursionError as error:
        raise Damaged(TOO_DEEP) from error
    if not isinstance(value, dict):
        raise Damaged("it is not a JSON object")
    return value


def one_line(error: Exception) -> str:
    """Returns the text of an exception on one line."""
    # str() of an OSError repeats the path
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())


PATH = "path"  # the column whose cells are paths
# what stands in front of which texts: one that looks as if it were quoted is quoted again, so that it is read back
TEXT_RULE = "'", re.compile(r"'*[=+\-@\t\r\n]")
PATH_RULE = "./", re.compile(r"(\./)*[=+\-@\t\r\n ]")


def csv_line(columns: Iterable[str], cells: Iterable[object]) -> str:
    """Returns the cells of these columns as a line of a CSV file. Numbers stay numbers, and None is an empty cell."""
    # with "\r\n" as its end of a row, the writer quotes both characters in cells
    text, row = io.StringIO(), list[object]()
    for column, cell in zip(columns, cells, strict=True):
        if isinstance(cell, bool):
            cell = str(cell).lower()
        elif isinstance(cell, str):
            quote, quoted = PATH_RULE if column == PATH else TEXT_RULE
            cell = quote + cell if quoted.match(cell) else cell
        row.append(cell)
    csv.writer(text).writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


def read_cell(column: str, cell: str) -> str:
    """Returns the text from which `csv_line` made this cell. A path is that of the same file in any case."""
    quote, quoted = PATH_RULE if column == PATH else TEXT_RULE
    return cell.removeprefix(quote) if quoted.match(cell) else cell
