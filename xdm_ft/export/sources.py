"""Images to predict: files, folders, globs, tables, and a list on standard input. None of them is held in memory."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from xdm_ft.containers.files import group_of, is_image, visible_entries
from xdm_ft.containers.tables import csv_rows, name_in
from xdm_ft.data.table import path_in
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.names import expanded

STDIN = "-"
TABLES = (".csv", ".parquet")
NAMED = 8  # extensions in a message; it counts the others
ROWS_AT_ONCE = 1024  # of a Parquet table
Cells = tuple[int, object, object]  # row number, path, group


class Item(NamedTuple):
    """An image, of which nothing has been read yet."""

    path: str  # as the user gave it
    content: str | bytes  # its file, or the encoded image
    group: str = ""


class Sources:
    """The images that a user has named, in this order; those of folders and globs in the order of their names.

    A path is a file, a folder (images in it at any depth, by their extension, without hidden ones), a glob, a CSV or
    Parquet file with the column path (relative to the table's folder), or `-`: paths on standard input, one per line.
    `group_by` is a column of the tables or a regular expression for the paths, as `data.group`.

    `others`: {extension: number} of the files that are no images, which folders hold and globs match. `count` and
    iterating fill it.
    """

    def __init__(self, paths: Iterable[str], group_by: str | None = None) -> None:
        """Raises `UserError` for a path that does not exist."""
        self.paths = tuple(paths)
        self.group_by = group_by
        self.others = Counter[str]()
        if self.paths.count(STDIN) > 1:
            raise UserError("PATH: - (standard input) is given twice; give it once")
        self._sources = [_source(path, self.others) for path in self.paths]
        try:
            self._expression = re.compile(group_by or "")
        except re.error as error:
            raise UserError(f"--group-by: {group_by} is not a regular expression: {error}") from error

    def __iter__(self) -> Iterator[Item]:
        """Raises `UserError` for a folder or table that can not be read, and for an image without a group."""
        self.others.clear()
        for path, source in zip(self.paths, self._sources, strict=True):
            yield from self._items(path, source)

    def count(self) -> int | None:
        """Lists all images once and returns their number; None if some are listed on standard input.

        Raises `UserError` as iterating does, and for a folder, glob or table without images. Standard input is not
        read.
        """
        self.others.clear()
        total = 0
        for path, source in zip(self.paths, self._sources, strict=True):
            if path != STDIN:
                before = total
                for _ in self._items(path, source):
                    pulse.beat()
                    total += 1
                if total == before:
                    others = f"; {counted(self.others)}" if self.others else ""
                    raise UserError(f"{printable(path)}: {_no_images(path)}{others}")
        return None if STDIN in self.paths else total

    def _items(self, path: str, source: Callable[[str | None], Iterator[Item]]) -> Iterator[Item]:
        for item in source(self.group_by):
            if self.group_by is None or item.group:
                yield item
                continue
            group = group_of(item.path, self._expression)
            if not group:
                column = f"is no column of {printable(path)} and " if _is_table(path) else ""
                raise UserError(
                    f"--group-by: {self.group_by} {column}matches nothing in {printable(item.path)}; change it so that "
                    "every image has a group"
                )
            yield item._replace(group=group.replace("\0", "/"))


def _source(path: str, others: Counter[str]) -> Callable[[str | None], Iterator[Item]]:
    """Returns the function that yields the images of a path, with their groups if they are a column of a table."""
    if path == STDIN:
        return lambda _: _listed()
    if _is_table(path):
        return lambda group: _of_table(Path(path), group)
    if os.path.isdir(path):
        return lambda _: _images(_files(path, (), ["**"], set()), others)
    if os.path.lexists(path):
        return lambda _: iter([Item(path, path)])
    if not any(sign in path for sign in "*?["):
        raise UserError(f"{printable(path)}: does not exist; name a file, a folder, a table or a quoted glob")
    return lambda _: _images(_matches(str(expanded(path, "PATH"))), others)


def _is_table(path: str) -> bool:
    return path.lower().endswith(TABLES) and os.path.isfile(path)


def _no_images(path: str) -> str:
    if _is_table(path):
        return "the table has no rows; add one per image"
    return "contains no image (known by its extension)" if os.path.isdir(path) else "matches no image"


def _listed() -> Iterator[Item]:
    for line in sys.stdin.buffer:
        path = os.fsdecode(line.removesuffix(b"\n").removesuffix(b"\r"))
        if path:
            yield Item(path, path)


def _images(files: Iterable[str], others: Counter[str]) -> Iterator[Item]:
    """Yields the images among the files, and counts the others by their extension."""
    for file in files:
        if is_image(file):
            yield Item(file, file)
        else:
            extension = os.path.splitext(file)[1].lower()
            others["" if extension[1:].isdigit() else extension] += 1  # DICOM's names may be numbers with dots


def counted(others: Mapping[str, int]) -> str:
    """Returns "12 other files: 10 .dcm, 2 .txt"."""
    ranked = sorted(others.items(), key=lambda item: (-item[1], not item[0], item[0]))
    named = [f"{number} {printable(extension) or 'without an extension'}" for extension, number in ranked[:NAMED]]
    more = sum(number for _, number in ranked[NAMED:])
    named += [f"{more} with other extensions"] if more else []
    return f"{plural(sum(others.values()), 'other file')}: {', '.join(named)}"


def _matches(pattern: str) -> Iterator[str]:
    """Yields the files that a glob matches. `**` is any number of folders; hidden files match nothing."""
    parts = pattern.split("/")
    fixed = next(place for place, part in enumerate(parts) if any(sign in part for sign in "*?["))
    root = "/".join(parts[:fixed]) or ("/" if fixed else "")
    if os.path.isdir(root or "."):
        yield from _files(root, (), [part for part in parts[fixed:] if part], set())


def _files(folder: str, below: tuple[str, ...], parts: list[str], visited: set[tuple[int, int]]) -> Iterator[str]:
    """Yields the files in a folder ("": the current one) whose names below the pattern's root match its `parts`.

    They are in the order of their names. Links are followed, each folder once; `glob.iglob` would follow a link to a
    folder above 40 times, and pass over a folder that can not be read. Raises `UserError` for such a folder.
    """
    status, names, folders = visible_entries(folder or ".", "PATH")
    if (identity := (status.st_dev, status.st_ino)) in visited:
        return
    visited.add(identity)
    for name in names:
        path, reached = os.path.join(folder, name), (*below, name)
        if name not in folders:
            if _match(reached, parts):
                yield path
        elif _may_hold(reached, parts):
            yield from _files(path, reached, parts, visited)


def _match(names: tuple[str, ...], parts: list[str]) -> bool:
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return _match(names, parts[1:]) or _match(names[1:], parts)
    return fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:])


def _may_hold(names: tuple[str, ...], parts: list[str]) -> bool:
    """Whether files in a folder of these names may match."""
    start = parts.index("**") if "**" in parts else len(parts)
    fit = all(fnmatchcase(name, part) for name, part in zip(names, parts[:start], strict=False))
    return fit and (len(names) < len(parts) or start < len(parts))


def _of_table(file: Path, group: str | None) -> Iterator[Item]:
    rows = _csv_cells if file.suffix.lower() == ".csv" else _parquet_cells
    for number, path_cell, group_cell in rows(file, group):
        column = "path"
        try:
            path = path_in(path_cell)
            column = str(group)
            own = "" if group_cell is None else name_in(group_cell)
        except ValueError as error:
            raise UserError(f"{printable(file)}: row {number}, column {column}: {printable(error)}") from error
        yield Item(path, os.path.join(os.path.dirname(file), path), own)


def _csv_cells(file: Path, group: str | None) -> Iterator[Cells]:
    rows = csv_rows(file)
    _, header = next(rows)
    path, own = _columns(file, header, group)
    for number, row in rows:
        yield number, row[path], None if own is None else row[own]


def _parquet_cells(file: Path, group: str | None) -> Iterator[Cells]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            header = table.schema_arrow.names
            _, own = _columns(file, header, group)
            columns = ["path"] if own is None else ["path", str(group)]
            number = 0
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=columns):
                paths = batch.column("path").to_pylist()
                groups = [None] * len(paths) if own is None else batch.column(str(group)).to_pylist()
                for path, of_row in zip(paths, groups, strict=True):
                    number += 1
                    yield number, path, "" if own is not None and of_row is None else of_row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{printable(file)}: can not be read as Parquet: {printable(error)}") from error


def _columns(file: Path, header: list[str], group: str | None) -> tuple[int, int | None]:
    """Returns the places of the columns path and `group`, None if there is no such one."""
    for column in ("path", group):
        if column is not None and header.count(column) > 1:
            raise UserError(f"{printable(file)}: two columns have the name {printable(column)}; rename one")
    if "path" not in header:
        raise UserError(f"{printable(file)}: there is no column path; found: {printable(', '.join(header))}")
    return header.index("path"), header.index(group) if group is not None and group in header else None
