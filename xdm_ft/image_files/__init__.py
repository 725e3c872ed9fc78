"""Files that hold many images, or say things of them: tables, Parquet, tars, trees of folders.

Here: a piece of a file (a row group, a run of a tar's members) is read at once, and kept for a while.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from xdm_ft.image_files.remote import REQUESTS_AT_ONCE, FileState, is_remote, state_of
from xdm_ft.images import Container, Pieces
from xdm_ft.images.decode import EncodedImages, FaultInLoader
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import progress

T = TypeVar("T")
FILES_AT_ONCE = 4
KEPT = 2  # values at least, whatever their size: threads that read a batch may be on both sides of a border
FOOTER_BYTES = 2**24  # of the footers of Parquet files that are kept; in memory they take several times as much
AHEAD = 2  # pieces of a remote file that are read before they are needed

CacheSize = Annotated[
    int,
    Field(
        ge=1,
        description="MB of memory per process that reads images, to keep the row groups (tar: runs of members) that it "
        "read last",
    ),
]


class RecentlyUsed(Generic[T]):
    """The values that were used last: of at most `limit` bytes together, or `KEPT` of them. Threads may share them."""

    def __init__(self, limit: int, size: Callable[[T], int]) -> None:
        self.limit, self.size = limit, size
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Future[T]] = OrderedDict()
        self._bytes: dict[Hashable, int] = {}  # of the values that are loaded

    def __contains__(self, key: Hashable) -> bool:
        """Whether the value is here, or is being loaded."""
        return key in self._values

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """Returns the value of the key, from `load` if it is not here. Threads that ask at once wait for one `load`."""
        with self._lock:
            is_new = key not in self._values
            value = self._values.setdefault(key, Future())
            self._values.move_to_end(key)
        if not is_new:
            return value.result()
        try:
            loaded = load()
        except BaseException as error:
            with self._lock:
                del self._values[key]
            value.set_exception(error)
            raise
        value.set_result(loaded)
        with self._lock:
            self._bytes[key] = self.size(loaded)
            for oldest in [key for key in self._values if key in self._bytes]:
                if len(self._bytes) <= KEPT or sum(self._bytes.values()) <= self.limit:
                    break
                del self._values[oldest], self._bytes[oldest]
        return loaded


class PiecedImages(EncodedImages):
    """The images of `container`, row after row. Each process keeps the pieces that it read last, of `cache_mb` MB."""

    container: Container
    pieces: Pieces  # of the container
    cache_mb: int
    _memory: _Memory | None = None
    _beginning = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled has read nothing yet."""
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    @abstractmethod
    def read_piece(self, number: int) -> list[bytes]:
        """Reads a piece from its file. Threads call it at the same time. Raises `UserError`."""

    def content(self, row: int) -> bytes:
        """Returns the bytes of an image: its piece is read, unless it is kept.

        In a process that reads a remote file alone, piece after piece, the next ones are read ahead.
        """

        def piece(number: int) -> list[bytes]:
            def load() -> list[bytes]:
                with in_loader():
                    return self.read_piece(number)

            return memory.kept.get(number, load)

        memory, number = self.memory, int(self.pieces.of_row(row))
        is_next = number != memory.last and number - 1 in memory.kept
        memory.last = number
        images = piece(number)
        if is_next and memory.reads_ahead and is_remote(self.container.files[int(self.pieces.file_of[number])]):
            # else what is read ahead would push out pieces before they are needed
            is_small = (AHEAD + KEPT) * sum(map(len, images)) <= memory.kept.limit
            last = min(number + AHEAD, len(self.pieces.ends) - 1) if is_small else number
            for following in range(number + 1, last + 1):
                if following not in memory.kept:
                    memory.threads.submit(piece, following)
        return images[row - self.pieces.rows(number).start]

    @property
    def memory(self) -> _Memory:
        """What this process has read: a forked one begins anew, as locks and threads do not survive a fork."""
        if self._memory is None or self._memory.process != os.getpid():
            with self._beginning:  # threads that ask first must not each begin
                if self._memory is None or self._memory.process != os.getpid():
                    self._memory = _Memory(self.cache_mb * 10**6)
        return self._memory


@contextmanager
def in_loader() -> Iterator[None]:
    """Context for what workers of a loader may do: a `UserError` stays one line."""
    try:
        yield
    except UserError as error:
        raise FaultInLoader(str(error)) from error


def open_files(files: Sequence[str], read: Callable[[str, FileState], T]) -> tuple[tuple[FileState, ...], list[T]]:
    """Returns the state of every file, and what `read` returns of it. Some are read at the same time."""
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        states = tuple(pool.map(state_of, files))
    show, values = os.environ.get("RANK", "0") == "0", list[T]()
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool, progress("opening", len(files), "files", show) as bar:
        for value in pool.map(read, files, states):
            values.append(value)
            bar.advance()
    return states, values


class _Memory:
    """The pieces that one process keeps, and the threads that read ahead."""

    def __init__(self, limit: int) -> None:
        from torch.utils.data import get_worker_info

        self.process, self.last = os.getpid(), -1
        self.kept = RecentlyUsed[list[bytes]](limit, lambda piece: sum(map(len, piece)))
        self.footers = RecentlyUsed[Any](FOOTER_BYTES, lambda footer: int(footer.serialized_size))
        # processes that divide the images skip what others read
        self.reads_ahead = get_worker_info() is None and os.environ.get("WORLD_SIZE", "1") == "1"
        self.threads = ThreadPoolExecutor(AHEAD, "reading ahead")  # it starts none before there is work
