"""The SQLite file of the hashes of images: `<cache>/index.sqlite`."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from xdm_ft.features.claims import file_mode, locked
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import UNFINISHED, disk_errors

logger = logging.getLogger("xdm_ft")
T = TypeVar("T")

WAIT_SECONDS = 60.0  # at most, for another process that writes to the index
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}  # the last: it has other tables
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS files"
    " (path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, xxh3_128 BLOB) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS pieces (key TEXT PRIMARY KEY, checksum TEXT, xxh3_128 BLOB) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS lists (key TEXT PRIMARY KEY, used REAL, checksum TEXT, xxh3_128 BLOB)",
)


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
        with locked(path.parent):
            if not path.exists():
                _create(path)
    # opened for each transaction: SQLite forbids using a connection in a forked process, such as a DataLoader worker
    with closing(sqlite3.connect(path, timeout=WAIT_SECONDS)) as index:
        index.execute("PRAGMA temp_store = MEMORY")
        with index:
            for table in _SCHEMA:
                index.execute(table)  # an empty file is a database without tables
            return work(index)


def _create(path: Path) -> None:
    """Makes an empty index under another name, and renames it: a change of the journal does not wait for others."""
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    with disk_errors(path):
        unfinished.unlink(missing_ok=True)  # of a killed process
        unfinished.touch(mode=0o600)
        with closing(sqlite3.connect(unfinished)) as index:
            index.execute("PRAGMA journal_mode = WAL")  # readers and a writer do not wait for each other
        unfinished.chmod(file_mode(path.parent))
        unfinished.replace(path)
