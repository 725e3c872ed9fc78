"""Ray clusters on this machine, for tests, and what tests compare of a run on them."""

import hashlib
import os
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from warm_processes import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def cluster():
    """A cluster on this machine: a head without cores, and two nodes with one core each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", f"{PATIENCE:.0f}")  # Ray crashes at what is no integer
        patch.setenv("PYTHONPATH", str(ROOT))
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            nodes.add_node(num_cpus=1)
        yield nodes
        nodes.shutdown()


def on(nodes):
    return "cluster.name=ray", f"cluster.address={nodes.address}"


def replace_the_one_with(nodes, task):
    """Kills the node on which a task of this name runs, whose process has that title and the raylet as parent."""
    processes = psutil.process_iter(["ppid", "cmdline"])  # skips processes that end meanwhile
    raylets = {p.info["ppid"] for p in processes if "".join(p.info["cmdline"] or ()) == f"ray::{task}"}
    by_raylet = {node.all_processes["raylet"][0].process.pid: node for node in nodes.worker_nodes}
    nodes.remove_node(by_raylet[(raylets & by_raylet.keys()).pop()], allow_graceful=False)
    nodes.add_node(num_cpus=1)


def keep_to_one_core():
    """This process and what it starts compute on one core, as a task with `cpus_per_model: 1` does.

    Test files that run at the same time have different cores.
    """
    cores, worker = sorted(os.sched_getaffinity(0)), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def weights_and_predictions(folder):
    """{file: checksum} of all models."""
    files = sorted((Path(folder) / "small" / "models").rglob("*.safetensors"))
    assert files
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
