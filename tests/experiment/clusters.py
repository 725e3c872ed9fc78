"""Ray clusters on this machine, for tests, and what tests compare of a run on them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from warm_processes import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def cluster() -> Iterator[Any]:
    """A cluster on this machine: a head without cores, and two nodes with one core each."""
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": f"{PATIENCE:.0f}",  # Ray crashes at what is no integer
        "PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster as Nodes

        found = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            found.add_node(num_cpus=1)
        yield found
        found.shutdown()


def on(nodes: Any) -> tuple[str, str]:
    return "cluster.name=ray", f"cluster.address={nodes.address}"


def kill_one(nodes: Any) -> None:
    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)


def kill_the_one_with(nodes: Any, task: str) -> None:
    """Kills a node on which a task of this name runs: its process has that title, and the node's raylet as parent."""
    found = psutil.process_iter(["ppid", "cmdline"])  # passes over processes that end meanwhile
    raylets = {one.info["ppid"] for one in found if "".join(one.info["cmdline"] or ()) == f"ray::{task}"}
    of_node = {node.all_processes["raylet"][0].process.pid: node for node in nodes.worker_nodes}
    nodes.remove_node(of_node[(raylets & of_node.keys()).pop()], allow_graceful=False)


def keep_to_one_core() -> None:
    """This process and what it starts compute on one core, as a task with `cpus_per_model: 1` does.

    Test files that run at the same time have different cores.
    """
    cores, worker = sorted(os.sched_getaffinity(0)), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@contextmanager
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    keep_to_one_core()
    yield
    os.sched_setaffinity(0, before)


def hashes(folder: str) -> dict[str, str]:
    """Weights and predictions of all models."""
    files = sorted((Path(folder) / "small" / "models").rglob("*.safetensors"))
    assert files
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def metrics(folder: str) -> list[Any]:
    runs = json.loads((Path(folder) / "small" / "results.json").read_text())["runs"]
    return [(run["method"], run["test_domains"], run["seed"], run["trial"], run["selected"]) for run in runs]
