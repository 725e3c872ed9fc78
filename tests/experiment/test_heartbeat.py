"""A rank that hangs ends the run; one that works, or waits, never does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xdm_ft.runtime import watchdog
from xdm_ft.runtime.progress import Progress, pulse
from xdm_ft.runtime.watchdog import Watch, hung_message

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = Path(__file__).with_name("heartbeat_scenario.py")


class Shared(dict[str, bytes]):
    """What torch's store does, in memory."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(self.get(key, b"0")) + amount).encode()
        return int(self[key])


@pytest.fixture
def three_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "EVERY_SECONDS", 10.0)
    monkeypatch.setattr(watchdog, "SILENCE_SECONDS", 30.0)


@pytest.mark.usefixtures("three_looks")
def test_a_rank_is_silent_after_so_many_looks_without_a_heartbeat() -> None:
    store = Shared()
    watch = Watch(store, rank=0, ranks=3)
    pulse.beat()
    store["heartbeat/1"] = b"1"
    found = []
    for look in range(8):
        pulse.beat()
        if look < 4:
            store["heartbeat/1"] = str(look).encode()
        found.append(watch.check())
    # rank 2 never shows itself, rank 1 does for the last time at the fourth look
    assert found == [[], [], [2], [2], [2], [2], [1, 2], [1, 2]]


@pytest.mark.usefixtures("three_looks")
def test_to_wait_is_not_to_hang_and_to_do_nothing_is() -> None:
    watch = Watch(Shared(), rank=0, ranks=1)
    with pulse.waiting():
        assert not any(watch.check() for _ in range(10))
    found = [watch.check() for _ in range(5)]
    assert found[0] == [] and found[-1] == [0]
    Progress("work", 1, "pieces").advance()
    assert watch.check() == []


@pytest.mark.usefixtures("three_looks")
def test_nobody_is_heard_of_where_the_store_is_gone() -> None:
    class Gone(Shared):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset by peer")

        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset by peer")

    watch = Watch(Gone(), rank=1, ranks=2)
    pulse.beat()
    assert [watch.check() for _ in range(3)][-1] == [0, 1]
    assert not watch.is_first_to_report(), "rank 0, which serves the store, has reported before it ended"


def test_one_rank_reports() -> None:
    store = Shared()
    assert not Watch(store, 0, 2).reported()
    assert [Watch(store, rank, 2).is_first_to_report() for rank in range(2)] == [True, False]
    assert Watch(store, 1, 2).reported()


def test_forked_workers_count_for_the_process_that_forked_them() -> None:
    before = pulse.count
    child = os.fork()
    if child == 0:
        pulse.beat()
        os._exit(0)
    os.waitpid(child, 0)
    assert pulse.count == before + 1


def test_the_message_of_a_hung_rank() -> None:
    assert hung_message([1], 2) == "rank 1 has made no progress for 30 minutes; run the same command to resume"
    assert hung_message([1, 3], 4).startswith("ranks 1, 3 have made no progress for 30 minutes; ")
    assert hung_message([0, 1], 2).startswith("all ranks have made no progress")


def scenario(mode: str) -> tuple[int, float, str]:
    """Exit status, seconds of the slowest part and output of two ranks, the second of which does what `mode` says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCENARIO), mode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    began = time.monotonic()
    for line in process.stdout:  # type: ignore[union-attr]
        if "begins" in line:
            began = time.monotonic()
            break
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, time.monotonic() - began, output


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        pytest.param("hangs", "rank 1 has made no progress", marks=pytest.mark.slow),
        pytest.param("hangs beside work", "rank 1 has made no progress", marks=pytest.mark.slow),
        # its launcher waits 30 seconds before it kills a process that does not answer
        pytest.param("stops", "rank 1 has made no progress", marks=pytest.mark.slow),
        # the first rank stands still too, in the same step
        pytest.param("hangs in a step", "all ranks have made no progress", marks=pytest.mark.slow),
    ],
)
def test_a_hung_rank_ends_the_run_of_two_real_processes(mode: str, said: str) -> None:
    status, seconds, output = scenario(mode)
    assert status != 0 and "done" not in output, output
    lines = [line for line in output.splitlines() if "xdm-ft:" in line]
    assert len(lines) == 1 and re.search(said, lines[0]), output
    assert seconds < 30 + 30 * (mode == "stops"), output


@pytest.mark.slow
def test_a_rank_that_works_slowly_is_waited_for() -> None:
    status, seconds, output = scenario("works")
    assert status == 0 and output.count("done") == 2, output
    assert seconds > 6, "longer than the silence that is borne"
