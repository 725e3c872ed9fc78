"""Files on this machine or, by fsspec, at an address: `https://…`, `s3://…`, `gs://…`, `hf://…`."""

from __future__ import annotations

import glob
import logging
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from xdm_ft.image_files.files import first_pattern
from xdm_ft.images import FileState
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.names import expand_user

logger = logging.getLogger("xdm_ft")
T = TypeVar("T")

ATTEMPTS = 3
SECONDS_BETWEEN = 1.0  # before the second attempt; twice as long before the third
SECONDS_OF_SILENCE = 60.0  # after which a server counts as not answering
REQUESTS_AT_ONCE = 16
# in fsspec's description of a file: what changes with its content, else the time of the last change
VERSIONS = ("ETag", "etag", "blob_id", "Last-Modified", "LastModified", "last_modified", "updated", "mtime")


def is_remote(address: str) -> bool:
    return "://" in address


def state_of(address: str) -> FileState:
    """Returns the state of a file. Raises `UserError`, one line, if there is none."""
    if not is_remote(address):
        try:
            status = os.stat(address)
        except OSError as error:
            raise UserError(f"{address}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{address}: is not a regular file")  # opening a pipe would block for ever
        return FileState(status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}")

    def describe() -> dict[str, Any]:
        system, path = _system(address)
        system.invalidate_cache()  # else it may describe the file as it was
        info: dict[str, Any] = system.info(path)
        # each piece would else be a download of the whole file
        if info.get("partial") is False:
            raise ValueError("no range requests")
        return info

    info = attempt(address, describe)
    version = next((f"{key} {info[key]}" for key in VERSIONS if info.get(key)), None)
    if info.get("size") is None:
        raise UserError(f"{address}: the server does not say how large the file is; copy it to a server that does")
    if version is None:
        raise UserError(
            f"{address}: the server gives neither an ETag nor a time of modification, so a changed file would go "
            "unnoticed; copy it to a server that gives one"
        )
    return FileState(int(info["size"]), version)


def open_file(address: str, state: FileState, block_bytes: int = 0) -> BinaryIO:
    """Returns the file opened for reading, unbuffered, or in blocks of that many bytes. Raises `UserError`, one line.

    What is read of a remote file is requested from its server, in up to `ATTEMPTS` attempts.
    """
    if not is_remote(address):
        try:
            return open(address, "rb", buffering=block_bytes)
        except OSError as error:
            raise UserError(f"{address}: cannot be read: {error.strerror}; check the disk") from error
    options = {"cache_type": "readahead", "block_size": block_bytes} if block_bytes else {"cache_type": "none"}

    def request() -> Any:
        system, path = _system(address)
        # with the size that is known: fsspec would ask the server for it at each opening
        return system.open(path, "rb", size=state.size, **options)

    file = attempt(address, request)
    if hasattr(file, "cache"):  # not those of this machine
        fetch = file.cache.fetcher
        # so a lost connection costs one range, not all that was read before
        file.cache.fetcher = lambda start, stop: attempt(address, lambda: fetch(start, stop))
    return file


def read_range(address: str, state: FileState, start: int, stop: int) -> bytes:
    """Returns the bytes start…stop−1 of a file. Raises `UserError`, one line, if that fails."""
    try:
        with open_file(address, state) as file:
            file.seek(start)
            content = file.read(stop - start)
    except OSError as error:
        raise UserError(f"{address}: cannot be read: {error.strerror}; check the disk") from error
    if len(content) != stop - start:
        raise UserError(f"{address}: ends before byte {stop}: it is damaged, or was changed; run again")
    return content


def list_files(file: str, suffix: str, deep: bool) -> list[str]:
    """Returns the files that a file, folder or glob names, sorted; an address or an absolute path each.

    Of a folder those that end with `suffix` and are not hidden, `deep`: of the folders in it too; none: []. A name such
    as run[1] is a glob only if nothing has this name. Raises `UserError`.
    """
    if not is_remote(file):
        path = expand_user(file, "data.file")
        if path.is_dir():
            # hidden: of 0.tar macOS may leave a ._0.tar, which is none
            return sorted(map(str, path.absolute().glob(f"{'**/' * deep}[!.]*{suffix}")))
        parts = str(path).split("/")
        fixed = first_pattern(parts)
        names = glob.glob("/".join([*map(glob.escape, parts[:fixed]), *parts[fixed:]]), recursive=deep)
        if not names:
            raise UserError(f"data.file: {file} does not exist; name a {suffix} file or a folder of them")
        return sorted(str(Path(name).absolute()) for name in names)

    def addresses() -> list[str]:
        system, path = _system(file)
        if "*" in file or ("[" in file and not system.exists(path)):
            names = system.glob(path)
        elif file.endswith(suffix):
            return [file]
        else:
            names = system.find(path) if deep else system.ls(path, detail=False)
        return sorted({str(system.unstrip_protocol(name)) for name in names if _is_shown(str(name), suffix)})

    return attempt(file, addresses)


def _is_shown(path: str, suffix: str) -> bool:
    return path.endswith(suffix) and not path.rsplit("/", 1)[-1].startswith(".")


