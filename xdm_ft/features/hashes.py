"""Hashes of images, and which of them decode: kept in an index, so that a later run opens no image.

A file counts as unchanged if its path, size, time of modification and time of status change (ctime, which a program can
not set back) equal those in the index. A file that was moved or touched is hashed again, with the same result. On a
file system without ctime, a change that restores both size and time of modification is not noticed.

`<cache>/index.sqlite` has four tables: `files`, one row per file; `lists`, all hashes of a data set under a hash of the
paths and states of its files, so that an unchanged one is found without a look-up per image; `pieces`, those of a row
group of a Parquet file or of a run of a tar's members, under the state of that file; and `decoded`, the images that
were decoded, and why some of them do not decode, under the decoder and its limits.
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
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import PIL
import torch
import xxhash
from PIL import Image
from torch.utils.data import Dataset

from xdm_ft.containers.files import ImageFiles
from xdm_ft.containers.remote import is_remote, state_of
from xdm_ft.features.key import SCHEMA
from xdm_ft.features.shards import ContentIndex, Contents, contents_of
from xdm_ft.images.dataset import Container, ImageDataset, Pieces
from xdm_ft.images.decode import OF_THE_MACHINE, scan
from xdm_ft.images.loader import image_loader, loaded
from xdm_ft.images.transforms import NotAStrip, Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import progress, pulse
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.storage.atomic import UNFINISHED, disk_errors, file_mode, is_writable
from xdm_ft.storage.cache_root import one_at_a_time
from xdm_ft.storage.digests import digest
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
KEPT_LISTS = 32  # that were used last; 16 bytes per image each
SECONDS_FOR_INDEX = 60.0  # at most, for another process that writes to the index
_NO_FILE = (-1, -1, -1)
_EMPTY_FILE = xxhash.xxh3_128_digest(b"")
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}  # the last: it has other tables
_TABLES = (
    "CREATE TABLE IF NOT EXISTS files"
    " (path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, xxh3_128 BLOB) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS pieces (key TEXT PRIMARY KEY, checksum TEXT, xxh3_128 BLOB) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS lists (key TEXT PRIMARY KEY, used REAL, checksum TEXT, xxh3_128 BLOB)",
    "CREATE TABLE IF NOT EXISTS decoded (key TEXT, checksum TEXT, xxh3_128 BLOB, reasons TEXT)",
)


class Stamp(NamedTuple):
    """The state of a file by which a change is noticed."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


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
        # sorted by the first half alone, as a sort of both takes several times as long; halves rarely agree by chance
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
        """Returns one list of rows for each image that occurs more than once, byte for byte, except empty files."""
        contents, _, number_of = self.images
        is_repeated = np.bincount(number_of + 1, minlength=len(contents) + 1) > 1  # of −1 and of each image
        is_repeated[0] = False
        is_repeated[1:][contents == np.bytes_(_EMPTY_FILE)] = False
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
            return _changed_container(self.container, self.container.pieces.of_row(np.fromiter(rows, np.int64)))
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
    """Returns the hash of every image of the data set, from the index in `cache` or from the file.

    New hashes are added to the index. There is none if `cache` is None or can not be written. `equal_sizes_only` skips
    files whose size no other file has, as they have no duplicate, and images of remote files that the index lacks.
    `share` (i, n) skips all files but the i-th of every n; of a container, all pieces but those of the i-th of n parts.
    Raises `UserError` for a file that is being written, and for an index that can not be written.
    """
    if cache is not None and not is_writable(cache):
        cache = None
    if dataset.container is not None and dataset.container.pieces is not None:
        digests = _hash_pieces(dataset, dataset.container, cache, show, equal_sizes_only, share)
        return FileHashes(digests, container=dataset.container)
    table = _table_key(dataset)
    if cache is not None and table is not None:
        whole_list = run_on_index(cache, partial(_find_list, key=table))
        if whole_list is not None:
            return FileHashes(whole_list)
    states = file_states(dataset)
    digests = np.zeros((len(dataset), 16), np.uint8)
    for row, content in states.digests.items():
        digests[row] = np.frombuffer(content, np.uint8)
    hashes = FileHashes(digests, states.unreadable, dataset, states.stamps, states.paths)
    if len(hashes.files):
        _hash_files(hashes, cache, show, equal_sizes_only, share)
    elif cache is not None and table is not None and not hashes.unreadable and table == _table_key(dataset):
        run_on_index(cache, partial(_insert_list, key=table, digests=hashes.digests))
    return hashes


