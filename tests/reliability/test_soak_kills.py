"""Hundreds of kills: every sequence of them ends with the files of a run that was never killed, bit for bit.

`SOAK_KILLS=30 SOAK_SEED=1 pytest -m soak tests/reliability/test_soak_kills.py`
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import scenarios
import tally
from quick_saves import OUTSIDE, without_syncs
from real_runs import Run, differing, leftovers, outcome, ranks
from warm_processes import xdm_ft

KILLS, SEED = int(os.environ.get("SOAK_KILLS", "300")), os.environ.get("SOAK_SEED", "0")
EACH = 5  # kills of one sequence
SHARES = {
    "frozen": 45, "end to end": 45, "search": 35, "cross_domain": 35, "final_fit": 35, "views": 35,
    "two processes": 15, "two launched": 5, "first seconds": 50,
}  # fmt: skip
SEQUENCES = [
    (kind, number)
    for kind, share in SHARES.items()
    for number in range(max(1, round(KILLS * share / sum(SHARES.values()) / EACH)))
]
CORES = {"search": 2, "final_fit": 2}  # of the others 1; numbers may depend on how many there are
SECONDS_TO_STOP = 30.0  # of a launcher, until it kills the processes that it has asked to stop
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
SIGNALS = [(KILL,)] * 4 + [(TERM,), (INT,), (INT, INT), (TERM, TERM), (INT, TERM), (TERM, KILL), (INT, KILL)]
DIED = "another process has died"
NAMES = {KILL: "KILL", TERM: "TERM", INT: "INT"}


@dataclass(frozen=True)
class Whole:
    """A run that nobody disturbed."""

    recipe: Path
    outcome: tuple[dict[str, Any], dict[str, str]]
    seconds: float


@functools.cache
def whole(kind: str, folder: Path) -> Whole:
    folder = folder / kind.replace(" ", "-")
    xdm_ft("ls", cwd=folder.parent)  # so that the seconds below are without the imports
    names = {"two processes": "end to end", "two launched": "end to end", "first seconds": "views"}
    recipe = scenarios.write(names.get(kind, kind), folder)
    started = time.monotonic()
    runs = start(kind, recipe, folder / "out", cold=kind == "first seconds")
    assert all(run.end() == 0 for run in runs), runs[0].text()
    return Whole(recipe, outcome(folder / "out"), time.monotonic() - started)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


def start(kind: str, recipe: Path, folder: Path, cold: bool = False) -> list[Run]:
    features = f"features.dir={folder}-cache"
    if kind == "two processes":
        return ranks(recipe, folder, features, count=2, first=without_syncs)
    if kind == "two launched":
        return [Run(recipe, folder, features, processes=2)]
    return [Run(recipe, folder, features, cores=CORES.get(kind, 1), first=without_syncs, cold=cold)]


def send(runs: list[Run], signals: tuple[int, ...], draw: random.Random) -> list[int]:
    """Sends the signals, SIGKILL to one of the processes, others to all. Returns the exit statuses."""
    victim = draw.choice(runs)
    for number in signals:
        for run in [victim] if number == KILL else runs:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                rank(run, draw.randrange(2)).kill() if number == KILL and run.launched else run.kill(number)
        time.sleep(draw.random() * 0.02)
    if len(runs) > 1:  # what a launcher does
        victim.ends_within(SECONDS_TO_STOP)
        time.sleep(draw.random() * 0.2)
        for run in runs:
            with suppress(ProcessLookupError):
                run.kill(TERM)
    return [run.end() for run in runs]


def rank(run: Run, number: int) -> psutil.Process:
    """The process of a rank, once there is one."""
    while not run.ends_within(0.05):
        for process in psutil.Process(run.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(number):
                    return process
    raise ProcessLookupError


def faults(runs: list[Run], statuses: list[int], signals: tuple[int, ...]) -> list[str]:
    """What is wrong with how killed processes have ended."""
    text, several = runs[0].own_text(), len(runs) > 1 or runs[0].launched  # several share one log
    expected = {
        0: True, OUTSIDE: True, -KILL: KILL in signals, 143: TERM in signals or several, 130: INT in signals,
        1: runs[0].launched or DIED in text,
        -TERM: runs[0].cold or runs[0].launched, -INT: runs[0].cold or runs[0].launched,  # before Python runs our code
    }  # fmt: skip
    if not text:  # the process had not come to our code yet
        expected |= {1: INT in signals, -TERM: TERM in signals, -INT: INT in signals}
    found = [f"exit status {status}" for status in statuses if not expected.get(status)]
    if re.search('File ".*/xdm_ft/', text) or ("Traceback" in text and not (runs[0].cold or runs[0].launched)):
        found.append("traceback")
    if "damaged" in text or "starts again" in text:
        found.append("something is damaged")
    lines = [line for line in text.splitlines() if line.startswith("xdm-ft: ")]
    if len(lines) > max(len(runs), signals.count(INT)) or not all("interrupted" in li or DIED in li for li in lines):
        found.append(f"{len(lines)} lines")
    return [f"{fault} after {signals}:\n{text}" for fault in found]


def left_behind(runs: list[Run]) -> bool:
    """Whether a process of a killed run is there after the seconds in which a loader's workers notice."""
    until = time.monotonic() + 15
    for run in runs:
        while True:
            try:
                os.killpg(run.process.pid, 0)
            except ProcessLookupError:
                break
            if time.monotonic() > until:
                return True
            time.sleep(0.05)
    return False


