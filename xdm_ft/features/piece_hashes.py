"""Hashes of images that are in pieces of large files: row groups of Parquet files, or runs of a tar's members."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from xdm_ft.containers.remote import is_remote, state_of
from xdm_ft.features.hash_index import run_on_index
from xdm_ft.images.dataset import Container, ImageDataset, Pieces
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import progress

ROWS_PER_COMMIT = 1024  # at least; at most so many hashes and a piece's are lost when a process is killed


def hash_pieces(
    dataset: ImageDataset,
    container: Container,
    cache: Path | None,
    show: bool,
    known_only: bool,
    share: tuple[int, int],
) -> np.ndarray:
    """Returns the hash of every image, uint8 [N,16], from the index or from the files; zeros where it is not known.

    New hashes are added to the index, if there is a `cache`. `known_only`: reads no remote file. `share` (i, n): reads
    the i-th of n parts. Raises `UserError` for a file that can not be read, or has changed.
    """
    pieces = container.pieces
    assert pieces is not None
    digests = np.zeros((len(dataset), 16), np.uint8)
    known = set[int]() if cache is None else run_on_index(cache, partial(_find, container=container, digests=digests))
    count, (part, parts) = len(pieces.ends), share
    mine = [n for n in range(count * part // parts, count * (part + 1) // parts) if n not in known]
    if known_only:
        mine = [n for n in mine if not is_remote(container.files[int(pieces.file_of[n])])]
    done = list[int]()
    with progress("hashing", sum(len(pieces.rows(n)) for n in mine), "images", show) as bar:
        for number in mine:
            rows = pieces.rows(number)
            for row in rows:
                content = dataset.content(row)
                assert isinstance(content, bytes), "an image of a piece is no file"
                digests[row] = np.frombuffer(xxhash.xxh3_128_digest(content), np.uint8)
            bar.advance(len(rows))
            done.append(number)
            if rows.stop - pieces.rows(done[0]).start >= ROWS_PER_COMMIT or number == mine[-1]:
                _refuse_changed(container, done)
                if cache is not None:
                    run_on_index(cache, partial(_insert, container=container, digests=digests, numbers=done))
                done = []
    return digests


def changed_container(container: Container, rows: np.ndarray) -> str | None:
    """Returns the first file of these rows that has changed since its pieces were counted; None if none has."""
    assert container.pieces is not None
    return _changed(container, container.pieces.of_row(rows))


def _changed(container: Container, numbers: Iterable[int] | np.ndarray) -> str | None:
    pieces = container.pieces
    assert pieces is not None
    for file in np.unique(pieces.file_of[np.asarray(numbers, np.int64)]).tolist():
        if state_of(container.files[file]) != pieces.states[file]:
            return container.files[file]
    return None


def _refuse_changed(container: Container, numbers: list[int]) -> None:
    changed = _changed(container, numbers)
    if changed is not None:
        raise UserError(
            f"{printable(changed)}: another program is writing to this file; run again when the data are complete"
        )


def _keys(container: Container, pieces: Pieces, numbers: Iterable[int]) -> list[str]:
    """Returns what each piece is remembered under: it changes with the state of its file."""
    found = list[str]()
    for number in numbers:
        file = int(pieces.file_of[number])
        about = [container.files[file], *pieces.states[file], container.column]
        text = json.dumps([*about, pieces.in_file(number), len(pieces.rows(number))])
        found.append(xxhash.xxh3_128_hexdigest(text.encode()))
    return found


def _find(index: sqlite3.Connection, container: Container, digests: np.ndarray) -> set[int]:
    """Fills in the digests of the pieces in the index, and returns their numbers."""
    pieces, known = container.pieces, set[int]()
    assert pieces is not None
    for number, key in enumerate(_keys(container, pieces, range(len(pieces.ends)))):
        found = index.execute("SELECT checksum, xxh3_128 FROM pieces WHERE key = ?", (key,)).fetchone()
        rows = pieces.rows(number)
        if found is not None and len(found[1]) == 16 * len(rows) and xxhash.xxh3_64_hexdigest(found[1]) == found[0]:
            digests[rows.start : rows.stop] = np.frombuffer(found[1], np.uint8).reshape(-1, 16)
            known.add(number)
    return known


def _insert(index: sqlite3.Connection, container: Container, digests: np.ndarray, numbers: list[int]) -> None:
    assert container.pieces is not None
    rows = (container.pieces.rows(number) for number in numbers)
    contents = [digests[some.start : some.stop].tobytes() for some in rows]
    keys = _keys(container, container.pieces, numbers)
    found = [(key, xxhash.xxh3_64_hexdigest(one), one) for key, one in zip(keys, contents, strict=True)]
    index.executemany("INSERT OR REPLACE INTO pieces VALUES (?, ?, ?)", found)
