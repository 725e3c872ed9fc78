"""Hashes of images, and which of them decode: kept in an index, so that a later run opens no image.

A file counts as unchanged if its path, size, time of modification and time of status change (ctime, which a program can
not set back) equal those in the index. A file that was moved or touched is hashed again, with the same result. On a
file system without ctime, a change that restores both size and time of modification is not noticed.

`<cache>/index.sqlite` has one table of facts: {hash of all that determines a fact: the fact}. Facts are the hash of a
file; the hashes of a piece of a container (a row group of a Parquet file, a run of a tar's members); and what was found
when an image was decoded: why it does not decode, or which values its pixels use. All facts of a data set are one more
fact, so that an unchanged one is found without a look-up per image.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import PIL
import torch
import xxhash
from PIL import Image
from torch.utils.data import Dataset

from xdm_ft.features.cache import Contents, contents_of
from xdm_ft.features.key import SCHEMA
from xdm_ft.image_files.files import ImageFiles
from xdm_ft.image_files.remote import is_remote, state_of
from xdm_ft.images import Container, ImageDataset, Pieces
from xdm_ft.images.decode import OF_THE_MACHINE, scan
from xdm_ft.images.facts import Extremes, Pixels, extremes, pixels
from xdm_ft.images.loader import FORKS, image_loader, iterate_batches
from xdm_ft.images.transforms import NotAStrip, Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import progress, pulse
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.storage import digest
from xdm_ft.storage.facts import WRITTEN, Facts, hash_file, regular_file, stamp
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
T = TypeVar("T")

READER_THREADS = 8  # more than cores: on a network disk most of the time is spent waiting
ROWS_PER_COMMIT = 1024  # at most so many hashes (and a piece's) are lost when a process is killed
ROWS_AT_ONCE = 1 << 14  # whose states a process looks at; the hash of the paths depends on it
DECODED_PER_COMMIT = 256
_NO_FILE = (-1, -1, -1)
_EMPTY_FILE = np.bytes_(xxhash.xxh3_128_digest(b""))


@dataclass(frozen=True)
class ListedImages:
    """Images that are hashed as those of a data set are: their paths, or bytes."""

    contents: Sequence[str | bytes]
    container: ClassVar[None] = None

    def __len__(self) -> int:
        return len(self.contents)

    def content(self, row: int) -> str | bytes:
        return self.contents[row]


_Hashable = ImageDataset | ListedImages


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
    dataset: _Hashable | None = None  # of the files
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
    dataset: _Hashable,
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
    facts, container = Facts(cache), dataset.container
    if container is not None and container.pieces is not None:
        digests = _hash_pieces(dataset, container, container.pieces, facts, show, equal_sizes_only, share)
        return FileHashes(digests, container=container)
    table = _table_key(dataset)
    if table is not None and (known := facts.find_list(table)) is not None:
        return FileHashes(_digests(known))
    hashes = file_states(dataset)
    rows = hashes.files
    if not len(rows):
        # the key once more: hashes of a table that changed meanwhile must not be kept under its old state
        if table is not None and not hashes.unreadable and table == _table_key(dataset):
            facts.add_list(table, hashes.digests.tobytes())
        return hashes
    if (known := facts.find_list(Facts.key("files", hashes.stamps.tobytes(), hashes.paths))) is not None:
        hashes.digests[rows] = _digests(known)
        return hashes

    wanted = rows[share[0] :: share[1]]
    if equal_sizes_only:
        _, size, files = np.unique(hashes.stamps[rows, 0], return_inverse=True, return_counts=True)
        wanted = rows[files[size] > 1]
    _hash_each(wanted.tolist(), hashes, facts, show)
    if len(wanted) == len(rows) == len(hashes.files):  # all were hashed, none proved unreadable
        facts.add_list(Facts.key("files", hashes.stamps.tobytes(), hashes.paths), hashes.digests[rows].tobytes())
    return hashes


def _digests(known: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(known), np.uint8).reshape(-1, 16)


def _table_key(dataset: _Hashable) -> bytes | None:
    """Returns the key of the hashes of a table's images. None: there is no table, or a file of it cannot be read."""
    if dataset.container is None:
        return None
    try:
        files = [[path, *stamp(regular_file(path))] for path in dataset.container.files]
    except OSError:
        return None
    return Facts.key("table", json.dumps([files, dataset.container.column, len(dataset)]).encode())


