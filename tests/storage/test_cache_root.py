"""One process at a time, and arrays that are made once."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import Timeout

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import cache_root
from xdm_ft.storage.cache_root import one_at_a_time, remembered


@pytest.mark.slow
def test_one_process_is_in_at_a_time_however_long_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock, order = tmp_path / "a.lock", list[str]()
    monkeypatch.setattr(cache_root, "LOCK_SECONDS", 3.0)

    def second() -> None:
        with one_at_a_time(lock, "waiting for the first"):
            order.append("second")

    thread = threading.Thread(target=second)
    with caplog.at_level("INFO", logger="xdm_ft"):
        with one_at_a_time(lock):
            with pytest.raises(Timeout), one_at_a_time(lock, wait=False):
                pass
            thread.start()
            time.sleep(7)
            order.append("first")
        thread.join(30)
    assert order == ["first", "second"] and caplog.messages == ["waiting for the first"]
    assert not list(tmp_path.iterdir()), "no lock is left"


def killed_in(lock: Path) -> None:
    """Kills a process while it holds the lock."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with one_at_a_time(lock):
            os.write(write, b".")
            time.sleep(60)
    os.read(read, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert lock.exists()


def test_a_killed_holder_delays_others_on_another_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There nobody reports that it was killed: its lock is no longer touched."""
    lock = tmp_path / "a.lock"
    killed_in(lock)
    started = time.monotonic()
    with one_at_a_time(lock):
        assert time.monotonic() - started < 10 < cache_root.LOCK_SECONDS == 60, "docs/machines.md says so"
    monkeypatch.setattr(cache_root, "LOCK_SECONDS", 1.0)
    killed_in(lock)
    lines = lock.read_text().splitlines()
    lock.write_text("".join("host=elsewhere\n" if line.startswith("host=") else f"{line}\n" for line in lines))
    assert "host=elsewhere" in lock.read_text()
    started = time.monotonic()
    with one_at_a_time(lock):
        assert 0.7 < time.monotonic() - started < 30


def test_a_lock_file_without_an_owner_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be killed between making the file and writing its name; a disk may damage it."""
    monkeypatch.setattr(cache_root, "LOCK_SECONDS", 0.5)
    for content in (b"", b"\xff=\n", f"pid={10**20}\nhost={cache_root._this_host()}\n".encode()):
        (lock := tmp_path / "a.lock").write_bytes(content)
        with pytest.raises(Timeout), one_at_a_time(lock, wait=False):
            pass
        with one_at_a_time(lock):
            assert lock.read_text().startswith(f"pid={os.getpid()}\nhost=")
        assert not list(tmp_path.iterdir())


def test_a_lock_that_can_not_be_written_or_is_deleted_while_it_is_held(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone/a\.lock: cannot be written"), one_at_a_time(tmp_path / "gone/a.lock"):
        pass
    (tmp_path / "cache").mkdir()
    with one_at_a_time(tmp_path / "cache/a.lock"):
        shutil.rmtree(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_arrays_are_made_once_where_the_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = list[str]()

    def remember(key: str) -> list[int]:
        def make() -> dict[str, np.ndarray]:
            made.append(key)
            return {"rows": np.arange(5)}

        return remembered(key, make)["rows"].tolist()

    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "cache"))
    assert all(remember("a") == [*range(5)] for _ in range(3)) and made == ["a"]
    remember("b")
    for path in (tmp_path / "cache/indexes").glob("*.npz"):
        path.write_bytes(path.read_bytes()[:-30])
    assert remember("a") == [*range(5)] and made == ["a", "b", "a"] and "is damaged" in caplog.text

    def full(path: Path) -> None:  # the folder looks as if it could be written
        raise UserError(f"{path}: Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(cache_root, "one_at_a_time", full)
        assert remember("c") == [*range(5)] and made.pop() == "c"
    (tmp_path / "file").write_text("a file is no folder")
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "file"))
    assert [remember("a") for _ in range(2)] == 2 * [[*range(5)]] and made[3:] == ["a", "a"]
