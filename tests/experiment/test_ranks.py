"""Several processes of a launcher: what it asks for, on which addresses they listen, and a rank that hangs."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import miniature
import pytest
import small_runs
import torch
from accelerate.state import AcceleratorState

from xdm_ft.experiment.work import as_launched, on_loopback, start
from xdm_ft.runtime import machine, watchdog
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import Progress, pulse
from xdm_ft.runtime.watchdog import Watch

ROOT, SCENARIO = Path(__file__).resolve().parents[2], str(Path(__file__).with_name("ranks_scenario.py"))
SHORT = "protocol.test_domains=[sketch]", "training={steps: 2, batch_size: 2, evaluate_every: 2}"
END_TO_END = ("encoder.trainable=true", "methods=[erm]", *SHORT)


@pytest.fixture
def recipe(in_folder, monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda *overrides: small_runs.recipe(*END_TO_END, *overrides)


# what the launcher asks for


@pytest.mark.parametrize(
    ("own", "launched", "used"),
    [
        (None, "no", "no"),
        (None, "bf16", "bf16"),
        (None, "FP16", "fp16"),
        ("bf16", "no", "bf16"),  # what the launcher sets that was asked for nothing
        ("no", None, "no"),
    ],
)
def test_the_precision_is_the_recipes_else_the_launchers(own, launched, used, recipe, monkeypatch):
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    made = recipe(*([] if own is None else [f"training.mixed_precision={own}"]))
    assert as_launched(made).training.mixed_precision == used


@pytest.mark.parametrize(
    ("launched", "overrides", "words"),
    [
        ("bf16", ["training.mixed_precision=no"], ["training.mixed_precision: no", "--mixed_precision bf16"]),
        ("fp8", [], ["--mixed_precision fp8", "not supported"]),
        ("fp16", ["methods=[erm,sam]"], ["--mixed_precision fp16", "second pass of sam"]),
    ],
)
def test_a_conflict_is_refused(launched, overrides, words, recipe, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    with pytest.raises(UserError) as error:
        as_launched(recipe(*overrides))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_the_launchers_precision_is_nothing_to_a_frozen_encoder(recipe, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert as_launched(recipe("encoder.trainable=false")).training.mixed_precision == "no"
    assert "--mixed_precision bf16" in caplog.text and "has no effect" in caplog.text


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "GPU 0,1 is selected"),
        ({"WORLD_SIZE": "2"}, "2 processes are launched for GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0", "ACCELERATE_USE_CPU": "False"}, "GPU 0 is selected"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
    ],
)
def test_gpus_that_are_not_there_are_refused_and_hidden_ones_are_no_wish(environment, words, recipe, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if words is None:
        start(recipe())
        return
    with pytest.raises(UserError, match=f"{words}.*ACCELERATE_USE_CPU=1"):
        start(recipe())


@pytest.mark.parametrize(("in_hardware", "asked", "warned"), [(False, "bf16", 1), (True, "bf16", 0), (False, "no", 0)])
def test_a_precision_that_the_processor_only_emulates_is_said(in_hardware, asked, warned, recipe, monkeypatch, caplog):
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: in_hardware)
    machine.warn_of_slow_bf16.cache_clear()  # it is said once
    AcceleratorState._reset_state(reset_partial_state=True)
    start(recipe(f"training.mixed_precision={asked}"))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert caplog.text.count("this processor emulates bf16") == warned


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def launch(*arguments, script, **more):
    """`accelerate launch ARGUMENTS SCRIPT`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *arguments, *script]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**more), timeout=180)


@pytest.mark.slow
def test_real_launches(recipe):
    """Of two ranks, which listen on the loopback alone; the launcher serves their store on all (docs/machines.md)."""
    data = miniature.domainbed(Path("data"), "pacs")
    shutil.copy(data / "photo/dog/000.png", data / "sketch/dog/twin.png")
    recipe()
    two = ("--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16")
    done = launch(*two, script=[SCENARIO, "small.yaml", *END_TO_END], ACCELERATE_USE_CPU="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finding: images: 1 image has copies (2 files)") == 1, "one of the processes reports"
    results = small_runs.document("output/small")
    assert results["environment"]["mixed_precision"] == "bf16" and results["environment"]["processes"] == 2
    assert results["recipe"]["training"]["mixed_precision"] == "bf16"
    check_addresses()


# on which addresses they listen: on one machine, on none that another machine reaches


def listening(kind):
    """{process: (address, port) of each socket on which it listened}, as the scenario has noted them."""
    return {path.stem: json.loads(path.read_text()) for path in Path().glob(f"{kind}*.json")}


def check_addresses():
    for when in ("rank", "trained"):
        sockets = listening(when)
        assert {name[: len(when) + 1] for name in sockets} == {f"{when}0", f"{when}1"}
        assert all(sockets.values()), "gloo listens"
        assert {address for addresses in sockets.values() for address, _ in addresses} == {"127.0.0.1"}, sockets


