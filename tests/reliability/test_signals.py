"""Signals at every moment of a command, to one process or to all: one line, the right status, no process left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from real_runs import CHECKPOINTS, ROOT, Run, end_to_end, on_images
from warm_processes import begin

from xdm_ft.cli import ls, parser
from xdm_ft.runtime import interrupt

KEPT = "xdm-ft: interrupted; finished work is kept; run the same command to resume\n"
SIGNALLED = """
import os, signal, sys

class WhileImporting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), int(sys.argv[2]))

sys.meta_path.insert(0, WhileImporting())
from xdm_ft.__main__ import main
sys.exit(main(sys.argv[3:]))
"""


def decode_slowly():
    from xdm_ft.images import decode

    to_rgb = decode.to_rgb
    decode.to_rgb = lambda image: (time.sleep(0.2), to_rgb(image))[1]


def workers_of(pid, count):
    """Returns the process's children, once there are so many."""
    until = time.monotonic() + 60
    while len(workers := psutil.Process(pid).children(recursive=True)) < count:
        assert time.monotonic() < until
        time.sleep(0.02)
    return workers


def has_ended(process):
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_end(processes):
    until = time.monotonic() + 3
    while not all(map(has_ended, processes)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("module", "number", "status", "line"),
    [
        ("argparse", signal.SIGINT, 130, "xdm-ft: interrupted\n"),
        ("numpy.dtypes", signal.SIGINT, 130, KEPT),  # an exception inside this import became a RecursionError
    ],
)
def test_while_modules_are_imported(module, number, status, line, tmp_path):
    command = [sys.executable, "-c", SIGNALLED, module, str(int(number)), "run", "demo", f"output.dir={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", line)


@pytest.mark.slow
def test_an_extraction_ends_at_once(tmp_path):
    recipe, log = on_images(tmp_path), tmp_path / "log"
    arguments = ["features", str(recipe), "features.workers=2"]
    run = begin(arguments, tmp_path, log, log, first=decode_slowly)
    workers = workers_of(run.pid, 2)
    sent = time.monotonic()
    assert run.pid is not None
    os.kill(run.pid, signal.SIGTERM)
    run.join(30)
    assert run.exitcode == 143 and time.monotonic() - sent < 15
    assert log.read_text().endswith(f" features\n{KEPT}")
    assert all_end(workers)


KILLED_WORKER = "xdm-ft: training.batch_size: a process that reads images died, most likely because "


@pytest.mark.parametrize(
    ("victim", "status", "line"),
    [
        pytest.param("run", -signal.SIGKILL, "", marks=pytest.mark.slow),
        pytest.param("run twice", 130, "xdm-ft: interrupted", marks=pytest.mark.soak),
        pytest.param("worker", 2, KILLED_WORKER, marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left(victim, status, line, tmp_path):
    """Of a run end to end that has taken some steps, and its loader workers."""
    run = Run(end_to_end(tmp_path, steps=100_000), tmp_path / "out", cores=2)
    run.changes(3, CHECKPOINTS)
    workers = workers_of(run.process.pid, 1)
    assert run.process.pid is not None
    if victim == "worker":
        workers[0].kill()
    elif victim == "run":
        run.send()
    else:
        for _ in range(2):  # twice Ctrl-C
            os.killpg(run.process.pid, signal.SIGINT)
            time.sleep(0.01)
    assert run.end() == status, run.text()
    assert all_end(workers)
    # a worker that just handed over a batch may find a killed run's end closed, and Python prints that by itself
    assert victim == "run" or "Traceback" not in run.text()
    lines = [text for text in run.text().splitlines() if text.startswith("xdm-ft:")]
    assert len(lines) == bool(line) and all(text.startswith(line) for text in lines)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_whose_partner_has_died(stopped, monkeypatch, capsys):
    """It says so in one line, unless the same signal has stopped both: the partner has said so."""

    def broken(_):
        monkeypatch.setattr(interrupt._received, "signal", signal.SIGINT if stopped else None)
        raise RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:7556.")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ls, "main", broken)
    before = {number: signal.getsignal(number) for number in interrupt.STOPPING}
    assert parser.main(["ls"]) == 1
    for number, handler in before.items():
        signal.signal(number, handler)
    assert capsys.readouterr().err.count("another process has died") == (0 if stopped else 1)
