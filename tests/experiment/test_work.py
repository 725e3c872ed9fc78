"""The queue that the processes of a run share, forked processes, and one bar for all of them."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_runs
import torch
from clusters import weights_and_predictions

from xdm_ft.algorithms import Setup
from xdm_ft.core import Criteria, ModelKey
from xdm_ft.experiment import cluster, pieces
from xdm_ft.experiment import work as module
from xdm_ft.experiment.work import NOTHING, RunProgress, WorkDone, run_forked
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import Progress
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job

PIECES = {"a": WorkDone(2, 40), "b": WorkDone(1, 60)}


def progress(directory, done=NOTHING, processes=1, shows=True):
    return RunProgress("training", PIECES, done, directory, processes, shows)


def test_what_an_earlier_run_did_is_no_part_of_the_rate(tmp_path, caplog):
    with progress(RunDirectory(tmp_path), done=WorkDone(3, 100)) as run:
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
    assert (
        caplog.messages[0] == "training: 65% of the work, 3 of 6 models, about 2 min left, now erm (2 models), loss 0.5"
    )


def test_any_process_finishes_a_piece(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "xdm_ft")
    monkeypatch.setattr(module, "LOG_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 5.0))
    other = RunDirectory(tmp_path, "1", main=False)
    with progress(RunDirectory(tmp_path)) as run, progress(other, shows=False) as hidden:
        with hidden.of_piece("a", "erm", 10) as part:
            part.advance(10)
        other.finish("a")
        other.finish("of other work")
        run.note = "other processes"
        run.show()
        assert run.finished == WorkDone(2, 40)
    line, end = caplog.messages
    assert line == "training: 40% of the work, 2 of 3 models, about 0 s left, now other processes"
    assert end == "training: 2 of 3 models in 0 s", "one process says it"


def test_a_log_gets_few_lines_and_the_end(tmp_path, caplog):
    caplog.set_level(logging.INFO, "xdm_ft")
    with progress(RunDirectory(tmp_path)) as run, run.of_piece("a", "erm", 10) as part:
        part.advance(5)
        assert caplog.messages == []  # not before 30 s
    assert re.fullmatch(r"training: 0 of 3 models in \d s", caplog.messages[0])
    with pytest.raises(ValueError), progress(RunDirectory(tmp_path)):
        raise ValueError
    assert len(caplog.messages) == 1, "a run that is interrupted has not ended"
    bar = Progress("extracting", 100, "images")
    bar.skip(40)
    bar.last_line = float("-inf")
    bar.advance(0)
    assert caplog.messages[1:] == ["extracting: 40 of 100 images, 0.0/s"], "nothing new: no forecast"


def test_forks_count_for_themselves_in_shared_memory_on_one_thread_each(tmp_path):
    threads = torch.get_num_threads()
    with progress(RunDirectory(tmp_path), processes=3) as run:

        def work(number):
            run.in_process(number)
            with run.of_piece("a", "erm", 4) as part:
                part.advance(number + 1)
                until = time.monotonic() + 60
                while [*run.begun] != [10.0, 20.0, 30.0] and time.monotonic() < until:
                    time.sleep(0.01)
                note = [[*run.begun], run.shows, os.getpid(), torch.get_num_threads()]
                (tmp_path / f"{number}").write_text(json.dumps(note))
                while len([*tmp_path.glob("[012]")]) < 3 and time.monotonic() < until:
                    time.sleep(0.01)

        run_forked(work, 3, run.watched)
    counts, shows, pids, of_process = zip(*(json.loads((tmp_path / f"{n}").read_text()) for n in range(3)), strict=True)
    assert [*counts] == [[10.0, 20.0, 30.0]] * 3 and shows == (True, False, False)
    assert len({*pids}) == 3 and pids[0] == os.getpid()
    assert of_process == (1, 1, 1) and torch.get_num_threads() == threads


def users_mistake():
    raise UserError("file.png: is broken; mend it")


def fault():
    raise ZeroDivisionError("ours")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "error", "message", "printed"),
    [
        (users_mistake, UserError, r"file\.png: is broken", ""),
        (fault, RuntimeError, "failed with status 1", "ZeroDivisionError: ours"),
        (kill, UserError, r"was killed \(SIGKILL", ""),
    ],
)
def test_what_ends_another_process_is_raised_here(end, error, message, printed, capfd):
    with pytest.raises(error, match=message):
        run_forked(lambda number: end() if number == 1 else None, 2)
    assert printed in capfd.readouterr().err


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
    status = Path("/proc", (tmp_path / "pid1").read_text(), "stat")
    while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


SAVES = """
import os, pathlib, sys, time
from xdm_ft.experiment.work import run_forked
from xdm_ft.runtime.interrupt import Interrupted, deferred, handle_signals, stop_requested
folder = pathlib.Path(sys.argv[1])
def work(number):
    if number == 0:
        (folder / "done").touch()
        return
    with deferred():
        while not (folder / "done").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # until the parent waits
        print("started", flush=True)
        while not stop_requested():
            time.sleep(0.01)
        time.sleep(0.3)
        (folder / "saved").touch()
        raise Interrupted
