"""SIGINT, SIGTERM and SIGHUP, each sent to a process of its own."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from xdm_ft.runtime import interrupt

WORK = """
import sys, time
from xdm_ft.runtime.interrupt import Interrupted, deferred, handle_signals, stop_requested

def patient():
    with deferred():
        print("started", flush=True)
        while not stop_requested():
            time.sleep(0.01)
        print("stopping", flush=True)
        time.sleep(float(sys.argv[2]))
        raise Interrupted("all of it")

def impatient():
    print("started", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:  # as a library may do while it is imported
            pass

try:
    with handle_signals(resumable=True):
        {"patient": patient, "impatient": impatient}[sys.argv[1]]()
except Interrupted as stop:
    print(stop, flush=True)
    sys.exit(stop.status)
"""


STATUSES = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@contextmanager
def started(kind, seconds=0.0, hangup=signal.SIG_DFL):
    """`hangup`: what becomes of SIGHUP as the process starts, SIG_IGN as nohup has it."""
    command = [sys.executable, "-c", WORK, kind, str(seconds)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    prepare = functools.partial(signal.signal, signal.SIGHUP, hangup)
    with subprocess.Popen(command, text=True, preexec_fn=prepare, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "status"), STATUSES)
def test_work_that_checks_for_a_stop_saves_first(number, status):
    with started("patient") as process:
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
    assert output == "stopping\ninterrupted; saved: all of it; run the same command to resume\n"
    assert (process.returncode, errors) == (status, "")


def test_other_work_stops_at_once():
    with started("impatient") as process:
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert errors == "xdm-ft: interrupted; finished work is kept; run the same command to resume\n"
    assert (process.returncode, output) == (143, "")


def test_a_hangup_is_ignored_where_it_was_when_the_process_started():
    with started("impatient", hangup=signal.SIG_IGN) as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143


def test_a_second_sigint_does_not_wait():
    with started("patient", seconds=60) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)  # a second SIGTERM changes nothing
        time.sleep(0.2)
        assert process.poll() is None
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert time.monotonic() - sent < 60
    assert process.returncode == 130 and output == ""
    assert errors == "xdm-ft: interrupted again; stopped without saving; run the same command to resume\n"


def test_a_sigint_that_a_launcher_forwards_does_not_count_as_a_second_one(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with started("patient", seconds=1.5) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "saved: all of it" in output


def test_the_earlier_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interrupt.handle_signals(resumable=True):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_changes_no_handlers():
    seen = []

    def work():
        with interrupt.handle_signals(resumable=True):
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_forked_process_handles_its_own_signals_in_silence(capfd):
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        interrupt.handle(prints=False)
        os.write(go, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    assert capfd.readouterr().err == ""


SAVES_FIRST = """
import os, time
from xdm_ft.runtime import interrupt
interrupt.handle()
# no print, which could be the one that the signal interrupts
with (
    interrupt.before_exit(lambda: os.write(1, b"then this\\n")),
    interrupt.before_exit(lambda: os.write(1, b"saved\\n")),
):
    print("started", flush=True)
    time.sleep(60)
"""


def test_what_must_happen_before_the_process_ends_does():
    command = [sys.executable, "-c", SAVES_FIRST]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (130, "saved\nthen this\n", "xdm-ft: interrupted\n")