def attempt(address: str, read: Callable[[], T]) -> T:
    """Returns what `read` returns, of three attempts. Raises `UserError`, one line that begins with the address."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            value = read()
            pulse.beat()
            return value
        except UserError:
            raise
        except Exception as error:  # the libraries behind fsspec raise nearly any type
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            problem = _lasting_problem(cause)
            if problem is None and attempt < ATTEMPTS:
                logger.debug("%s: attempt %d failed: %r", address, attempt, cause)
                time.sleep(SECONDS_BETWEEN * attempt)
                continue
            if problem is None:
                reason = " ".join(printable(f"{type(cause).__name__}: {cause}").split())[:200]
                if isinstance(cause, TimeoutError):
                    reason = f"no answer for {SECONDS_OF_SILENCE:g} s"
                problem = f"cannot be read in {ATTEMPTS} attempts ({reason}); check the address and the network"
            raise UserError(f"{address}: {problem}") from error
    raise AssertionError("the last attempt returns or raises")


def _lasting_problem(error: BaseException) -> str | None:
    """Returns why another attempt would fail too, and what to do; None: it may succeed."""
    response = getattr(error, "response", None)  # aiohttp, the Hugging Face hub and botocore keep the status apart
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "does not exist; check the address"
    if isinstance(error, PermissionError) or status in (401, 403):
        return "the server denies access; check the address and your credentials"
    if isinstance(error, ImportError):
        return f"its file system is not installed ({error}); pip install 'xdm_ft[remote]'"
    if isinstance(error, ValueError) and "range requests" in str(error):
        return "the server cannot send a part of a file; copy it to a server that can, or to this machine"
    if isinstance(error, ValueError) and "Protocol" in str(error):
        return "this kind of address is unknown; use https://, s3://, gs:// or hf://"
    return None


def _system(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system for an address, and the path in it.

    fsspec keeps one per process: that of a process does not work in the processes that are forked from it.
    """
    from fsspec.core import url_to_fs

    if not address.startswith(("http://", "https://")):
        return url_to_fs(address)
    import aiohttp

    silence = aiohttp.ClientTimeout(total=None, sock_connect=SECONDS_OF_SILENCE, sock_read=SECONDS_OF_SILENCE)
    return url_to_fs(address, client_kwargs={"timeout": silence})


# ---- The hub

SECONDS_TO_ANSWER = 5.0  # of the hub or another server, to say that it is there; a download may take any time
SECONDS_ANSWER_HOLDS = 60.0
_HUB = threading.RLock()
_NO_ANSWER: dict[str, tuple[float, str]] = {}  # address → when it was asked, why there was no answer ("": there was)


def no_answer(address: str) -> str:
    """Returns why a server does not answer; "" if it does. It is asked once, in all of its name's resolution too."""
    import urllib.request

    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.utils import get_session

    asked, reason = _NO_ANSWER.get(address, (-math.inf, ""))
    if time.monotonic() - asked < SECONDS_ANSWER_HOLDS:
        return reason
    reasons = [f"no answer within {SECONDS_TO_ANSWER:g} s"]

    def ask() -> None:
        try:
            if address == ENDPOINT:  # as the hub's library does: proxies, certificates
                status = get_session().head(address, timeout=SECONDS_TO_ANSWER).status_code
            else:
                with urllib.request.urlopen(
                    urllib.request.Request(address, method="HEAD"), timeout=SECONDS_TO_ANSWER
                ) as answer:
                    status = answer.status
            reasons.append(f"status {status}" if status >= 500 else "")
        except urllib.request.HTTPError as error:  # it answers
            reasons.append(f"status {error.code}" if error.code >= 500 else "")
        except Exception as error:  # of each library its own
            cause = getattr(error, "reason", error)
            if "Timeout" not in type(cause).__name__:  # that is no answer
                reasons.append(" ".join(str(cause).split())[:80] or type(cause).__name__)

    thread = threading.Thread(target=ask, daemon=True)  # to look up a name has no time limit
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    _NO_ANSWER[address] = time.monotonic(), reasons[-1]
    return reasons[-1]


def known_answer(address: str) -> str:
    """Returns which server was found not to answer, and why; "": none. `address`: of a server, or a name on the hub."""
    from huggingface_hub.constants import ENDPOINT

    server = address if is_remote(address) else ENDPOINT
    _, reason = _NO_ANSWER.get(server, (0.0, ""))
    return reason and f"{urlsplit(server).netloc}: {reason}"


@contextmanager
def hub(address: str | None = "") -> Iterator[None]:
    """Context in which libraries read files of the hub, from its cache alone if the hub does not answer.

    They would try each file again and again, for a minute, with a line for each try. `address`: None or a folder,
    for which the hub is not asked, or an address on another server. Raises `ConnectionError` if that server does not
    answer, and `UserError` if the home folder is unknown and the hub's cache is in it.
    """
    from huggingface_hub import constants

    expand_user(constants.HF_HUB_CACHE, "HF_HOME")
    messages, level = logging.getLogger("huggingface_hub"), logging.getLogger("huggingface_hub").level
    if address is not None and is_remote(address) and (reason := no_answer(address)):
        raise ConnectionError(reason)
    is_elsewhere = (
        address is None
        or is_remote(address)
        or address.startswith("local-dir:")
        or (address and Path(address).exists())
    )
    with _HUB, ExitStack() as undo:
        if not (is_elsewhere or constants.HF_HUB_OFFLINE) and no_answer(constants.ENDPOINT):
            undo.callback(setattr, constants, "HF_HUB_OFFLINE", False)
            constants.HF_HUB_OFFLINE = True
            if (of_data := sys.modules.get("datasets")) is not None:
                undo.callback(setattr, of_data.config, "HF_HUB_OFFLINE", of_data.config.HF_HUB_OFFLINE)
                of_data.config.HF_HUB_OFFLINE = True
        undo.callback(messages.setLevel, level)
        messages.setLevel(logging.CRITICAL)
        yield
