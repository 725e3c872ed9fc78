"""Hashes of images, and which of them decode: kept in an index, so that a later run opens no image.

A file counts as unchanged if its path, size, time of modification and time of status change (ctime, which a program can
not set back) equal those in the index. A file that was moved or touched is hashed again, with the same result. On a
file system without ctime, a change that restores both size and time of modification is not noticed.

`<cache>/index.sqlite` has two tables: `files`, one row per file; and `contents`, lists of hashes under a key of what
determines them: all files of a data set, so that an unchanged one is found without a look-up per image; a row group of
a Parquet file or a run of a tar's members; and images that were decoded, with what was found: why some of them do not
decode, or which values their pixels use.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import PIL
import torch
import xxhash
from PIL import Image
from torch.utils.data import Dataset

from xdm_ft.features.cache import INDEX, ContentIndex, Contents, contents_of
from xdm_ft.features.key import SCHEMA
from xdm_ft.image_files.files import ImageFiles
from xdm_ft.image_files.remote import is_remote, state_of
from xdm_ft.images import Container, ImageDataset, Pieces
from xdm_ft.images.decode import OF_THE_MACHINE, scan
from xdm_ft.images.facts import Extremes, Pixels, extremes, pixels
from xdm_ft.images.loader import image_loader, iterate_batches
from xdm_ft.images.transforms import NotAStrip, Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import progress, pulse
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.storage import digest
from xdm_ft.storage.atomic import UNFINISHED, disk_errors, file_mode, is_writable
from xdm_ft.storage.cache_root import one_at_a_time
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
T = TypeVar("T")

READER_THREADS = 8  # more than cores: on a network disk most of the time is spent waiting
READ_BYTES = 1 << 22
ROWS_PER_COMMIT = 1024  # at most so many hashes (and a piece's) are lost when a process is killed
ROWS_AT_ONCE = 1 << 14  # whose states a process looks at; the hash of the paths depends on it
DECODED_PER_COMMIT = 256
KEPT_LISTS = 32  # of whole data sets, that were used last; 16 bytes per image each
SECONDS_FOR_INDEX = 60.0  # at most, for another process that writes to the index
_NO_FILE = (-1, -1, -1)
_EMPTY_FILE = np.bytes_(xxhash.xxh3_128_digest(b""))


class DistinctImages(NamedTuple):
    """The M different images among N rows, in the order of the rows. Copies of an image are one image."""

    contents: Contents  # [M]
    rows: np.ndarray  # int64 [M], the first row of each
    number_of: np.ndarray  # int64 [N], the image of each row; −1: its bytes were not read


@dataclass(frozen=True)
class FileHashes:
    """Hashes of N images. An image in memory or in a table has a digest and no file."""

    digests: np.ndarray  # uint8 [N,16]: xxh3_128 of the bytes; zeros where they cannot be read
    unreadable: dict[int, str] = field(default_factory=dict)  # row → why its bytes cannot be read
    dataset: ImageDataset | None = None  # of the files
    stamps: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """int64 [N,3], the `stamp` of each file when it was hashed, −1 where there is none; [0,3] if no image is a file."""
    paths: bytes = b""  # hash of the paths of all files
    container: Container | None = None  # of pieces, whose files were hashed

    @property
    def files(self) -> np.ndarray:
        """The rows whose images are files that can be read: int64."""
        return np.flatnonzero(self.stamps[:, 0] >= 0)

    def path(self, row: int) -> str:
        """Returns the absolute path of the file of this row."""
        assert self.dataset is not None
        content = self.dataset.content(row)
        assert isinstance(content, str)
        return _absolute(content)

    @cached_property
    def images(self) -> DistinctImages:
        """The different images among those that were hashed."""
        halves = np.ascontiguousarray(self.digests).view(np.uint64)  # [N,2]
        hashed = np.flatnonzero(halves.any(1))
        # by the first half alone: a sort of both takes three times as long; stable: copies by the order of their rows
        order = hashed[np.argsort(halves[hashed, 0], kind="stable")]
        differs = np.diff(halves[order], axis=0) != 0  # from the image before
        if (differs[:, 1] & ~differs[:, 0]).any():  # nearly never: two images share their first half
            order = hashed[np.lexsort((halves[hashed, 1], halves[hashed, 0]))]
            differs = np.diff(halves[order], axis=0) != 0
        is_first = np.append(True, differs.any(1))[: len(order)]
        first = np.zeros(len(halves), bool)
        first[order[is_first]] = True
        number, number_of = np.cumsum(first) - 1, np.full(len(halves), -1)
        number_of[order] = number[order[is_first]][np.cumsum(is_first) - 1]
        rows = np.flatnonzero(first)
        return DistinctImages(contents_of(self.digests[rows]), rows, number_of)

    def duplicates(self) -> list[list[int]]:
        """Returns one list of rows for each image that occurs more than once, byte for byte, except empty files."""
        contents, _, number_of = self.images
        is_repeated = np.bincount(number_of + 1, minlength=len(contents) + 1) > 1  # of −1 and of each image
        is_repeated[0] = False
        is_repeated[1:][contents == _EMPTY_FILE] = False
        rows_of: dict[int, list[int]] = {}
        for row in np.flatnonzero(is_repeated[number_of + 1]).tolist():
            rows_of.setdefault(int(number_of[row]), []).append(row)
        return list(rows_of.values())

    def unreadable_rows(self, reasons: Mapping[int, str]) -> dict[int, str]:
        """Returns row → why its image is not read, in order; `reasons` are those of images."""
        number_of = self.images.number_of
        rows = np.flatnonzero(np.isin(number_of, list(reasons))).tolist()
        return dict(sorted((self.unreadable | {row: reasons[int(number_of[row])] for row in rows}).items()))

    def changed_file(self, rows: Iterable[int]) -> str | None:
        """Returns the first file of these rows that has changed since it was hashed; None if none has."""
        if self.container is not None and self.container.pieces is not None:
            pieces = self.container.pieces
            return _changed_container(self.container, pieces, pieces.of_row(np.fromiter(rows, np.int64)))
        for row in rows if len(self.stamps) else ():
            hashed_stamp = tuple(self.stamps[row].tolist())
            if hashed_stamp != _NO_FILE:
                try:
                    if stamp(os.stat(self.path(row))) != hashed_stamp:
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
    """Returns the hash of every image of the data set, from the index in `cache` or from the file.

    New hashes are added to the index. There is none if `cache` is None or cannot be written. `equal_sizes_only` skips
    files whose size no other file has, as they have no duplicate, and images of remote files that the index lacks.
    `share` (i, n) skips all files but the i-th of every n; of a container, all pieces but those of the i-th of n parts.
    Raises `UserError` for a file that is being written, and for an index that cannot be written.
    """
    index, container = _Index(cache), dataset.container
    if container is not None and container.pieces is not None:
        digests = _hash_pieces(dataset, container, container.pieces, index, show, equal_sizes_only, share)
        return FileHashes(digests, container=container)
    table = _table_key(dataset)
    if table is not None and (lists := index.find(table)):
        return FileHashes(lists[0].digests)
    hashes = file_states(dataset)
    rows = hashes.files
    if not len(rows):
        # the key once more: hashes of a table that changed meanwhile must not be kept under its old state
        if table is not None and not hashes.unreadable and table == _table_key(dataset):
            index.add([table], [hashes.digests], is_whole=True)
        return hashes
    if lists := index.find(_files_key(hashes)):
        hashes.digests[rows] = lists[0].digests
        return hashes

    wanted = rows[share[0] :: share[1]]
    if equal_sizes_only:
        _, size, files = np.unique(hashes.stamps[rows, 0], return_inverse=True, return_counts=True)
        wanted = rows[files[size] > 1]
    indexed = index.find_files(hashes, wanted.tolist())
    for row, content in indexed.items():
        hashes.digests[row] = np.frombuffer(content, np.uint8)
    _hash_new_files([row for row in wanted.tolist() if row not in indexed], hashes, index, show)
    if len(wanted) == len(rows) == len(hashes.files):  # all were hashed, none proved unreadable
        index.add([_files_key(hashes)], [hashes.digests[rows]], is_whole=True)
    return hashes


def _files_key(hashes: FileHashes) -> str:
    """Returns the key of the list of all images that are files: it changes with the state of any file."""
    return xxhash.xxh3_128_hexdigest(hashes.stamps.tobytes() + hashes.paths)


def _table_key(dataset: ImageDataset) -> str | None:
    """Returns the key of the list of a table's images. None: there is no table, or a file of it cannot be read."""
    if dataset.container is None:
        return None
    try:
        files = [[path, *stamp(regular_file(path))] for path in dataset.container.files]
    except OSError:
        return None
    return xxhash.xxh3_128_hexdigest(json.dumps([files, dataset.container.column, len(dataset)]).encode())