@pytest.mark.soak
def test_ranks_that_serve_the_store_themselves_and_processes_that_a_run_forks(recipe):
    """As under `srun` or `mpirun`, and when torchrun starts ranks again."""
    miniature.domainbed(Path("data"), "pacs")
    recipe()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # the address of this machine's name may be another one than 127.0.0.1
    where = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCENARIO, "small.yaml", *END_TO_END],
            env=environment(**where, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    small_runs.wait_for(ranks)
    check_addresses()
    assert ["127.0.0.1", port] in [address for addresses in listening("rank0").values() for address in addresses]

    for path in Path().glob("*-*.json"):
        path.unlink()
    heads = ["name=heads", *SHORT, "methods=[erm, vrex, groupdro, xdomainmix]"]
    command = [sys.executable, SCENARIO, "small.yaml", *heads]
    subprocess.run(command, env=environment(ACCELERATE_USE_CPU="1"), check=True, capture_output=True, timeout=180)
    assert listening("fork") or len(os.sched_getaffinity(0)) == 1
    assert listening("rank") and not any(listening("").values())


RANK = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("own", "used"),
    [  # several machines keep what their launcher says
        (RANK | {"WORLD_SIZE": "4", "MASTER_ADDR": "far"}, {"MASTER_ADDR": "far"}),
        (  # a user's interface stays, and the launcher serves the store where it says
            RANK | AGENT | {"MASTER_ADDR": "near", "GLOO_SOCKET_IFNAME": "eth7"},
            {"MASTER_ADDR": "near", "GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"},
        ),
    ],
)
def test_which_interface_is_used(own, used, monkeypatch):
    names = {"MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    for name in names | {"TORCHELASTIC_USE_AGENT_STORE"}:
        monkeypatch.setenv(name, "")  # so that it is removed again after the test
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with on_loopback():
        assert {name: os.environ[name] for name in names if name in os.environ} == used


def test_a_port_in_use_is_one_line(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        interfaces = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        for name, value in {**RANK, **interfaces, "MASTER_ADDR": "x", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        message = rf"^MASTER_PORT: {port} cannot be used \(Address already in use\); set"
        with pytest.raises(UserError, match=message), on_loopback():
            pass


# a rank that hangs ends the run; one that works, or waits, never does


class Shared(dict):
    """What torch's store does, in memory."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def add(self, key, amount):
        self[key] = str(int(self.get(key, b"0")) + amount).encode()
        return int(self[key])


class Gone(Shared):
    def set(self, key, value):
        raise RuntimeError("connection reset by peer")

    add = set


@pytest.fixture
def three_looks(monkeypatch):
    monkeypatch.setattr(watchdog, "EVERY_SECONDS", 10.0)
    monkeypatch.setattr(watchdog, "SILENCE_SECONDS", 30.0)


def test_a_rank_is_silent_after_so_many_looks_without_a_heartbeat(three_looks):
    store = Shared({"heartbeat/1": b"1"})
    watch = Watch(store, rank=0, ranks=3)
    silent = []
    for look in range(8):
        pulse.beat()
        if look < 4:
            store["heartbeat/1"] = str(look).encode()
        silent.append(watch.check())
    # rank 2 never shows itself, rank 1 does for the last time at the fourth look
    assert silent == [[], [], [2], [2], [2], [2], [1, 2], [1, 2]]


def test_to_wait_is_not_to_hang_and_to_do_nothing_is(three_looks):
    watch = Watch(Shared(), rank=0, ranks=1)
    with pulse.waiting():
        assert not any(watch.check() for _ in range(10))
    silent = [watch.check() for _ in range(5)]
    assert silent[0] == [] and silent[-1] == [0]
    Progress("work", 1, "pieces").advance()
    assert watch.check() == []


def test_one_rank_reports_also_where_the_store_is_gone(three_looks):
    store = Shared()
    assert not Watch(store, 0, 2).reported()
    assert [Watch(store, rank, 2).is_first_to_report() for rank in range(2)] == [True, False]
    assert Watch(store, 1, 2).reported()
    watch = Watch(Gone(), rank=1, ranks=2)
    pulse.beat()
    assert [watch.check() for _ in range(3)][-1] == [0, 1]
    assert not watch.is_first_to_report(), "rank 0, which serves the store, has reported before it ended"


def test_forked_workers_count_for_the_process_that_forked_them():
    before = pulse.count
    child = os.fork()
    if child == 0:
        pulse.beat()
        os._exit(0)
    os.waitpid(child, 0)
    assert pulse.count == before + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("hangs in a step", "all ranks have made no progress"),  # the first rank stands still too, in the same step
        pytest.param("hangs beside work", "rank 1 has made no progress", marks=pytest.mark.soak),
        # its launcher waits 30 seconds before it kills it
        pytest.param("stops", "rank 1 has made no progress", marks=pytest.mark.soak),
        pytest.param("works", None, marks=pytest.mark.soak),
    ],
)
def test_a_hung_rank_ends_the_run_of_two_real_processes_and_a_slow_one_is_waited_for(mode, message):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", SCENARIO, mode]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **pipes, env=environment(ACCELERATE_USE_CPU="1"), start_new_session=True)
    try:
        next(line for line in process.stdout if "begins" in line)
        began = time.monotonic()
        output, _ = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - began
    if message is None:
        assert process.returncode == 0 and output.count("done") == 2, output
        assert seconds > 6, "longer than the silence that is borne"
        return
    assert process.returncode != 0 and "done" not in output, output
    lines = [line for line in output.splitlines() if "xdm-ft:" in line]
    assert len(lines) == 1 and re.search(message, lines[0]), output
    assert seconds < 30 + 30 * (mode == "stops"), output
