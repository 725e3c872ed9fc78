"""Images in tars, as WebDataset writes them: KEY.jpg (or another image), with KEY.cls or KEY.json."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from xdm_ft.containers.files import numbered
from xdm_ft.containers.pieces import CacheSize, PiecedImages, in_loader, read_files
from xdm_ft.containers.remote import is_remote, list_files, read_range, states_of
from xdm_ft.containers.tables import join_tables, name_columns, remembered_table
from xdm_ft.containers.tar import MEMBER, OWN_KEYS, SIZE, START, Keys, read_tar
from xdm_ft.images.dataset import Container, FileState, Pieces
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.names import expand_user

if TYPE_CHECKING:
    from pyarrow import Table

PIECE_BYTES = 1 << 23  # of consecutive images that are read together, at least
BRACES = re.compile(r"\{([^{}]*)\}")


class WebDataset(PiecedImages):
    """The images of the tars, in the order of their names and members.

    Where the images lie in a tar is found once, and remembered until the tar changes. Images that follow each other
    are read together; an image alone is read by its own range.
    """

    def __init__(
        self,
        *,
        file: Annotated[
            str | Path,
            Field(description="a .tar file, a folder of them (at any depth), a glob or a brace range such as "
                  "{000..123}.tar; also https://, s3://, gs://, hf://"),
        ],
        keys: Annotated[Keys, Field(description="keys of KEY.json")] = OWN_KEYS,
        cache_mb: CacheSize = 256,
    ) -> None:  # fmt: skip
        self.where, self.cache_mb = printable(file), cache_mb
        files = sorted({found for one in expanded_braces(str(file)) for found in _tars(one)})
        if not files:
            raise UserError(f"data.file: {self.where} contains no .tar files; name a folder that does")
        states = tuple(states_of(files))
        found = read_files(partial(_index, keys=keys.model_dump()), files, states)
        table, rows = join_tables(found, self.where), [len(index) for index in found]
        self.starts, self.sizes = table[START].to_numpy(), table[SIZE].to_numpy()
        self.members = table[MEMBER]  # in Arrow they take a fifth of the memory of a list
        self.pieces = _pieces(self.starts, self.sizes, rows, states)
        self.container = Container(tuple(files), "tar", self.pieces)
        self.domain_names, of_file = numbered([_folder(file) for file in files])
        self.domains = np.repeat(of_file, rows)
        columns = {name: None if key is None else name for name, key in keys.model_dump().items()}
        name_columns(self, table, self.where, columns)

    def name(self, row: int) -> str:
        return printable(f"{self.container.files[self._file(row)]}, {self.members[int(row)]}")

    def name_in_data(self, row: int) -> str:
        tar = self.container.files[self._file(row)].rsplit("/", 2)[-2:]
        return printable(f"{'/'.join(tar)}, {self.members[int(row)]}")

    def content(self, row: int) -> bytes:
        number = int(self.pieces.of_row(row))
        if row == self.pieces.rows(number).start or number in self.own.kept:
            return super().content(row)
        with in_loader():
            return self._range(row, row)  # random access, or the rest of a piece

    def read_piece(self, number: int) -> list[bytes]:
        rows = self.pieces.rows(number)
        data = self._range(rows.start, rows.stop - 1)
        starts = (self.starts[rows.start : rows.stop] - self.starts[rows.start]).tolist()
        sizes = self.sizes[rows.start : rows.stop].tolist()
        return [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _range(self, first: int, last: int) -> bytes:
        """Returns the bytes from the image of one row to that of another one in the same tar."""
        file, stop = self._file(first), int(self.starts[last] + self.sizes[last])
        return read_range(self.container.files[file], self.pieces.states[file], int(self.starts[first]), stop)

    def _file(self, row: int) -> int:
        return int(self.pieces.file_of[self.pieces.of_row(row)])


def expanded_braces(text: str) -> Iterator[str]:
    """Yields the texts of {000..123} and {a,b}, as a shell does."""
    match = BRACES.search(text)
    if match is None:
        yield text
        return
    first, dots, last = match[1].partition("..")
    if dots and first.isdecimal() and last.isdecimal():
        width = len(first) if len(first) == len(last) else 0
        parts = [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    else:
        parts = match[1].split(",")
    for part in parts:
        yield from expanded_braces(text[: match.start()] + part + text[match.end() :])


def _tars(file: str) -> list[str]:
    """Returns the tars of a file, folder or glob; an address or an absolute path each."""
    if is_remote(file):
        return list_files(file, ".tar", deep=True)
    path = expand_user(file, "data.file")
    if path.is_dir():
        return [str(found) for found in path.absolute().rglob("*.tar")]
    found = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)
    if not found:
        raise UserError(f"data.file: {file} does not exist; name a .tar file or a folder of them")
    return [str(Path(one).absolute()) for one in found]


def _index(address: str, state: FileState, keys: dict[str, str | None]) -> Table:
    key = repr(["tar", 3, address, state, keys])  # 1: versions that took any damage for the end of a tar
    return remembered_table(key, lambda: read_tar(address, state, keys))


def _pieces(starts: np.ndarray, sizes: np.ndarray, rows: list[int], states: tuple[FileState, ...]) -> Pieces:
    """Returns runs of images of one tar, each at least `PIECE_BYTES` long except at the end of a tar."""
    ends, file_of, first = list[int](), list[int](), 0
    for file, count in enumerate(rows):
        last = first + count
        ends_at = starts[first:last] + sizes[first:last]
        while first < last:
            # the first image that ends so far behind the start of this run
            end = last - len(ends_at) + int(np.searchsorted(ends_at, starts[first] + PIECE_BYTES)) + 1
            first = min(end, last)
            ends.append(first)
            file_of.append(file)
    return Pieces(np.array(ends, np.int64), np.array(file_of, np.int64), states)


def _folder(file: str) -> str:
    return file.rstrip("/").rsplit("/", 2)[-2]
