"""A hash of each image's bytes, kept in an index, so that a later run opens no image.

A file counts as unchanged if its path, size, time of modification and time of status change (ctime, which a program can
not set back) equal those in the index. A file that was moved or touched is hashed again, with the same result. On a
file system without ctime, a change that restores both size and time of modification is not noticed.

`index.sqlite` has three tables: `files`, one row per file; `lists`, all hashes of a data set under a hash of the paths
and states of its files; and `pieces`, those of a row group of a Parquet file or of a run of a tar's members, under the
state of that file. A data set of which no file has changed is found in `lists` as a whole, without a look-up per image.
The images of a table of `datasets` are found there under the state of the table's files.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from xdm_ft.features.file_states import Stamp, absolute, file_states, reason, regular
from xdm_ft.features.hash_index import run_on_index
from xdm_ft.features.piece_hashes import changed_container, hash_pieces
from xdm_ft.features.shards import Contents, contents_of
from xdm_ft.features.store import is_writable
from xdm_ft.images.dataset import Container, ImageDataset
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import progress

READER_THREADS = 8  # more than cores: on a network disk most of the time is spent waiting
READ_BYTES = 1 << 22
FILES_PER_COMMIT = 1024  # at most so many hashes are lost when a process is killed
_EMPTY_FILE = xxhash.xxh3_128_digest(b"")
KEPT_LISTS = 32  # that were used last; 16 bytes per image each


class DistinctImages(NamedTuple):
    """The M different images among N rows, in the order of the rows. Copies of an image are one image."""

    contents: Contents  # [M]
    rows: np.ndarray  # int64 [M], the first row of each
    number_of: np.ndarray  # int64 [N], the image of each row; −1: its bytes were not read


@dataclass(frozen=True)
class FileHashes:
    """Hashes of N images. An image in memory or in a table has a digest and no file."""

    digests: np.ndarray  # uint8 [N,16]: xxh3_128 of the bytes; zeros where they can not be read
    unreadable: dict[int, str] = field(default_factory=dict)  # row → why its bytes can not be read
    dataset: ImageDataset | None = None  # of the files
    stamps: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """int64 [N,3], the `Stamp` of each file when it was hashed, −1 where there is none; [0,3] if no image is a file."""
    paths: bytes = b""  # hash of the paths of all files
    container: Container | None = None  # of pieces, whose files were hashed

    @property
    def files(self) -> np.ndarray:
        """The rows whose images are files that can be read: int64."""
        return np.flatnonzero(self.stamps[:, 0] >= 0)

    def path(self, row: int) -> str:
        """The absolute path of the file of this row."""
        assert self.dataset is not None
        content = self.dataset.content(row)
        assert isinstance(content, str)
        return absolute(content)

    @cached_property
    def images(self) -> DistinctImages:
        """The different images among those that were hashed."""
        halves = np.ascontiguousarray(self.digests).view(np.uint64)  # [N,2]
        hashed = np.flatnonzero(halves.any(1))
        order = hashed[np.argsort(halves[hashed, 0])]
        same = np.append(False, np.diff(halves[order, 0]) == 0)
        alike = np.flatnonzero(same | np.append(same[1:], False))  # places that share their first half with a neighbour
        rows = order[alike]
        order[alike] = rows[np.lexsort((rows, halves[rows, 1], halves[rows, 0]))]  # copies by the order of their rows
        is_first = np.append(True, (halves[order[1:]] != halves[order[:-1]]).any(1))[: len(order)]
        first = np.zeros(len(halves), bool)
        first[order[is_first]] = True
        number, number_of = np.cumsum(first) - 1, np.full(len(halves), -1)
        number_of[order] = number[order[is_first]][np.cumsum(is_first) - 1]
        rows = np.flatnonzero(first)
        return DistinctImages(contents_of(self.digests[rows]), rows, number_of)

    def duplicates(self) -> list[list[int]]:
        """One list of rows for each image that occurs more than once, byte for byte. Empty files are not compared."""
        contents, _, number_of = self.images
        is_repeated = np.bincount(number_of + 1, minlength=len(contents) + 1) > 1  # of −1 and of each image
        is_repeated[0] = False
        is_repeated[1:][contents == np.bytes_(_EMPTY_FILE)] = False
        rows_of: dict[int, list[int]] = {}
        for row in np.flatnonzero(is_repeated[number_of + 1]).tolist():
            rows_of.setdefault(int(number_of[row]), []).append(row)
        return list(rows_of.values())

    def changed_file(self, rows: Iterable[int]) -> str | None:
        """The first file of these rows that has changed since it was hashed; None if none has."""
        if self.container is not None:
            return changed_container(self.container, np.fromiter(rows, np.int64))
        for row in rows if len(self.stamps) else ():
            stamp = tuple(self.stamps[row].tolist())
            if stamp[0] >= 0:
                try:
                    if Stamp.of(os.stat(self.path(row))) != stamp:
                        return self.path(row)
                except OSError:
                    return self.path(row)
        return None


def hash_files(
    dataset: ImageDataset,
    cache: Path | None,
    show: bool,
    equal_sizes_only: bool = False,
    share: tuple[int, int] = (0, 1),
) -> FileHashes:
    """Returns the hash of every image of the data set, from the index `<cache>/index.sqlite` or from the file.

    New hashes are added to the index. There is none if `cache` is None or can not be written. `equal_sizes_only` skips
    files whose size no other file has, as they have no duplicate, and images of remote files that the index lacks.
    `share` (i, n) skips all files but the i-th of every n; of a container, all pieces but those of the i-th of n parts.
    Raises `UserError` for a file that is being written, and for an index that can not be written.
    """
    if cache is not None and not is_writable(cache):
        cache = None
    if dataset.container is not None and dataset.container.pieces is not None:
        of_pieces = hash_pieces(dataset, dataset.container, cache, show, known_only=equal_sizes_only, share=share)
        return FileHashes(of_pieces, container=dataset.container)
    whole = _of_table(dataset)
    if cache is not None and whole is not None:
        digests = run_on_index(cache, whole.find)
        if digests is not None:
            return FileHashes(digests)
    states = file_states(dataset)
    digests = np.zeros((len(dataset), 16), np.uint8)
    for row, content in states.digests.items():
        digests[row] = np.frombuffer(content, np.uint8)
    hashes = FileHashes(digests, states.unreadable, dataset, states.stamps, states.paths)
    if len(hashes.files):
        _hash_files(hashes, cache, show, equal_sizes_only, share)
    elif cache is not None and whole is not None and not hashes.unreadable and whole == _of_table(dataset):
        run_on_index(cache, partial(whole.remember, digests=hashes.digests))
    return hashes


def _hash_files(
    hashes: FileHashes, cache: Path | None, show: bool, equal_sizes_only: bool, share: tuple[int, int]
) -> None:
    """Fills in the digests of files, from the index or from the files."""
    rows = hashes.files
    whole = _of_files(hashes)
    if cache is not None and (digests := run_on_index(cache, whole.find)) is not None:
        hashes.digests[rows] = digests
        return
    wanted = rows[share[0] :: share[1]]
    if equal_sizes_only:
        _, size, files = np.unique(hashes.stamps[rows, 0], return_inverse=True, return_counts=True)
        wanted = rows[files[size] > 1]
    known = {} if cache is None else run_on_index(cache, partial(_look_up, hashes=hashes, rows=wanted.tolist()))
    for row, content in known.items():
        hashes.digests[row] = np.frombuffer(content, np.uint8)
    unknown = [row for row in wanted.tolist() if row not in known]
    if unknown:
        _hash_new_files(unknown, hashes, cache, show)
    if cache is not None and len(wanted) == len(rows) == len(hashes.files):  # all were hashed, none proved unreadable
        run_on_index(cache, partial(_of_files(hashes).remember, digests=hashes.digests[rows]))


class _List(NamedTuple):
    """The digests of all files of a data set, or of all images of a table, as the index keeps them."""

    key: str  # changes with the state of any file

    def find(self, index: sqlite3.Connection) -> np.ndarray | None:
        """Returns the digests, uint8 [n,16], or None if the index does not have them."""
        found = index.execute("SELECT checksum, xxh3_128 FROM lists WHERE key = ?", (self.key,)).fetchone()
        if found is None:
            return None
        checksum, content = found
        if xxhash.xxh3_64_hexdigest(content) != checksum:
            return None
        index.execute("UPDATE lists SET used = ? WHERE key = ?", (time.time(), self.key))
        return np.frombuffer(bytearray(content), np.uint8).reshape(-1, 16)

    def remember(self, index: sqlite3.Connection, digests: np.ndarray) -> None:
        """Adds the digests, and removes the lists that were not used for longest."""
        content = digests.tobytes()
        row = self.key, time.time(), xxhash.xxh3_64_hexdigest(content), content
        index.execute("INSERT OR REPLACE INTO lists VALUES (?, ?, ?, ?)", row)
        kept = "SELECT key FROM lists ORDER BY used DESC LIMIT ?"
        index.execute(f"DELETE FROM lists WHERE key NOT IN ({kept})", (KEPT_LISTS,))


def _of_files(hashes: FileHashes) -> _List:
    """The list of all images that are files."""
    return _List(xxhash.xxh3_128_hexdigest(hashes.stamps.tobytes() + hashes.paths))


def _of_table(dataset: ImageDataset) -> _List | None:
    """The list of a table's images; None: the data set is no table, or a file of it can not be found."""
    if dataset.container is None:
        return None
    try:
        files = [[path, *Stamp.of(regular(path))] for path in dataset.container.files]
    except OSError:
        return None
    return _List(xxhash.xxh3_128_hexdigest(json.dumps([files, dataset.container.column, len(dataset)]).encode()))


