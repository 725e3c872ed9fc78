"""Work in forked processes, and one bar for all: pieces that any process has finished, steps of this one's forks."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from xdm_ft.experiment import work as module
from xdm_ft.experiment.work import NOTHING, RunProgress, Work, run_forked
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import Progress
from xdm_ft.storage.run_directory import RunDirectory

PIECES = {"a": Work(2, 40), "b": Work(1, 60)}


def made(directory: RunDirectory, done: Work = NOTHING, processes: int = 1, shows: bool = True) -> RunProgress:
    return RunProgress("training", PIECES, done, directory, processes, shows)


def test_what_an_earlier_run_did_is_no_part_of_the_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(tmp_path)
    with made(directory, done=Work(3, 100)) as run:
        run.started -= 30.0
        with run.of_piece("b", "erm (2 models)", 20) as part:
            part.skip(5)  # steps of a checkpoint
            part.advance(10, "loss 0.5")
        assert (run.resumed[0], run.begun[0]) == (15.0, 0.0)
        with run.of_piece("b", "erm (2 models)", 20) as part:
            part.advance(10, "loss 0.5")
            caplog.set_level(logging.INFO, "xdm_ft")
            run._last = float("-inf")
            run.show()
    # 130 of 200 are done, 15 of them now in 30 s: 70 more take 140 s
    assert caplog.messages[0] == "training: 65%, 3 of 6 models, about 2 min left, now erm (2 models), loss 0.5"


def test_any_process_finishes_a_piece(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "xdm_ft")
    monkeypatch.setattr(module, "LOG_EVERY_SECONDS", 0.0)
    main, other = RunDirectory(tmp_path), RunDirectory(tmp_path, "1", main=False)
    with made(main) as run, made(other, shows=False) as hidden:
        with hidden.of_piece("a", "erm", 10) as part:
            part.advance(10)
        other.finish("a")
        other.finish("of other work")
        run.note = "other processes"
        run.show()
        assert run.finished == Work(2, 40)
    line, end = caplog.messages
    assert line == "training: 40%, 2 of 3 models, about 0 s left, now other processes"
    assert end == "training: 2 of 3 models in 0 s", "one process says it"


def test_forks_count_for_themselves_in_shared_memory(tmp_path: Path) -> None:
    with made(RunDirectory(tmp_path), processes=3) as run:

        def work(number: int) -> None:
            run.in_process(number)
            assert run.shows == (number == 0)
            with run.of_piece("a", "erm", 4) as part:
                part.advance(number + 1)
                until = time.monotonic() + 60
                while [*run.begun] != [10.0, 20.0, 30.0] and time.monotonic() < until:
                    time.sleep(0.01)
                (tmp_path / f"{number}").write_text(str([*run.begun]))
                while len([*tmp_path.glob("[012]")]) < 3 and time.monotonic() < until:
                    time.sleep(0.01)

        run_forked(work, 3, run.watched)
    assert {(tmp_path / f"{number}").read_text() for number in range(3)} == {"[10.0, 20.0, 30.0]"}


def test_a_log_gets_few_lines_and_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xdm_ft")
    with made(RunDirectory(tmp_path)) as run, run.of_piece("a", "erm", 10) as part:
        part.advance(5)
        assert caplog.messages == []  # not before 30 s
    assert re.fullmatch(r"training: 0 of 3 models in \d s", caplog.messages[0])
    with pytest.raises(ValueError), made(RunDirectory(tmp_path)):
        raise ValueError
    assert len(caplog.messages) == 1, "a run that is interrupted has not ended"


def test_nothing_new_is_a_line_without_a_forecast(caplog: pytest.LogCaptureFixture) -> None:
    bar = Progress("extracting", 100, "images")
    bar.skip(40)
    bar.last_line = float("-inf")
    with caplog.at_level(logging.INFO, "xdm_ft"):
        bar.advance(0)
    assert caplog.messages == ["extracting: 40 of 100 images, 0.0/s"]


@pytest.mark.parametrize("processes", [1, 3])
def test_each_part_runs_once_on_one_thread(processes, tmp_path):
    before = torch.get_num_threads()

    def work(number):
        (tmp_path / f"{number}").write_text(f"{os.getpid()} {torch.get_num_threads()}")

    run_forked(work, processes)
    noted = [(tmp_path / f"{number}").read_text().split() for number in range(processes)]
    assert len({pid for pid, _ in noted}) == processes and noted[0][0] == str(os.getpid())
    assert all(threads == "1" for _, threads in noted)
    assert torch.get_num_threads() == before


def test_gradients_can_be_taken_in_every_process(tmp_path):
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()  # the forked ones inherit an engine that has run

    def work(number):
        (gradient,) = torch.autograd.grad((weight * number).sum(), weight)
        torch.save(gradient, tmp_path / f"{number}.pt")

    run_forked(work, 2)
    assert torch.equal(torch.load(tmp_path / "1.pt"), torch.ones(3))


def test_a_users_mistake_in_another_process_is_raised_here():
    def work(number):
        if number == 1:
            raise UserError("file.png: is broken; mend it")

    with pytest.raises(UserError, match=r"file\.png: is broken"):
        run_forked(work, 2)


def test_a_fault_in_another_process_is_raised_here(capfd):
    def work(number):
        if number == 1:
            raise ZeroDivisionError("ours")

    with pytest.raises(RuntimeError, match="failed with status 1"):
        run_forked(work, 2)
    assert "ZeroDivisionError: ours" in capfd.readouterr().err


def test_a_killed_process_is_reported():
    def work(number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"was killed \(SIGKILL"):
        run_forked(work, 2)


def test_a_fault_here_ends_the_others(tmp_path):
    def work(number):
        if number == 0:
            while not (tmp_path / "pid").exists():
                time.sleep(0.01)
            raise KeyboardInterrupt
        (tmp_path / "part").write_text(str(os.getpid()))
        (tmp_path / "part").rename(tmp_path / "pid")
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        run_forked(work, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


ORPHAN = """
import os, pathlib, sys, time
from xdm_ft.experiment.work import run_forked
folder = pathlib.Path(sys.argv[1])
def work(number):
    (folder / f"part{number}").write_text(str(os.getpid()))
    (folder / f"part{number}").rename(folder / f"pid{number}")
    time.sleep(60)
run_forked(work, 2)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the death of a parent is signalled to its children on Linux only")
def test_no_process_outlives_the_one_that_forked_it(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path)])
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"pid{number}").exists() for number in range(2)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    child = int((tmp_path / "pid1").read_text())
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SAVES = """
import os, pathlib, sys, time
from xdm_ft.experiment.work import run_forked
from xdm_ft.runtime.interrupt import Interrupted, deferred, handled, stop_requested
folder = pathlib.Path(sys.argv[1])
def work(number):
    if number == 0:
        return
    with deferred():
        time.sleep(0.2)  # until the parent waits
        print("started", flush=True)
        while not stop_requested():
            time.sleep(0.01)
        time.sleep(0.3)
        (folder / "saved").touch()
        raise Interrupted
with handled(resumable=True):
    run_forked(work, 2)
"""


@pytest.mark.parametrize("to_all", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_process_that_waits_for_others_lets_them_save(to_all, tmp_path):
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        assert process.stdout.readline() == "started\n"
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count("xdm-ft: interrupted; finished work is kept")) == (143, 1), errors
    assert (tmp_path / "saved").exists() and len(errors.splitlines()) == 1


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