def finish(made: Whole, folder: Path, runs: list[Run]) -> list[str]:
    """What differs from the run that nobody disturbed."""
    statuses = [run.end() for run in runs]
    if any(statuses):
        return [f"exit statuses {statuses} at the end:\n{runs[0].own_text()}"]
    found = ["traceback at the end"] if "Traceback" in runs[0].own_text() else []
    if differs := differing(outcome(folder), made.outcome):
        found.append(f"other results or files: {differs[:5]}\n{runs[0].text()}")
    return [*found, *(f"left: {path}" for path in leftovers(folder))]


def killed_run(kind: str, made: Whole, folder: Path, draw: random.Random, kills: int) -> list[str]:
    """A run that is killed so often, and what was wrong. It may end between two kills: then another one begins."""
    found: list[str] = []
    killed: list[Run] = []
    count = attempts = 0
    while count < kills:
        attempts += 1
        assert attempts < 20 * kills, "no kill meets the run"
        runs = start(kind, made.recipe, folder, cold=kind == "first seconds")
        if runs[0].ends_within(draw.random() * 0.8 * made.seconds):
            found += finish(made, folder, runs)
            shutil.rmtree(folder)
            if draw.random() < 0.7:
                shutil.rmtree(f"{folder}-cache", ignore_errors=True)
            continue
        signals = draw.choice(SIGNALS)
        statuses = send(runs, signals, draw)
        wrong = faults(runs, statuses, signals)
        found += wrong
        killed += runs
        count += 1
        tally.count("kills", kind, "bad" if wrong else "+".join(NAMES[number] for number in signals))
    found += finish(made, folder, start(kind, made.recipe, folder))
    return [*found, *(["processes are left"] if left_behind(killed) else [])]


def check(kind: str, number: int, kills: int, folder: Path, out: Path) -> None:
    """A sequence of kills, as drawn from the seed."""
    found = killed_run(kind, whole(kind, folder), out, random.Random(f"{SEED} {kind} {number}"), kills)
    tally.count("sequences", kind, "bad" if found else "same files at the end")
    assert not found, "\n\n".join(found)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "number"), SEQUENCES)
def test_a_sequence(kind: str, number: int, folder: Path, tmp_path: Path) -> None:
    check(kind, number, EACH, folder, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["views", "cross_domain"])
def test_some_kills(kind: str, folder: Path, tmp_path: Path) -> None:
    check(kind, 0, 3, folder, tmp_path / "out")