with handle_signals(resumable=True):
    run_forked(work, 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_process_that_waits_for_others_lets_them_save(to_all, tmp_path):
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        assert process.stdout.readline() == "started\n"
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count("xdm-ft: interrupted; finished work is kept")) == (143, 1), errors
    assert (tmp_path / "saved").exists() and len(errors.splitlines()) == 1


# the queue

# a step takes as many gradients as there are training domains for fish, two for sam and one for the others
QUEUE = (
    "methods=[erm, vrex, fish, sam, linear_probe]", "protocol.test_domains=[sketch, photo]",
    "training={steps: 6, batch_size: 2, evaluate_every: 3}",
)  # fmt: skip


def pieces_taken(monkeypatch, cores, *overrides):
    """(process, name) of each piece in the order in which some process took it; of several cores, at least two do."""
    log, take = Path("log"), RunDirectory.claim
    log.write_text("")

    def lines():
        return [line.split() for line in log.read_text().splitlines()]

    def noted(directory, name):
        if not take(directory, name):
            return False
        with log.open("a") as file:
            file.write(f"{os.getpid()} {name}\n")
        until = time.monotonic() + 60
        while cores > 1 and len({process for process, _ in lines()}) == 1 and time.monotonic() < until:
            time.sleep(0.01)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "own_cores", lambda: cores)
        patch.setattr(RunDirectory, "claim", noted)
        small_runs.results(*QUEUE, *overrides)
    return lines()


@pytest.mark.slow
def test_pieces_are_shared_out_the_longest_first_and_the_numbers_are_the_same(small_pacs, monkeypatch):
    alone = pieces_taken(monkeypatch, 1, "output.dir=alone")
    shared = pieces_taken(monkeypatch, 3, "output.dir=shared")
    methods = [name.rpartition("-")[0] for _, name in alone]
    assert methods == ["linear_probe"] * 2 + ["fish", "sam", "erm", "vrex"], "equal ones as the recipe has them"
    assert {name for _, name in alone} == {name for _, name in shared} and len(alone) == len(shared) == 6
    assert len({process for process, _ in alone}) == 1 < len({process for process, _ in shared})
    assert weights_and_predictions("alone") == weights_and_predictions("shared")

    extra = small_runs.results(
        *QUEUE, "protocol.selection=cross_domain", "methods=[erm,fish,linear_probe]", "output.dir=extra"
    )
    assert all("cross_domain" in record["selected"] for record in extra["runs"]) and len(extra["runs"]) == 6


def piece(*rules):
    job = Job(ModelKey("erm", ("sketch",), 0, 0), None, Setup(None, 2, 5, 0), None, None, None)
    return pieces.Piece(None, [job], Criteria(rules, "accuracy"), frozenset({job.key}), 1)


def test_a_piece_is_taken_once_until_the_run_begins_again(tmp_path):
    state, other = RunDirectory(tmp_path), RunDirectory(tmp_path, "1", main=False)
    name = piece("train_val").name
    assert state.claim(name) and not other.claim(name)
    assert other.claim(piece("cross_domain").name), "other rules, as extra models have them"
    with state:
        state.lock()
        assert other.claim(name)


class Lost(Exception):
    """An error of Ray."""


def test_a_task_that_is_lost_too_often_ends_the_run():
    def lose(task):
        raise Lost

    tasks = cluster.Tasks(None, 1, ("output.dir", Path("state")), done=None)
    tasks.ray = SimpleNamespace(wait=lambda running, **_: (running, []), get=lose)
    tasks.ray.exceptions = SimpleNamespace(RayError=Lost)
    tasks.folder, tasks.next_look, tasks.look_at_nodes = Path("no logs"), 0.0, lambda: None
    for answers, error in ((True, UserError), (False, Lost)):
        tasks.head_answers = lambda answers=answers: answers
        tasks.running = {object(): cluster.TaskPart("worker-3", None)}
        with pytest.raises(error, match=r"worker-3: its task was lost 11 times \(Lost\)" if answers else "^$"):
            tasks.poll()


def test_what_a_dead_process_took_is_released_unless_it_is_done(tmp_path):
    dead, alive = RunDirectory(tmp_path, "worker-1", main=False), RunDirectory(tmp_path, "worker-10", main=False)
    assert dead.claim("a") and dead.claim("b") and alive.claim("c")
    dead.finish("b")
    (tmp_path / "state/taken/d").touch()  # is being taken: its process has not written its name yet
    alive.release_claims_of("worker-1")
    assert not alive.claim("d")
    assert alive.claim("a") and not alive.claim("b") and not dead.claim("c")
    assert alive.finished() == ["b"]


HOLDER = """
import sys, time
from pathlib import Path
from xdm_ft.storage.run_directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
directory.lock()
print('locked', flush=True)
time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder, RunDirectory(tmp_path) as directory:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(
            UserError,
            match=r"\(xdm-ft run, analyse, audit or report\) is writing here; wait until it ends and try again$",
        ):
            directory.lock()
        holder.kill()
        holder.wait()
        began = time.monotonic()
        directory.lock()
        assert time.monotonic() - began < 10