def _hash_new_files(rows: list[int], hashes: FileHashes, cache: Path | None, show: bool) -> None:
    """Hashes the files of these rows into `hashes`, and adds every `FILES_PER_COMMIT` of them to the index."""

    def hashed(row: int) -> tuple[Stamp, bytes] | str:
        try:
            return hash_file(hashes.path(row))
        except OSError as error:
            return reason(error)

    with ThreadPoolExecutor(READER_THREADS) as pool, progress("hashing", len(rows), "images", show) as bar:
        for first in range(0, len(rows), FILES_PER_COMMIT):
            some, known = rows[first : first + FILES_PER_COMMIT], []
            for row, result in zip(some, pool.map(hashed, some), strict=True):
                if isinstance(result, str):
                    hashes.stamps[row] = -1
                    hashes.unreadable[row] = result
                else:
                    stamp, content = result
                    hashes.stamps[row] = stamp
                    hashes.digests[row] = np.frombuffer(content, np.uint8)
                    known.append((os.fsencode(hashes.path(row)), *stamp, content))
                bar.advance()
            if cache is not None:
                run_on_index(cache, partial(_insert, known=known))


def hash_file(path: str) -> tuple[Stamp, bytes]:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        before = Stamp.of(os.fstat(file.fileno()))
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
        if Stamp.of(os.fstat(file.fileno())) != before:
            raise UserError(f"{path}: another program is writing to this file; run again when the data are complete")
    return before, digest.digest()


def _look_up(index: sqlite3.Connection, hashes: FileHashes, rows: list[int]) -> dict[int, bytes]:
    """Row → hash, for the files of these rows whose state equals that in the index."""
    index.execute("CREATE TEMP TABLE wanted (row INTEGER PRIMARY KEY, path BLOB, size, mtime_ns, ctime_ns)")
    stamps = hashes.stamps[rows].tolist()
    wanted = ((row, os.fsencode(hashes.path(row)), *stamp) for row, stamp in zip(rows, stamps, strict=True))
    index.executemany("INSERT INTO wanted VALUES (?, ?, ?, ?, ?)", wanted)
    # CROSS JOIN keeps SQLite from reordering the tables: it looks each wanted path up in the index by its key
    return dict(
        index.execute(
            "SELECT row, xxh3_128 FROM wanted CROSS JOIN files USING (path, size, mtime_ns, ctime_ns)"
            " WHERE length(xxh3_128) = 16"
        )
    )


def _insert(index: sqlite3.Connection, known: list[tuple[bytes, int, int, int, bytes]]) -> None:
    index.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", known)
