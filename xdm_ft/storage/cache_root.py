"""The folder of the cache: where it is, its locks, and arrays that took long to make, which are kept in it."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread, get_ident

import numpy as np
from filelock import Timeout
from psutil import pid_exists

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage import digest
from xdm_ft.storage.atomic import ON_WINDOWS, disk_errors, file_mode, is_writable, replace_file
from xdm_ft.storage.names import expand_user

logger = logging.getLogger("xdm_ft")
_Arrays = Mapping[str, np.ndarray]

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path of s3://bucket has one slash
LOCK_SECONDS = 60.0  # without a sign of life, after which a process of another machine counts as killed
POLL_SECONDS = 0.2


def cache_root(folder: Path | None = None) -> Path:
    """Returns the folder of the cache: `folder`, $XDM_FT_CACHE or the default. Raises `UserError` for an address."""
    path = folder or os.environ.get("XDM_FT_CACHE") or "~/.cache/xdm_ft/features"
    if REMOTE.match(str(path)):
        key = "XDM_FT_CACHE" if folder is None else "features.dir"
        raise UserError(
            f"{key}: {path} is an address; the cache needs a file system with locks and atomic renames: "
            "name a folder of this machine or of a shared disk"
        )
    return expand_user(path, "features.dir")


@contextmanager
def one_at_a_time(path: Path, waiting: str = "", wait: bool = True) -> Iterator[None]:
    """Context that one process is in at a time, of those that see the lock file `path`.

    A killed process delays others on its machine by nothing, and on other machines by `LOCK_SECONDS` at most: the lock
    is a file that its holder touches, so that a file system needs no locks of its own. A process that was paused for
    longer, or whose machine was, may find itself here together with another one. Whoever must wait logs `waiting`; not
    `wait`: raises `filelock.Timeout`. Raises `UserError` if the file cannot be written.

    Not for a run directory or the file of a prediction, where two processes would do harm: their locks are of the
    system, and hold however long a process is paused. A training that a process takes (`RunDirectory.claim`) is no
    lock: it stays taken when it is finished.
    """
    with disk_errors(path):
        watched = Watched()
        if (held := _lock(path, watched)) is None:
            if not wait:
                raise Timeout(str(path))
            if waiting:
                logger.info("%s", waiting)
            with pulse.waiting():
                while (held := _lock(path, watched)) is None:
                    time.sleep(POLL_SECONDS)
    released = Event()

    def touch() -> None:
        while not released.wait(LOCK_SECONDS / 3):
            with suppress(OSError):  # of a disk that is away for a moment
                os.utime(held if os.utime in os.supports_fd else path)

    thread = Thread(target=touch, name=f"touches {path}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()
        with suppress(OSError):  # the folder is gone, or another process took the lock from this one, which was paused
            is_held = os.path.samestat(os.fstat(held), path.stat())
            if ON_WINDOWS:
                os.close(held)
            if is_held:
                path.unlink()
        if not ON_WINDOWS:
            os.close(held)


@dataclass
class Watched:
    """A lock of another process, as it is watched by one that waits for it."""

    state: tuple[int, int] = (0, 0)  # inode and time of the last touch
    since: float = 0.0  # by the clock of this process, as those of machines differ


def _this_host() -> str:
    """Returns the name of this machine, and of the container, which has processes of its own."""
    container = Path("/proc/self/ns/pid")
    return socket.gethostname() + (f" {os.readlink(container)}" if container.is_symlink() else "")


def _lock(path: Path, watched: Watched) -> int | None:
    """Returns an open handle of the lock file, made for this process; None: another one has it, and may be alive."""
    _remove_lock_of_dead(path, watched)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return None
    try:
        os.write(handle, f"pid={os.getpid()}\nhost={_this_host()}\n".encode())
    except OSError:  # of a full disk
        path.unlink()
        os.close(handle)
        raise
    with suppress(OSError):  # some file systems have no modes
        path.chmod(file_mode(path.parent))  # whatever the umask is
    return handle


def _remove_lock_of_dead(path: Path, watched: Watched) -> None:
    with (
        suppress(FileNotFoundError),
        path.open(encoding="utf-8", errors="replace") as file,
    ):  # open: no other file gets its inode number
        owner = dict(line.partition("=")[::2] for line in file.read(1000).splitlines())
        state = os.fstat(file.fileno())
        if watched.state != (state.st_ino, state.st_mtime_ns):
            watched.state, watched.since = (state.st_ino, state.st_mtime_ns), time.monotonic()
        here = owner.get("host") == _this_host() and re.fullmatch(r"\d{1,9}", owner.get("pid", ""))
        dead = here and not pid_exists(int(owner["pid"]))
        if dead or time.monotonic() - watched.since > LOCK_SECONDS:
            aside = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.unfinished")
            if ON_WINDOWS:
                file.close()
            path.rename(aside)
            # another process that waits was faster, and has the lock now
            if not os.path.samestat(aside.stat(), state):
                aside.rename(path)
            else:
                aside.unlink()


def remembered(key: str, make: Callable[[], _Arrays]) -> _Arrays:
    """Returns what `make` returned for this key, or returns now. `key` names all that the arrays depend on.

    Of processes that ask at once, one makes them and the others wait. A folder that cannot be written remembers
    nothing.
    """
    path = cache_root() / "indexes" / f"{digest(key, bits=128)}.npz"
    if (arrays := _read(path)) is not None:
        return arrays
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.debug("%s: %s", path.parent, error)
    with ExitStack() as alone:
        if is_writable(path.parent):
            try:
                alone.enter_context(one_at_a_time(path.with_suffix(".lock")))
            except UserError as error:  # a full disk, which the mode of the folder does not show
                logger.debug("%s", error)
        # another process may have made them while this one waited for the lock
        if (arrays := _read(path)) is not None:
            return arrays
        made = make()

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:  # a path would get the suffix .npz
                np.savez_compressed(file, allow_pickle=False, **made)

        try:
            # a full disk is no fault here: the arrays are at hand, and the next process makes them again
            replace_file(path, write)
        except UserError as error:
            logger.debug("%s", error)
    return made


def _read(path: Path) -> _Arrays | None:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}  # each has a checksum, which is verified
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("%s is damaged (%s): making it again", path, error)
        return None
