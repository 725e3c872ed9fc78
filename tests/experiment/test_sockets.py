"""On which addresses the processes of a run listen: on one machine, on none that another machine reaches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import RECIPE

from xdm_ft.experiment.machine import on_loopback
from xdm_ft.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = str(Path(__file__).with_name("sockets_scenario.py"))
RUN = ["small.yaml", "protocol.test_domains=[sketch]"]
END_TO_END = [*RUN, "encoder.trainable=true", "methods=[erm]", "training.steps=2", "training.evaluate_every=2"]


def listening(kind: str) -> dict[str, list[tuple[str, int]]]:
    """{process: (address, port) of each socket on which it listened}, as the scenario has noted them."""
    return {path.stem: json.loads(path.read_text()) for path in Path().glob(f"{kind}*.json")}


def processes(*commands: list[str], **environment: str) -> None:
    """Runs commands at the same time, the n-th one as rank n."""
    Path("small.yaml").write_text(RECIPE)
    every = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1", **environment}
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**every, "RANK": str(rank), "LOCAL_RANK": str(rank)} if len(commands) > 1 else every,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        for one in started:
            _, printed = one.communicate(timeout=180)
            assert one.returncode == 0, printed
    finally:
        for one in started:
            one.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
class TestRealProcesses:
    def test_ranks_of_a_launcher(self) -> None:
        """The launcher itself serves their store on all addresses (docs/scaling.md)."""
        processes(["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", SCENARIO, *END_TO_END])
        self.check_ranks()

    def test_ranks_that_serve_the_store_themselves(self) -> None:
        """As under `srun` or `mpirun`, and when torchrun starts ranks again."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        # the address of this machine's name may be another one than 127.0.0.1
        where = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": port}
        processes(*[[SCENARIO, *END_TO_END]] * 2, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", **where)
        self.check_ranks()
        assert ["127.0.0.1", int(port)] in [one for found in listening("rank0").values() for one in found]

    @staticmethod
    def check_ranks() -> None:
        for when in ("rank", "trained"):
            found = listening(when)
            assert {name[: len(when) + 1] for name in found} == {f"{when}0", f"{when}1"}
            assert all(sockets for sockets in found.values()), "gloo listens"
            assert {address for sockets in found.values() for address, _ in sockets} == {"127.0.0.1"}, found

    def test_processes_that_a_run_forks(self) -> None:
        processes([SCENARIO, *RUN, "methods=[erm, vrex, groupdro, xdomainmix]"])
        if len(os.sched_getaffinity(0)) > 1:
            assert listening("fork")
        assert listening("rank") and not any([*listening("").values()])


def test_several_machines_keep_what_their_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "far"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with on_loopback():
        assert os.environ["MASTER_ADDR"] == "far" and "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_users_interface_stays_and_the_others_become_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**agent, "MASTER_ADDR": "near", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "eth7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that it is removed again after the test
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    with on_loopback():
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "lo")
        assert os.environ["MASTER_ADDR"] == "near", "the launcher serves the store there"


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": str(port)}
        for name, value in {**names, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with (
            pytest.raises(UserError, match=rf"^MASTER_PORT: {port} can not be used \(Address already in use\); set"),
            on_loopback(),
        ):
            pass