# ---- Files


def _hash_files(
    hashes: FileHashes, cache: Path | None, show: bool, equal_sizes_only: bool, share: tuple[int, int]
) -> None:
    """Fills in the digests of files, from the index or from the files."""
    rows = hashes.files
    if cache is not None:
        whole_list = run_on_index(cache, partial(_find_list, key=_files_key(hashes)))
        if whole_list is not None:
            hashes.digests[rows] = whole_list
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
        run_on_index(cache, partial(_insert_list, key=_files_key(hashes), digests=hashes.digests[rows]))


def _hash_new_files(rows: list[int], hashes: FileHashes, cache: Path | None, show: bool) -> None:
    """Hashes the files of these rows into `hashes`, and adds every `ROWS_PER_COMMIT` of them to the index."""

    def hash_row(row: int) -> tuple[Stamp, bytes] | str:
        try:
            return hash_file(hashes.path(row))
        except OSError as error:
            return _reason(error)

    with ThreadPoolExecutor(READER_THREADS) as pool, progress("hashing", len(rows), "images", show) as bar:
        for first in range(0, len(rows), ROWS_PER_COMMIT):
            some, entries = rows[first : first + ROWS_PER_COMMIT], []
            for row, result in zip(some, pool.map(hash_row, some), strict=True):
                if isinstance(result, str):
                    hashes.stamps[row] = -1
                    hashes.unreadable[row] = result
                else:
                    stamp, content = result
                    hashes.stamps[row] = stamp
                    hashes.digests[row] = np.frombuffer(content, np.uint8)
                    entries.append((os.fsencode(hashes.path(row)), *stamp, content))
                bar.advance()
            if cache is not None:
                run_on_index(cache, partial(_insert_files, entries=entries))


def hash_file(path: str) -> tuple[Stamp, bytes]:
    """Returns the state and the xxh3_128 of a file. Raises `UserError` if another program writes to it."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        before = Stamp.of(os.fstat(file.fileno()))
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
        if Stamp.of(os.fstat(file.fileno())) != before:
            raise UserError(f"{path}: another program is writing to this file; run again when the data are complete")
    return before, hasher.digest()


def _look_up(index: sqlite3.Connection, hashes: FileHashes, rows: list[int]) -> dict[int, bytes]:
    """Returns {row: hash} of the files of these rows whose state equals that in the index."""
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


def _insert_files(index: sqlite3.Connection, entries: list[tuple[bytes, int, int, int, bytes]]) -> None:
    index.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", entries)


# ---- Whole lists


def _files_key(hashes: FileHashes) -> str:
    """Returns the key of the list of all images that are files: it changes with the state of any file."""
    return xxhash.xxh3_128_hexdigest(hashes.stamps.tobytes() + hashes.paths)


def _table_key(dataset: ImageDataset) -> str | None:
    """Returns the key of the list of a table's images. None: there is no table, or a file of it can not be read."""
    if dataset.container is None:
        return None
    try:
        files = [[path, *Stamp.of(regular_file(path))] for path in dataset.container.files]
    except OSError:
        return None
    return xxhash.xxh3_128_hexdigest(json.dumps([files, dataset.container.column, len(dataset)]).encode())


def _find_list(index: sqlite3.Connection, key: str) -> np.ndarray | None:
    """Returns the digests of a list, uint8 [n,16], or None if the index does not have them undamaged."""
    entry = index.execute("SELECT checksum, xxh3_128 FROM lists WHERE key = ?", (key,)).fetchone()
    if entry is None or xxhash.xxh3_64_hexdigest(entry[1]) != entry[0]:
        return None
    index.execute("UPDATE lists SET used = ? WHERE key = ?", (time.time(), key))
    return np.frombuffer(bytearray(entry[1]), np.uint8).reshape(-1, 16)