def _hash_each(rows: list[int], hashes: FileHashes, facts: Facts, show: bool) -> None:
    """Hashes the files of these rows into `hashes`, and adds every `ROWS_PER_COMMIT` new hashes to the index."""

    def key_of(row: int) -> bytes:
        return Facts.key("file", hashes.stamps[row].tobytes(), os.fsencode(hashes.path(row)))

    def hash_row(row: int) -> tuple[tuple[int, int, int], bytes] | str:
        try:
            return hash_file(hashes.path(row))
        except OSError as error:
            return _reason(error)

    keys = {row: key_of(row) for row in rows}
    known = facts.find(keys.values())
    for row, key in keys.items():
        hashes.digests[row] = np.frombuffer(known.get(key, bytes(16)), np.uint8)
    new = [row for row, key in keys.items() if key not in known]
    with ThreadPoolExecutor(READER_THREADS) as pool, progress("hashing", len(new), "images", show) as bar:
        for first in range(0, len(new), ROWS_PER_COMMIT):
            some, entries = new[first : first + ROWS_PER_COMMIT], dict[bytes, bytes]()
            for row, result in zip(some, pool.map(hash_row, some), strict=True):
                if isinstance(result, str):
                    hashes.stamps[row] = _NO_FILE
                    hashes.unreadable[row] = result
                else:
                    hashes.stamps[row], content = result
                    hashes.digests[row] = np.frombuffer(content, np.uint8)
                    entries[key_of(row)] = content
                bar.advance()
            facts.add(entries)


# ---- Pieces of containers: row groups of Parquet files, runs of a tar's members