def _hash_new_files(rows: list[int], hashes: FileHashes, index: _Index, show: bool) -> None:
    """Hashes the files of these rows into `hashes`, and adds every `ROWS_PER_COMMIT` of them to the index."""

    def hash_row(row: int) -> tuple[tuple[int, int, int], bytes] | str:
        try:
            return hash_file(hashes.path(row))
        except OSError as error:
            return _reason(error)

    with ThreadPoolExecutor(READER_THREADS) as pool, progress("hashing", len(rows), "images", show) as bar:
        for first in range(0, len(rows), ROWS_PER_COMMIT):
            some, entries = rows[first : first + ROWS_PER_COMMIT], []
            for row, result in zip(some, pool.map(hash_row, some), strict=True):
                if isinstance(result, str):
                    hashes.stamps[row] = _NO_FILE
                    hashes.unreadable[row] = result
                else:
                    hashes.stamps[row], content = result
                    hashes.digests[row] = np.frombuffer(content, np.uint8)
                    entries.append((os.fsencode(hashes.path(row)), *result[0], content))
                bar.advance()
            index.add_files(entries)


def hash_file(path: str) -> tuple[tuple[int, int, int], bytes]:
    """Returns the `stamp` and the xxh3_128 of a file. Raises `UserError` if another program writes to it."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        before = stamp(os.fstat(file.fileno()))
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
        if stamp(os.fstat(file.fileno())) != before:
            raise UserError(f"{path}: another program is writing to this file; run again when the data are complete")
    return before, hasher.digest()


# ---- Pieces of containers: row groups of Parquet files, runs of a tar's members


def _hash_pieces(
    dataset: ImageDataset,
    container: Container,
    pieces: Pieces,
    index: _Index,
    show: bool,
    indexed_only: bool,
    share: tuple[int, int],
) -> np.ndarray:
    """Returns uint8 [N,16]; zeros where a hash is not known. `indexed_only`: reads no remote file.

    Raises `UserError` for a file that cannot be read, or has changed.
    """
    keys = list[str]()  # under which pieces are remembered: they change with the state of their file
    for number, file in enumerate(pieces.file_of.tolist()):
        parts = [container.files[file], *pieces.states[file], container.column, pieces.in_file(number)]
        keys.append(xxhash.xxh3_128_hexdigest(json.dumps([*parts, len(pieces.rows(number))]).encode()))

    digests, missing = np.zeros((len(dataset), 16), np.uint8), list[int]()
    begin, end = (len(keys) * part // share[1] for part in (share[0], share[0] + 1))
    for number, lists in enumerate(index.find_each(keys)):
        rows = pieces.rows(number)
        if lists and len(lists[0].digests) == len(rows):
            digests[rows.start : rows.stop] = lists[0].digests
        elif begin <= number < end and not (indexed_only and is_remote(container.files[pieces.file_of[number]])):
            missing.append(number)

    uncommitted = list[int]()
    with progress("hashing", sum(len(pieces.rows(number)) for number in missing), "images", show) as bar:
        for number in missing:
            rows = pieces.rows(number)
            for row in rows:
                content = dataset.content(row)
                assert isinstance(content, bytes), "an image of a piece is not a file"
                digests[row] = np.frombuffer(xxhash.xxh3_128_digest(content), np.uint8)
            bar.advance(len(rows))
            uncommitted.append(number)
            if rows.stop - pieces.rows(uncommitted[0]).start >= ROWS_PER_COMMIT or number == missing[-1]:
                if changed := _changed_container(container, pieces, np.array(uncommitted)):
                    raise UserError(
                        f"{changed}: another program is writing to this file; run again when the data are complete"
                    )
                runs = [pieces.rows(number) for number in uncommitted]
                index.add([keys[n] for n in uncommitted], [digests[run.start : run.stop] for run in runs])
                uncommitted = []
    return digests


def _changed_container(container: Container, pieces: Pieces, numbers: int | np.ndarray) -> str | None:
    """Returns the first file of these pieces that has changed since its pieces were counted; None if none has."""
    for file in np.unique(pieces.file_of[numbers]).tolist():
        if state_of(container.files[file]) != pieces.states[file]:
            return container.files[file]
    return None


# ---- Which images decode


def find_undecodable(
    dataset: ImageDataset,
    hashes: FileHashes,
    preprocessing: Preprocessing,
    cache: Path | None,
    threads: int,
    show: bool,
    accelerator: Accelerator | None = None,
) -> dict[int, str]:
    """Returns {row: reason} of the images that do not decode, or that the preprocessing refuses, in order.

    Decodes only images that were not decoded before, with so many threads; the processes of the accelerator divide
    them. Nothing is remembered if `cache` is None or cannot be written. Raises `UserError` for a file that changes
    meanwhile.
    """
    check = NotAStrip(preprocessing)
    what = {"most_pixels": Image.MAX_IMAGE_PIXELS, "resize": [check.how, check.limit]}
    of_images = _Decoded(
        dataset, hashes, cache, what, lambda rows: scan(dataset, threads, check, show=False, rows=rows), show
    )
    # without an index no process would learn what the others found
    if accelerator is not None and accelerator.num_processes > 1 and of_images.index.path is not None:
        of_images.read(part=accelerator.process_index, parts=accelerator.num_processes)
        wait_for_everyone(accelerator)  # the others' parts are in the index now, if it is the same one
    return hashes.unreadable_rows(of_images.read())


def extremes_of(dataset: ImageDataset, hashes: FileHashes, cache: Path | None, show: bool) -> list[Extremes]:
    """Returns the extremes of all images wider than 8 bits. Reads only images that were not read before.

    Raises `UserError` for a file that changes meanwhile.
    """

    def read(rows: list[int]) -> dict[int, Extremes]:
        return _by_threads(partial(extremes, dataset), rows)

    found = _Decoded(dataset, hashes, cache, {"what": "extremes"}, read, show).read()
    return [Extremes(*values) for values in found.values()]


def pixels_of(
    dataset: ImageDataset, hashes: FileHashes, cache: Path | None, rows: np.ndarray, show: bool
) -> dict[int, Pixels]:
    """Returns {row: what its pixels use} of those of these rows that decode.

    Decodes only images that were not decoded before for this; of images without a hash nothing is remembered.
    """

    def read(rows: list[int]) -> dict[int, Pixels]:
        return _by_threads(partial(pixels, dataset), rows)

    numbers = hashes.images.number_of[rows]
    decoded = _Decoded(dataset, hashes, cache, {"what": "pixels"}, read, show)
    known = decoded.read(wanted=np.unique(numbers[numbers >= 0]))
    found = read(rows[numbers < 0].tolist())
    for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
        if number in known:
            bright, wide = known[number]
            found[row] = Pixels(bright, None if wide is None else Extremes(*wide))
    return found


def _by_threads(read: Callable[[int], T | None], rows: list[int]) -> dict[int, T]:
    """Returns {row: value} of those with a value."""
    with ThreadPoolExecutor(own_cores()) as pool:
        return {row: value for row, value in zip(rows, pool.map(read, rows), strict=True) if value is not None}


@dataclass(frozen=True)
class _Decoded:
    """What was found when images were decoded. It is kept in the index, so that each content is decoded once."""

    dataset: ImageDataset
    hashes: FileHashes
    cache: Path | None
    what: Mapping[str, Any]  # determines the values, besides decoder and versions
    decode: Callable[[list[int]], Mapping[int, Any]]  # rows → {row: value, JSON-serialisable}; others have none
    show: bool

    @cached_property
    def index(self) -> _Index:
        return _Index(self.cache)

    def read(self, part: int = 0, parts: int = 1, wanted: np.ndarray | None = None) -> dict[int, Any]:
        """Returns {image: value} of all that have one, after decoding what the index lacks of one of the parts, or of
        the `wanted` images."""
        hashes, images = self.hashes, self.hashes.images
        versions = {"xdm_ft": __version__, "pillow": PIL.__version__}
        what = {"schema": SCHEMA, "decoder": self.dataset.decoder, "versions": versions, **self.what}
        key = digest(json.dumps(what, sort_keys=True), bits=128)
        number_of, count = ContentIndex(images.contents), len(images.contents)
        decoded, values = np.zeros(count, bool), dict[int, Any]()
        for entry in self.index.find(key):
            numbers = number_of.find(contents_of(entry.digests))
            decoded[numbers[numbers >= 0]] = True
            values |= {int(numbers[position]): value for position, value in entry.values.items()}
        values.pop(-1, None)  # of images that are not here
        if wanted is None:
            wanted = np.arange(count * part // parts, count * (part + 1) // parts)
        mine = wanted[~decoded[wanted]]
        with progress("checking", len(mine), "images", self.show and len(mine) > 0) as bar:
            for first in range(0, len(mine), DECODED_PER_COMMIT):
                numbers = mine[first : first + DECODED_PER_COMMIT]
                rows = images.rows[numbers].tolist()
                of_rows = self.decode(rows)
                if changed := hashes.changed_file(rows):
                    raise UserError(f"{changed}: this file was changed while images were checked; run again")
                new = {rows.index(row): value for row, value in of_rows.items()}
                self.index.add([key], [hashes.digests[rows]], values=new)
                values |= {int(numbers[position]): value for position, value in new.items()}
                bar.advance(len(numbers))
        return values


# ---- The index


class _List(NamedTuple):
    """Hashes of images that were found or decoded together."""

    digests: np.ndarray  # uint8 [n,16]
    values: dict[int, Any]  # position → what was found, such as why the image does not decode


class _Index:
    """The index in the folder of the cache. Without a folder that can be written it stays empty.

    A damaged index is deleted, as it only saves time. Raises `UserError` if it cannot be written.
    """

    tables = (
        "CREATE TABLE IF NOT EXISTS files"
        " (path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, xxh3_128 BLOB) WITHOUT ROWID",
        # used: seconds since 1970, of the lists of whole data sets, of which KEPT_LISTS are kept
        "CREATE TABLE contents (key TEXT, used REAL, checksum TEXT, xxh3_128 BLOB, reasons TEXT)",
        "CREATE INDEX contents_by_key ON contents (key)",
    )

    def __init__(self, cache: Path | None) -> None:
        self.path = cache / INDEX if cache is not None and is_writable(cache) else None

    def find(self, key: str) -> list[_List]:
        return self.find_each([key])[0]

    def find_each(self, keys: Sequence[str]) -> list[list[_List]]:
        """Returns the undamaged lists of each key."""

        def work(index: sqlite3.Connection) -> list[list[_List]]:
            lists_of_keys = []
            for key in keys:
                lists = list[_List]()
                rows = index.execute("SELECT checksum, xxh3_128, reasons FROM contents WHERE key = ?", (key,))
                for checksum, content, text in rows:
                    if xxhash.xxh3_64_hexdigest(content + text.encode()) == checksum:
                        values = {int(position): value for position, value in json.loads(text or "{}").items()}
                        lists.append(_List(np.frombuffer(bytearray(content), np.uint8).reshape(-1, 16), values))
                lists_of_keys.append(lists)
            index.executemany(
                "UPDATE contents SET used = ? WHERE key = ? AND used IS NOT NULL", ((time.time(), key) for key in keys)
            )
            return lists_of_keys

        return self._run(work, [[] for _ in keys])

    def add(
        self,
        keys: Sequence[str],
        digests: Sequence[np.ndarray],
        values: Mapping[int, Any] | None = None,
        is_whole: bool = False,
    ) -> None:
        """Adds a list for each key. `is_whole`: of a whole data set; removes those that were not used for longest."""
        text = json.dumps(values) if values else ""

        def work(index: sqlite3.Connection) -> None:
            for key, of_key in zip(keys, digests, strict=True):
                content = of_key.tobytes()
                checksum = xxhash.xxh3_64_hexdigest(content + text.encode())
                row = key, time.time() if is_whole else None, checksum, content, text
                index.execute("INSERT INTO contents VALUES (?, ?, ?, ?, ?)", row)
            if is_whole:
                kept = "SELECT rowid FROM contents WHERE used IS NOT NULL ORDER BY used DESC LIMIT ?"
                index.execute(f"DELETE FROM contents WHERE used NOT NULL AND rowid NOT IN ({kept})", (KEPT_LISTS,))

        self._run(work, None)

    def find_files(self, hashes: FileHashes, rows: list[int]) -> dict[int, bytes]:
        """Returns {row: hash} of the files of these rows whose state equals that in the index."""

        def work(index: sqlite3.Connection) -> dict[int, bytes]:
            index.execute("CREATE TEMP TABLE wanted (row INTEGER PRIMARY KEY, path BLOB, size, mtime_ns, ctime_ns)")
            stamps = hashes.stamps[rows].tolist()
            wanted = ((row, os.fsencode(hashes.path(row)), *stamp) for row, stamp in zip(rows, stamps, strict=True))
            index.executemany("INSERT INTO wanted VALUES (?, ?, ?, ?, ?)", wanted)
            # CROSS JOIN keeps SQLite from reordering the tables: it looks each path up in the index by its key
            columns = "SELECT row, xxh3_128 FROM wanted CROSS JOIN files USING (path, size, mtime_ns, ctime_ns)"
            return dict(index.execute(f"{columns} WHERE length(xxh3_128) = 16"))

        return self._run(work, {})

    def add_files(self, entries: list[tuple[bytes, int, int, int, bytes]]) -> None:
        self._run(lambda index: index.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", entries), None)

    def _run(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Returns what `work` returns, run in one transaction; `otherwise` if there is no index."""
        if self.path is None:
            return otherwise
        path, full = self.path, "set features.dir to another"
        try:
            return self._transaction(path, work)
        except sqlite3.DatabaseError as error:
            # the low byte is the primary code; the rest says more than is needed here
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise UserError(f"{path}: the disk is full; make room, or {full} disk") from error
            if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
                problem = f"cannot be written ({error}); allow writing to it"
                raise UserError(f"{path}: {problem}, or {full} folder") from error
            if code == sqlite3.SQLITE_IOERR:  # a quota, a faulty disk, or a network disk without locks
                raise UserError(f"{path}: the disk fails ({error}); make room, check it, or {full} disk") from error
            # SQLITE_ERROR: it has other tables
            if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
                raise
            logger.warning("%s is damaged (%s): hashing the images again", path, error)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return self._transaction(path, work)

    def _transaction(self, path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
        if not path.exists():
            with one_at_a_time(path.with_suffix(".lock")):
                if not path.exists():
                    # under another name, and renamed: a change of the journal does not wait for other processes
                    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
                    with disk_errors(path):
                        unfinished.unlink(missing_ok=True)  # of a killed process
                        unfinished.touch(mode=0o600)
                        with closing(sqlite3.connect(unfinished)) as index:
                            index.execute("PRAGMA journal_mode = WAL")  # readers and a writer do not wait
                        unfinished.chmod(file_mode(path.parent))
                        unfinished.replace(path)
        # opened for each transaction: SQLite forbids using a connection in a forked process, such as a loader's worker
        with closing(sqlite3.connect(path, timeout=SECONDS_FOR_INDEX)) as index:
            index.execute("PRAGMA temp_store = MEMORY")
            has_table = "SELECT 1 FROM sqlite_master WHERE name = ?"
            with index:
                if not index.execute(has_table, ("contents",)).fetchone():
                    index.execute("BEGIN IMMEDIATE")  # of processes that begin at once, one makes the tables
                    if not index.execute(has_table, ("contents",)).fetchone():
                        for table in self.tables:
                            index.execute(table)
                return work(index)


# ---- The states of files


def file_states(dataset: ImageDataset) -> FileHashes:
    """Returns the states of all images that are files, and the hashes of those that are none.

    Most of that time is spent in Python, so processes divide a long list.
    """
    blocks = [range(first, min(first + ROWS_AT_ONCE, len(dataset))) for first in range(0, len(dataset), ROWS_AT_ONCE)]
    workers = min(own_cores(), len(blocks)) if len(blocks) > 1 and isinstance(dataset, ImageFiles) else 0
    loader = image_loader(_StatesOf(dataset), workers, torch.device("cpu"), batch_size=None, sampler=blocks)
    digests, stamps = np.zeros((len(dataset), 16), np.uint8), np.empty((len(dataset), 3), np.int64)
    unreadable, paths = dict[int, str](), xxhash.xxh3_128()
    for rows, block in zip(blocks, iterate_batches(loader, "image files", "run the same command again"), strict=True):
        digests[rows.start : rows.stop], stamps[rows.start : rows.stop] = block.digests, block.stamps
        unreadable |= block.unreadable
        paths.update(block.paths)
        pulse.beat()
    return FileHashes(digests, unreadable, dataset, stamps, paths.digest())


@dataclass(frozen=True)
class _StatesOf(Dataset[FileHashes]):
    """Item `rows` is `file_states` of these images."""

    dataset: ImageDataset

    def __getitem__(self, rows: range) -> FileHashes:
        digests, stamps = np.zeros((len(rows), 16), np.uint8), list[int]()  # a list of tuples takes much longer
        paths, unreadable = list[str](), dict[int, str]()
        for position, row in enumerate(rows):
            content, of_file = self.dataset.content(row), _NO_FILE
            if isinstance(content, bytes):
                digests[position] = np.frombuffer(xxhash.xxh3_128_digest(content), np.uint8)
            else:
                try:
                    of_file = stamp(regular_file(content))
                    paths.append(_absolute(content))
                except (OSError, ValueError) as error:  # ValueError: a path with a null byte
                    unreadable[row] = _reason(error)
            stamps += of_file
        hashed = xxhash.xxh3_128_digest(os.fsencode("\0".join(paths)))  # \0 is in no path
        return FileHashes(digests, unreadable, None, np.array(stamps, np.int64).reshape(-1, 3), hashed)


def stamp(status: os.stat_result) -> tuple[int, int, int]:
    """Returns the state of a file by which a change is noticed: size, times of modification and status change in ns."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _absolute(path: str) -> str:
    return path if path.startswith(os.sep) else os.path.abspath(path)


def regular_file(path: str) -> os.stat_result:
    """Returns the status of a file. Raises `ValueError` if it is not a regular one, or `OSError`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")  # opening a pipe would block for ever
    return status


def _reason(error: Exception) -> str:
    """Why a file cannot be read. Raises `error` again if the machine is at fault (too many open files, no memory)."""
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        raise error
    return (isinstance(error, OSError) and error.strerror) or str(error)
