"""Loader workers: they end with their parent, and their death is one line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from xdm_ft.images.loader import image_loader, iterate_batches
from xdm_ft.runtime.errors import UserError

CPU = torch.device("cpu")


class Rows(Dataset[int]):
    """Row 5 ends its worker by `number`, or raises `error`."""

    def __init__(self, number: int | None = None, error: Exception | None = None) -> None:
        self.number, self.error = number, error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        if row == 5 and self.number is not None:
            os.kill(os.getpid(), self.number)
        if row == 5 and self.error is not None:
            raise self.error
        return row


@pytest.fixture(autouse=True)
def quickly_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    # an earlier test may have left torch's handler
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV])
def test_a_worker_that_dies_is_one_line(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    loader = image_loader(Rows(number), 2, CPU, batch_size=1)
    with pytest.raises(UserError, match=r"^key: a process that reads images died, .* is full; do this$"):
        for _ in iterate_batches(loader, "key", "do this"):
            until = time.monotonic() + 0.1
            while time.monotonic() < until:  # the consumer's own work, in which nothing must be raised
                sum(range(100))


class SlowToEnd(Rows):
    """The worker of row 5 closes its pipes a moment before it dies. Meanwhile row 4 raises what that can cause."""

    def __getitem__(self, row: int) -> int:
        if row == 4:
            time.sleep(0.3)
            raise ConnectionResetError(104, "Connection reset by peer")
        if row == 5:
            os.closerange(3, 1000)
            time.sleep(0.6)
            os.kill(os.getpid(), signal.SIGKILL)
        return row


def test_a_worker_whose_pipes_are_closed_before_it_is_dead() -> None:
    with pytest.raises(UserError, match="a process that reads images died"):
        list(iterate_batches(image_loader(SlowToEnd(), 2, CPU, batch_size=1), "key", "do this"))


def test_an_error_of_the_data_stays_what_it_is() -> None:
    for workers in (0, 2):
        with pytest.raises(FileNotFoundError, match="gone"):
            list(iterate_batches(image_loader(Rows(error=FileNotFoundError("gone")), workers, CPU), "key", "do this"))


@pytest.mark.parametrize("error", [ConnectionResetError(104, "pid 7"), EOFError(), RuntimeError("exited")])
def test_after_a_stop_request_an_error_ends_the_batches(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    loader = image_loader(Rows(error=error), 0, CPU, batch_size=None)
    with pytest.raises(type(error)):
        list(iterate_batches(loader, "key", "do this"))
    monkeypatch.setattr("xdm_ft.images.loader.stop_requested", lambda: True)
    assert list(iterate_batches(loader, "key", "do this")) == [0, 1, 2, 3, 4]


class Waits(Dataset[int]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        (self.folder / str(os.getpid())).touch()
        time.sleep(60)
        return row


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        list(iterate_batches(image_loader(Waits(tmp_path), 2, CPU, batch_size=1), "key", "do this"))
        os._exit(0)
    until = time.monotonic() + 120
    while len(workers := [int(path.name) for path in tmp_path.iterdir()]) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until = time.monotonic() + 120
    while not all(map(has_ended, workers)):
        assert time.monotonic() < until
        time.sleep(0.02)
