"""Signals at every moment of a command, to one process or to all: one line, the right status, no process left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from real_runs import ROOT, Run, end_to_end
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


def slow_images() -> None:
    from xdm_ft.images import decode

    decode = decode.to_rgb
    decode.to_rgb = lambda image: (time.sleep(0.2), decode(image))[1]


def workers_of(pid: int, count: int) -> list[psutil.Process]:
    """The process's children, once there are so many."""
    until = time.monotonic() + 60
    while len(found := psutil.Process(pid).children(recursive=True)) < count:
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def all_end(processes: list[psutil.Process], seconds: float = 3.0) -> bool:
    until = time.monotonic() + seconds
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("module", "number", "status", "line"),
    [
        ("argparse", signal.SIGINT, 130, "xdm-ft: interrupted\n"),
        ("yaml", signal.SIGTERM, 143, KEPT),
        ("numpy.dtypes", signal.SIGINT, 130, KEPT),  # an exception inside this import became a RecursionError
    ],
)
def test_while_modules_are_imported(module: str, number: int, status: int, line: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNALLED, module, str(int(number)), "run", "demo", f"output.dir={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", line)


@pytest.mark.soak
def test_at_any_moment_of_the_first_seconds(tmp_path: Path) -> None:
    draw = random.Random(0)
    commands = [["-m", "xdm_ft", "run"], [str(ROOT / "xdm_ft" / "run.py")]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDM_FT_CACHE": str(tmp_path / "cache")}
    for attempt in range(50):
        number, status = draw.choice([(signal.SIGINT, 130), (signal.SIGTERM, 143)])
        command = [sys.executable, *draw.choice(commands), "demo", f"output.dir={tmp_path / str(attempt)}"]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
            time.sleep(draw.uniform(0.2, 10.0))  # Python itself starts in less
            sent = time.monotonic()
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert "Traceback" not in errors and "Exception" not in errors, errors
        assert errors.count("xdm-ft: interrupted") == 1 and time.monotonic() - sent < 30


def test_an_extraction_ends_at_once(tmp_path: Path) -> None:
    recipe = end_to_end(tmp_path, "test_vit")
    overrides = [f"features.dir={tmp_path}", "features.workers=2", "encoder.trainable=false"]
    log = tmp_path / "log"
    run = begin(["features", str(recipe), *overrides], tmp_path, log, log, first=slow_images)
    workers = workers_of(run.pid, 2)
    sent = time.monotonic()
    os.kill(run.pid, signal.SIGTERM)
    run.join(30)
    assert run.exitcode == 143 and time.monotonic() - sent < 15
    assert log.read_text().endswith(f" features\n{KEPT}")
    assert all_end(workers)


def begun(tmp_path: Path) -> tuple[Run, list[psutil.Process]]:
    """A run end to end that has taken some steps, and its loader workers."""
    run = Run(end_to_end(tmp_path, "test_vit", steps=100000), tmp_path / "out", cores=2)
    assert run.changes(3, "state/checkpoints/*")
    return run, workers_of(run.process.pid, 1)


@pytest.mark.slow
def test_twice_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    run, workers = begun(tmp_path)
    for _ in range(2):
        os.killpg(run.process.pid, signal.SIGINT)
        time.sleep(0.01)
    assert run.end() == 130
    assert all_end(workers)
    assert run.text().count("xdm-ft: interrupted") == 1 and "Traceback" not in run.text()


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    run, workers = begun(tmp_path)
    run.kill()
    run.end()
    assert all_end(workers, 1.0)


@pytest.mark.slow
def test_a_loader_worker_that_is_killed(tmp_path: Path) -> None:
    run, workers = begun(tmp_path)
    workers[0].kill()
    assert run.end() == 2, run.text()
    [line] = [line for line in run.text().splitlines() if line.startswith("xdm-ft:")]
    assert line.startswith("xdm-ft: training.batch_size: a process that reads images died, most likely because ")
    assert "Traceback" not in run.text()
    assert all_end(workers)


@pytest.mark.parametrize("asked", [False, True])
def test_a_rank_whose_partner_has_died(
    asked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is told in one line, unless the same signal has asked both to stop: the partner has said so."""

    def broken(_: object) -> int:
        monkeypatch.setattr(interrupt._received, "signal", signal.SIGINT if asked else None)
        raise RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:7556.")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ls, "main", broken)
    before = {number: signal.getsignal(number) for number in interrupt.STOPPING}
    assert parser.main(["ls"]) == 1
    for number, handler in before.items():
        signal.signal(number, handler)
    assert capsys.readouterr().err.count("another process has died") == (0 if asked else 1)
