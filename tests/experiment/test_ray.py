"""Models that train on a Ray cluster: the same numbers as in one process, whatever happens to its nodes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import miniature
import pytest
import small_runs
from clusters import cluster, hashes, keep_to_one_core, kill_the_one_with, metrics, on
from warm_processes import PATIENCE, begin, interrupted

from xdm_ft.cli.parser import main
from xdm_ft.experiment import cluster as cluster_module
from xdm_ft.experiment import pieces, run
from xdm_ft.experiment.cluster import versions_of
from xdm_ft.experiment.results import refused_changes
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory

SEARCH = """\
name: small
data: {name: digits}
protocol: {name: leave_one_domain_out, test_domains: [ink, chalk], seeds: 1}
encoder: {name: open_clip, model: demo, weights: demo}
features: {dir: cache, workers: 0}
methods: [erm, vrex]
training: {steps: 60, batch_size: 4, evaluate_every: 30}
search: {trials: 50, space: {lr: {log_uniform: [1.0e-3, 1.0e-1]}}}
report: {page: false}
"""
END_TO_END = (
    "encoder.trainable=true",
    "methods=[erm, {name: erm, label: last, trainable: {blocks: 1}}]",
    "protocol.test_domains=[sketch, photo]",
    "training.steps=60",  # seconds, in which a node can die
    "training.evaluate_every=20",
)


class TestRefusals:
    @pytest.fixture(autouse=True)
    def here(self, small_pacs: None) -> None:
        Path("small.yaml").write_text(small_runs.RECIPE)

    @staticmethod
    def refused(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
        assert main(["run", "small.yaml", "cluster.name=ray", *overrides]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    def test_without_ray_a_line_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(cluster_module.importlib.util, "find_spec", lambda name: None)
        line = self.refused(capsys)
        assert line == "xdm-ft: cluster.name: ray needs the package ray; run: pip install 'xdm_ft[ray]'"

    @pytest.mark.slow
    def test_a_local_run_imports_no_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)  # its import raises
        assert not run(small_runs.recipe("methods=[linear_probe]")).failed

    def test_several_processes_and_a_cluster(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UserError, match=r"cluster.name: ray starts processes by itself"):
            cluster_module.check_cluster(small_runs.recipe("cluster.name=ray"))

    def test_a_task_has_one_gpu_at_most(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "cluster.gpus_per_model: input should be less than or equal to 1" in self.refused(
            capsys, "cluster.gpus_per_model=2"
        )

    @pytest.mark.needs("ray")
    @pytest.mark.parametrize(
        ("address", "problem"),
        [
            ("127.0.0.1:1", "127.0.0.1:1 can not be reached"),
            ("ray://127.0.0.1:10001", "must be HOST:PORT or auto"),
            ("nowhere", "must be HOST:PORT or auto"),
        ],
    )
    def test_an_address_without_a_cluster(self, address: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
        line = self.refused(capsys, f"cluster.address={address}")
        assert line.startswith("xdm-ft: cluster.address: ") and problem in line

    def test_where_models_train_is_no_other_recipe(self) -> None:
        before, now = (small_runs.recipe(*more).resolved() for more in ((), ("cluster.name=ray",)))
        assert before["cluster"]["name"] is None and now["cluster"]["name"] == "ray"
        del before["cluster"]  # as earlier versions wrote it
        assert not refused_changes(before, now) and not refused_changes(now, before)


def kill_a_node_in_time(nodes: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kills the node of a task that has just taken a piece, and adds another one. Returns the names of lost tasks."""
    lost, killed = list[str](), list[str]()
    poll, release = cluster_module.Tasks.poll, RunDirectory.release

    def polled(tasks: Any) -> None:
        poll(tasks)
        taken = [file.read_text() for file in (directory / "state" / "taken").glob("*")]
        if not killed and taken:
            killed.append(taken[0])
            kill_the_one_with(nodes, taken[0])
            nodes.add_node(num_cpus=1)

    def released(directory: RunDirectory, process: str) -> None:
        lost.append(process)
        release(directory, process)

    monkeypatch.setattr(cluster_module.Tasks, "poll", polled)
    monkeypatch.setattr(RunDirectory, "release", released)
    return lost


@pytest.mark.slow
@pytest.mark.needs("ray")
class TestNodes:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(pieces, "own_cores", lambda: 1)

    @pytest.mark.parametrize("what", ["heads", "end to end"])
    def test_a_node_dies_and_one_comes(
        self, what: str, nodes: Any, monkeypatch: pytest.MonkeyPatch, one_core: None
    ) -> None:
        if what == "heads":
            Path("small.yaml").write_text(SEARCH)
            own, models = (), 200
        else:
            miniature.domainbed(Path("data"), "pacs")
            Path("small.yaml").write_text(small_runs.RECIPE)
            own, models = END_TO_END, 4
        assert not run(load("small.yaml", ["output.dir=here", *own])).failed
        lost = kill_a_node_in_time(nodes, Path("there/small"), monkeypatch)
        assert not run(load("small.yaml", ["output.dir=there", *own, *on(nodes)])).failed
        assert lost
        assert len(metrics("there")) == models
        assert metrics("there") == metrics("here") and hashes("there") == hashes("here")
        assert not Path("there/small/state").exists()

    @pytest.mark.parametrize("where", ["same cluster", "another cluster", "no cluster"])
    def test_ctrl_c_saves_and_the_same_command_resumes_anywhere(
        self, where: str, nodes: Any, tmp_path: Path, one_core: None
    ) -> None:
        miniature.domainbed(Path("data"), "pacs")
        Path("small.yaml").write_text(small_runs.RECIPE)
        own = ("protocol.test_domains=[sketch]", "encoder.trainable=true", "methods=[erm]", "training.steps=60")
        arguments = ["run", "small.yaml", "output.dir=there", *own]
        process = begin([*arguments, *on(nodes)], tmp_path, tmp_path / "out", tmp_path / "err")
        text = interrupted(process, Path("err"), lambda: any(tmp_path.glob("there/small/events/erm/*/*/events*")))
        assert "interrupted; saved: 1 unfinished training; run the same command to resume" in text
        assert len(list(Path("there/small/state/checkpoints").iterdir())) == 1
        with cluster() if where == "another cluster" else nullcontext(nodes) as those:
            more = () if where == "no cluster" else on(those)
            process = begin([*arguments, *more], tmp_path, tmp_path / "out", tmp_path / "err", first=keep_to_one_core)
            process.join(PATIENCE)
        assert process.exitcode == 0, Path("err").read_text()
        assert "resumes after" in Path("err").read_text()
        assert not run(small_runs.recipe(*own, "output.dir=here")).failed
        assert metrics("there") == metrics("here") and hashes("there") == hashes("here")

    def test_what_a_node_lacks_is_one_line(self, nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        miniature.domainbed(Path("data"), "pacs")
        Path("small.yaml").write_text(small_runs.RECIPE)
        with pytest.raises(UserError, match=r"cluster.gpus_per_model: 1, but no node .* has more than 0 \(.* 0 GPUs\)"):
            run(small_runs.recipe(*on(nodes), "cluster.gpus_per_model=1"))
        for program, others in (("xdm_ft", {"xdm_ft": "0", "torch": "0"}), ("pillow", {"pillow": "0"})):
            monkeypatch.setattr(cluster_module, "versions_of", lambda work, others=others: versions_of(work) | others)
            with pytest.raises(UserError, match=rf"^node \S+ \(\S+\): {program} is \S+ here and 0 in the run; install"):
                run(small_runs.recipe(*on(nodes), "methods=[linear_probe]"))