def _hash_pieces(
    dataset: _Hashable,
    container: Container,
    pieces: Pieces,
    facts: Facts,
    show: bool,
    indexed_only: bool,
    share: tuple[int, int],
) -> np.ndarray:
    """Returns uint8 [N,16]; zeros where a hash is not known. `indexed_only`: reads no remote file.

    Raises `UserError` for a file that cannot be read, or has changed.
    """
    keys = list[bytes]()  # they change with the state of the piece's file
    for number, file in enumerate(pieces.file_of.tolist()):
        parts = [container.files[file], *pieces.states[file], container.column, pieces.in_file(number)]
        keys.append(Facts.key("piece", json.dumps([*parts, len(pieces.rows(number))]).encode()))

    digests, missing, known = np.zeros((len(dataset), 16), np.uint8), list[int](), facts.find(keys)
    begin, end = (len(keys) * part // share[1] for part in (share[0], share[0] + 1))
    for number, key in enumerate(keys):
        rows = pieces.rows(number)
        if key in known:
            digests[rows.start : rows.stop] = _digests(known[key])
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
                    raise UserError(f"{changed}: {WRITTEN}")
                runs = {keys[number]: pieces.rows(number) for number in uncommitted}
                facts.add({key: digests[run.start : run.stop].tobytes() for key, run in runs.items()})
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
    findings = _Findings(
        dataset, hashes, Facts(cache), what, lambda rows: scan(dataset, threads, check, show=False, rows=rows), show
    )
    # without an index no process would learn what the others found
    if accelerator is not None and accelerator.num_processes > 1 and findings.facts.path is not None:
        findings.read(part=accelerator.process_index, parts=accelerator.num_processes)
        wait_for_everyone(accelerator)  # the others' parts are in the index now, if it is the same one
    return hashes.unreadable_rows(findings.read())


def extremes_of(dataset: ImageDataset, hashes: FileHashes, cache: Path | None, show: bool) -> list[Extremes]:
    """Returns the extremes of all images wider than 8 bits. Reads only images that were not read before.

    Raises `UserError` for a file that changes meanwhile.
    """
    read = partial(_by_threads, partial(extremes, dataset))
    findings = _Findings(dataset, hashes, Facts(cache), {"what": "extremes"}, read, show)
    return [Extremes(*values) for values in findings.read().values()]


def pixels_of(
    dataset: ImageDataset, hashes: FileHashes, cache: Path | None, rows: np.ndarray, show: bool
) -> dict[int, Pixels]:
    """Returns {row: what its pixels use} of those of these rows that decode.

    Decodes only images that were not decoded before for this; of images without a hash nothing is remembered.
    """
    read, numbers = partial(_by_threads, partial(pixels, dataset)), hashes.images.number_of[rows]
    findings = _Findings(dataset, hashes, Facts(cache), {"what": "pixels"}, read, show)
    known = findings.read(np.unique(numbers[numbers >= 0]))
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
class _Findings:
    """What is found when images are decoded. It is kept in the index, so that each content is decoded once."""

    dataset: ImageDataset
    hashes: FileHashes
    facts: Facts
    what: Mapping[str, Any]  # determines the values, besides decoder and versions
    decode: Callable[[list[int]], Mapping[int, Any]]  # rows → {row: value, JSON-serialisable}; others have none
    show: bool

    def read(self, numbers: np.ndarray | None = None, part: int = 0, parts: int = 1) -> dict[int, Any]:
        """Returns {image: value} of these images, by default of all, that have one, in the order of `numbers`.

        Decodes those of which the index lacks it; of several parts only those of one."""
        images = self.hashes.images
        numbers = np.arange(len(images.rows)) if numbers is None else numbers
        versions = {"xdm_ft": __version__, "pillow": PIL.__version__}
        what = {"schema": SCHEMA, "decoder": self.dataset.decoder, "versions": versions, **self.what}
        kind = digest(json.dumps(what, sort_keys=True), bits=128)
        contents = images.contents[numbers].tobytes()
        whole = Facts.key(f"all {kind}", contents)
        if (known := self.facts.find_list(whole)) is not None:
            return {int(numbers[int(position)]): value for position, value in json.loads(known).items()}

        keys = [Facts.key(kind, contents[first : first + 16]) for first in range(0, len(contents), 16)]
        texts, of_part = self.facts.find(keys), range(len(keys) * part // parts, len(keys) * (part + 1) // parts)
        mine = [position for position in of_part if keys[position] not in texts]
        with progress("checking", len(mine), "images", self.show and len(mine) > 0) as bar:
            for first in range(0, len(mine), DECODED_PER_COMMIT):
                some = mine[first : first + DECODED_PER_COMMIT]
                rows = images.rows[numbers[some]].tolist()
                of_rows = self.decode(rows)
                if changed := self.hashes.changed_file(rows):
                    raise UserError(f"{changed}: this file was changed while images were checked; run again")
                values = (json.dumps(of_rows.get(row)).encode() for row in rows)  # null: there is none
                new = dict(zip((keys[position] for position in some), values, strict=True))
                self.facts.add(new)
                texts |= new
                bar.advance(len(some))
        found = {i: json.loads(texts[key]) for i, key in enumerate(keys) if texts.get(key, b"null") != b"null"}
        if len(texts) == len(keys):
            self.facts.add_list(whole, json.dumps(found).encode())
        return {int(numbers[position]): value for position, value in found.items()}


# ---- The states of files


def file_states(dataset: _Hashable) -> FileHashes:
    """Returns the states of all images that are files, and the hashes of those that are none.

    Most of that time is spent in Python, so processes divide a long list.
    """
    blocks = [range(first, min(first + ROWS_AT_ONCE, len(dataset))) for first in range(0, len(dataset), ROWS_AT_ONCE)]
    in_files = FORKS and len(blocks) > 1 and isinstance(dataset, ImageFiles | ListedImages)
    workers = min(own_cores(), len(blocks)) if in_files else 0  # a spawned one would import torch first
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

    dataset: _Hashable

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


def _absolute(path: str) -> str:
    return path if path.startswith(os.sep) else os.path.abspath(path)


def _reason(error: Exception) -> str:
    """Why a file cannot be read. Raises `error` again if the machine is at fault (too many open files, no memory)."""
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        raise error
    return (isinstance(error, OSError) and error.strerror) or str(error)
