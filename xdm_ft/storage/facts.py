"""Facts about files, in an index: what took long to read of a file that has not changed since."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import xxhash

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import disk_errors, file_mode, is_writable

logger = logging.getLogger("xdm_ft")
T = TypeVar("T")

INDEX = "index.sqlite"  # of hashes, beside the stores of features, see `features/hashes.py`
READ_BYTES = 1 << 22
KEPT_LISTS = 64  # facts of whole data sets, that were used last; hashes take 16 bytes per image
SECONDS_FOR_INDEX = 60.0  # at most, for another process that writes to the index
WRITTEN = "another program is writing to this file; run again when the data are complete"


class Facts:
    """The index in the folder of the cache. Without a folder that can be written it stays empty.

    A damaged index is deleted, as it only saves time. `setting` names the folder in messages. Raises `UserError` if it
    cannot be written.
    """

    tables = (
        # used: seconds since 1970, of facts of whole data sets, of which KEPT_LISTS are kept
        "CREATE TABLE IF NOT EXISTS facts (key BLOB PRIMARY KEY, used REAL, fact BLOB) WITHOUT ROWID",
        "CREATE INDEX IF NOT EXISTS lists ON facts (used) WHERE used NOT NULL",
    )

    def __init__(self, cache: Path | None, name: str = INDEX, setting: str = "features.dir") -> None:
        self.path = cache / name if cache is not None and is_writable(cache) else None
        self.setting = setting

    @staticmethod
    def key(kind: str, *parts: bytes) -> bytes:
        """Returns the key of a fact: a hash of all that determines it."""
        return xxhash.xxh3_128_digest(b"".join((kind.encode(), *parts)))

    def find(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Returns {key: fact} of those that are known and undamaged."""
        query = "SELECT CAST(fact AS BLOB) FROM facts WHERE key = ? AND fact NOT NULL"

        def work(index: sqlite3.Connection) -> dict[bytes, bytes]:
            found = {}
            for key in sorted(keys):  # in the order of the table, whose pages are read once
                for (sealed,) in index.execute(query, (key,)):
                    if sealed == _sealed(key, sealed[8:]):
                        found[key] = sealed[8:]
            return found

        return self._run(work, {})

    def find_list(self, key: bytes) -> bytes | None:
        """Returns a fact of a whole data set."""
        if (fact := self.find([key]).get(key)) is not None:
            used = time.time(), key
            self._run(lambda index: index.execute("UPDATE facts SET used = ? WHERE key = ?", used), None)
        return fact

    def add(self, facts: Mapping[bytes, bytes]) -> None:
        rows = [(key, None, _sealed(key, facts[key])) for key in sorted(facts)]
        self._run(lambda index: index.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", rows), None)

    def add_list(self, key: bytes, fact: bytes) -> None:
        """Adds a fact of a whole data set, and removes those that were not used for longest."""

        def work(index: sqlite3.Connection) -> None:
            index.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (key, time.time(), _sealed(key, fact)))
            last = "SELECT used FROM facts WHERE used NOT NULL ORDER BY used DESC LIMIT 1 OFFSET ?"
            index.execute(f"DELETE FROM facts WHERE used <= ({last})", (KEPT_LISTS,))

        self._run(work, None)

    def _run(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Returns what `work` returns, run in one transaction; `otherwise` if there is no index."""
        if self.path is None:
            return otherwise
        path, full = self.path, f"set {self.setting} to another"
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
            # SQLITE_ERROR: it has another table of this name
            if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
                raise
            logger.warning("%s is damaged (%s): reading the files again", path, error)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return self._transaction(path, work)

    def _transaction(self, path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
        if not path.exists():
            with disk_errors(path):
                path.touch(file_mode(path.parent))
                path.chmod(file_mode(path.parent))  # whatever the umask is
        # opened for each transaction: SQLite forbids using a connection in a forked process, such as a loader's worker
        with closing(sqlite3.connect(path, timeout=SECONDS_FOR_INDEX)) as index, index:
            with suppress(sqlite3.OperationalError):  # it does not wait for another process, which does the same
                index.execute("PRAGMA journal_mode = WAL")  # readers and a writer do not wait
            for table in self.tables:
                index.execute(table)
            return work(index)


def _sealed(key: bytes, fact: bytes) -> bytes:
    """Returns the fact behind a checksum."""
    return xxhash.xxh3_64_digest(key + fact) + fact


def hash_file(path: str) -> tuple[tuple[int, int, int], bytes]:
    """Returns the `stamp` and the xxh3_128 of a file. Raises `UserError` if another program writes to it."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        before = stamp(os.fstat(file.fileno()))
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
        if stamp(os.fstat(file.fileno())) != before:
            raise UserError(f"{path}: {WRITTEN}")
    return before, hasher.digest()


def stamp(status: os.stat_result) -> tuple[int, int, int]:
    """Returns the state of a file by which a change is noticed: size, times of modification and status change in ns."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def regular_file(path: str) -> os.stat_result:
    """Returns the status of a file. Raises `ValueError` if it is not a regular one, or `OSError`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")  # opening a pipe would block for ever
    return status