def _insert_list(index: sqlite3.Connection, key: str, digests: np.ndarray) -> None:
    """Adds a list, and removes those that were not used for longest."""
    content = digests.tobytes()
    row = key, time.time(), xxhash.xxh3_64_hexdigest(content), content
    index.execute("INSERT OR REPLACE INTO lists VALUES (?, ?, ?, ?)", row)
    kept = "SELECT key FROM lists ORDER BY used DESC LIMIT ?"
    index.execute(f"DELETE FROM lists WHERE key NOT IN ({kept})", (KEPT_LISTS,))


# ---- Pieces of containers: row groups of Parquet files, runs of a tar's members


def _hash_pieces(
    dataset: ImageDataset,
    container: Container,
    cache: Path | None,
    show: bool,
    known_only: bool,
    share: tuple[int, int],
) -> np.ndarray:
    """Returns uint8 [N,16]; zeros where a hash is not known. `known_only`: reads no remote file.

    Raises `UserError` for a file that can not be read, or has changed.
    """
    pieces = container.pieces
    assert pieces is not None
    digests = np.zeros((len(dataset), 16), np.uint8)
    known = set[int]()
    if cache is not None:
        known = run_on_index(cache, partial(_find_pieces, container=container, digests=digests))
    count, (part, parts) = len(pieces.ends), share
    mine = [n for n in range(count * part // parts, count * (part + 1) // parts) if n not in known]
    if known_only:
        mine = [n for n in mine if not is_remote(container.files[int(pieces.file_of[n])])]
    uncommitted = list[int]()
    with progress("hashing", sum(len(pieces.rows(n)) for n in mine), "images", show) as bar:
        for number in mine:
            rows = pieces.rows(number)
            for row in rows:
                content = dataset.content(row)
                assert isinstance(content, bytes), "an image of a piece is no file"
                digests[row] = np.frombuffer(xxhash.xxh3_128_digest(content), np.uint8)
            bar.advance(len(rows))
            uncommitted.append(number)
            if rows.stop - pieces.rows(uncommitted[0]).start >= ROWS_PER_COMMIT or number == mine[-1]:
                changed = _changed_container(container, uncommitted)
                if changed is not None:
                    raise UserError(
                        f"{changed}: another program is writing to this file; run again when the data are complete"
                    )
                if cache is not None:
                    run_on_index(
                        cache, partial(_insert_pieces, container=container, digests=digests, numbers=uncommitted)
                    )
                uncommitted = []
    return digests


def _changed_container(container: Container, numbers: Sequence[int] | np.ndarray) -> str | None:
    """Returns the first file of these pieces that has changed since its pieces were counted; None if none has."""
    pieces = container.pieces
    assert pieces is not None
    for file in np.unique(pieces.file_of[np.asarray(numbers, np.int64)]).tolist():
        if state_of(container.files[file]) != pieces.states[file]:
            return container.files[file]
    return None


def _piece_key(container: Container, pieces: Pieces, number: int) -> str:
    """Returns what a piece is remembered under: it changes with the state of its file."""
    file = int(pieces.file_of[number])
    parts = [container.files[file], *pieces.states[file], container.column]
    text = json.dumps([*parts, pieces.in_file(number), len(pieces.rows(number))])
    return xxhash.xxh3_128_hexdigest(text.encode())


def _find_pieces(index: sqlite3.Connection, container: Container, digests: np.ndarray) -> set[int]:
    """Fills in the digests of the pieces in the index, and returns their numbers."""
    pieces, known = container.pieces, set[int]()
    assert pieces is not None
    for number in range(len(pieces.ends)):
        key = _piece_key(container, pieces, number)
        entry = index.execute("SELECT checksum, xxh3_128 FROM pieces WHERE key = ?", (key,)).fetchone()
        rows = pieces.rows(number)
        if entry is not None and len(entry[1]) == 16 * len(rows) and xxhash.xxh3_64_hexdigest(entry[1]) == entry[0]:
            digests[rows.start : rows.stop] = np.frombuffer(entry[1], np.uint8).reshape(-1, 16)
            known.add(number)
    return known


def _insert_pieces(index: sqlite3.Connection, container: Container, digests: np.ndarray, numbers: list[int]) -> None:
    pieces = container.pieces
    assert pieces is not None
    for number in numbers:
        rows = pieces.rows(number)
        content = digests[rows.start : rows.stop].tobytes()
        row = _piece_key(container, pieces, number), xxhash.xxh3_64_hexdigest(content), content
        index.execute("INSERT OR REPLACE INTO pieces VALUES (?, ?, ?)", row)


# ---- Which images decode


def undecodable(
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
    them. Nothing is remembered if `cache` is None or can not be written. Raises `UserError` for a file that changes
    meanwhile.
    """
    check = NotAStrip(preprocessing)
    if cache is None or not is_writable(cache):
        return scan(dataset, threads, check, show)
    parts = {
        "schema": SCHEMA,
        "decoder": dataset.decoder,
        "most_pixels": Image.MAX_IMAGE_PIXELS,
        "resize": [check.how, check.limit],
        "versions": {"xdm_ft": __version__, "pillow": PIL.__version__},
    }
    images, key = hashes.images, digest(json.dumps(parts, sort_keys=True), bits=128)

    def decode_missing(part: int = 0, parts: int = 1) -> dict[int, str]:
        """Returns {image: reason} of all, after decoding what the index lacks of one of the parts."""
        known, reasons = run_on_index(cache, partial(_find_decoded, key=key, images=images))
        count = len(known)
        begin, end = count * part // parts, count * (part + 1) // parts
        mine = begin + np.flatnonzero(~known[begin:end])
        with progress("checking", len(mine), "images", show and len(mine) > 0) as bar:
            for first in range(0, len(mine), DECODED_PER_COMMIT):
                numbers = mine[first : first + DECODED_PER_COMMIT]
                rows = images.rows[numbers].tolist()
                faults = scan(dataset, threads, check, show=False, rows=rows)
                changed = hashes.changed_file(rows)
                if changed is not None:
                    raise UserError(f"{changed}: this file was changed while images were checked; run again")
                new = {rows.index(row): reason for row, reason in faults.items()}
                run_on_index(cache, partial(_insert_decoded, key=key, contents=images.contents[numbers], reasons=new))
                reasons |= {int(numbers[place]): reason for place, reason in new.items()}
                bar.advance(len(numbers))
        return reasons

    if accelerator is not None and accelerator.num_processes > 1:
        decode_missing(accelerator.process_index, accelerator.num_processes)
        wait_for_everyone(accelerator)  # the others' parts are in the index now, if it is the same one
    return hashes.unreadable_rows(decode_missing())


def _find_decoded(index: sqlite3.Connection, key: str, images: DistinctImages) -> tuple[np.ndarray, dict[int, str]]:
    """Returns whether each image was decoded, bool [M], and {image: why it does not decode}."""
    known, reasons = np.zeros(len(images.contents), bool), dict[int, str]()
    contents_index = ContentIndex(images.contents)
    query = "SELECT checksum, xxh3_128, reasons FROM decoded WHERE key = ?"
    for checksum, content, reasons_text in index.execute(query, (key,)):
        if xxhash.xxh3_64_hexdigest(content + reasons_text.encode()) == checksum:
            numbers = contents_index.find(np.frombuffer(content, "S16"))
            known[numbers[numbers >= 0]] = True
            reasons |= {int(numbers[int(place)]): reason for place, reason in json.loads(reasons_text).items()}
    reasons.pop(-1, None)  # of images that are not here
    return known, reasons


def _insert_decoded(index: sqlite3.Connection, key: str, contents: Contents, reasons: Mapping[int, str]) -> None:
    content, reasons_text = contents.tobytes(), json.dumps(reasons)
    checksum = xxhash.xxh3_64_hexdigest(content + reasons_text.encode())
    index.execute("INSERT INTO decoded VALUES (?, ?, ?, ?)", (key, checksum, content, reasons_text))


# ---- The index


def run_on_index(cache: Path, work: Callable[[sqlite3.Connection], T]) -> T:
    """Returns what `work` returns, run in one transaction on the index. Deletes a damaged index: it only saves time."""
    path = cache / "index.sqlite"
    try:
        return _transaction(path, work)
    except sqlite3.DatabaseError as error:
        # the low byte is the primary code; the rest says more than is needed here
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise UserError(f"{path}: the disk is full; make room, or set features.dir to another disk") from error
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise UserError(
                f"{path}: can not be written ({error}); allow writing to it, or set features.dir to another folder"
            ) from error
        if code not in _DAMAGED:
            raise
        logger.warning("%s is damaged (%s): hashing the images again", path, error)
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _transaction(path, work)


def _transaction(path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
    if not path.exists():
        with one_at_a_time(path.with_suffix(".lock")):
            if not path.exists():
                _create_index(path)
    # opened for each transaction: SQLite forbids using a connection in a forked process, such as a DataLoader worker
    with closing(sqlite3.connect(path, timeout=SECONDS_FOR_INDEX)) as index:
        index.execute("PRAGMA temp_store = MEMORY")
        with index:
            for table in _TABLES:
                index.execute(table)  # an empty file is a database without tables
            return work(index)


def _create_index(path: Path) -> None:
    """Makes an empty index under another name, and renames it: a change of the journal does not wait for others."""
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    with disk_errors(path):
        unfinished.unlink(missing_ok=True)  # of a killed process
        unfinished.touch(mode=0o600)
        with closing(sqlite3.connect(unfinished)) as index:
            index.execute("PRAGMA journal_mode = WAL")  # readers and a writer do not wait for each other
        unfinished.chmod(file_mode(path.parent))
        unfinished.replace(path)


# ---- The states of files


@dataclass(frozen=True)
class FileStates:
    """The states of N images that are files, and the hashes of those that are none."""

    stamps: np.ndarray  # int64 [N,3], the `Stamp` of each file; −1 for an image that is none, or has no state
    digests: dict[int, bytes]  # row → xxh3_128 of an image that is no file
    unreadable: dict[int, str]  # row → why its file has no state
    paths: bytes  # hash of the paths of all files


def file_states(dataset: ImageDataset) -> FileStates:
    """Returns the states of all images. Most of that time is spent in Python, so processes divide a long list."""
    blocks = [range(first, min(first + ROWS_AT_ONCE, len(dataset))) for first in range(0, len(dataset), ROWS_AT_ONCE)]
    workers = min(own_cores(), len(blocks)) if len(blocks) > 1 and isinstance(dataset, ImageFiles) else 0
    loader = image_loader(_StatesOf(dataset), workers, torch.device("cpu"), batch_size=None, sampler=blocks)
    stamps, digests, unreadable = np.empty((len(dataset), 3), np.int64), dict[int, bytes](), dict[int, str]()
    paths = xxhash.xxh3_128()
    for rows, block in zip(blocks, loaded(loader, "image files", "run the same command again"), strict=True):
        stamps[rows.start : rows.stop] = block.stamps
        digests |= block.digests
        unreadable |= block.unreadable
        paths.update(block.paths)
        pulse.beat()
    return FileStates(stamps, digests, unreadable, paths.digest())


@dataclass(frozen=True)
class _StatesOf(Dataset[FileStates]):
    """Item `rows` is the states of these images."""

    dataset: ImageDataset

    def __getitem__(self, rows: range) -> FileStates:
        stamps, paths = list[int](), list[str]()
        digests, unreadable = dict[int, bytes](), dict[int, str]()
        for row in rows:
            content = self.dataset.content(row)
            if isinstance(content, bytes):
                digests[row] = xxhash.xxh3_128_digest(content)
                stamps += _NO_FILE
                continue
            try:
                stamps += Stamp.of(regular_file(content))
                paths.append(_absolute(content))
            except (OSError, ValueError) as error:  # ValueError: a path with a null byte
                unreadable[row] = _reason(error)
                stamps += _NO_FILE
        hashed = xxhash.xxh3_128_digest(os.fsencode("\0".join(paths)))  # \0 is in no path
        return FileStates(np.array(stamps, np.int64).reshape(-1, 3), digests, unreadable, hashed)


def _absolute(path: str) -> str:
    return path if path.startswith(os.sep) else os.path.abspath(path)


def regular_file(path: str) -> os.stat_result:
    """Returns the status of a file. Raises `ValueError` if it is not a regular one, or `OSError`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")  # opening a pipe would block for ever
    return status


def _reason(error: Exception) -> str:
    """Why a file can not be read. Raises `error` again if the machine is at fault (too many open files, no memory)."""
    if isinstance(error, OSError):
        if error.errno in OF_THE_MACHINE:
            raise error
        return error.strerror or str(error)
    return str(error)
