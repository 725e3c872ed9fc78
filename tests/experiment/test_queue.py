"""What is trained apart is one queue over all methods, which the processes of a run share."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import miniature
import pytest

from xdm_ft.algorithms import Setup
from xdm_ft.evaluation.records import ModelKey, Record
from xdm_ft.experiment import pieces, run
from xdm_ft.experiment.results import Outcome
from xdm_ft.recipe.check import load
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job

SMALL = """\
name: small
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, test_domains: [sketch, photo], seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
features: {dir: cache, workers: 0}
methods: [erm, vrex, fish, sam, linear_probe]
training: {steps: 6, batch_size: 2, evaluate_every: 3}
report: {page: false}
"""
HOLDER = """\
import sys, time
from pathlib import Path
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job
directory = RunDirectory(Path(sys.argv[1]))
directory.lock()
print('locked', flush=True)
time.sleep(600)
"""
# a step takes as many gradients as there are training domains for fish, two for sam and one for the others
HEADS = ["erm", "vrex", "fish", "sam"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(Path("data"), "pacs")
    Path("small.yaml").write_text(SMALL)


def recipe(*overrides: str) -> Recipe:
    return load("small.yaml", list(overrides))


def run_on(cores: int, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """results.json, and for each model in the order in which it was kept by some process: which one, and its method."""
    monkeypatch.setattr(pieces, "own_cores", lambda: cores)
    log, save = Path("log"), pieces.save
    log.write_text("")

    def noted(outcomes: Iterable[Outcome], directory: RunDirectory, writes: bool) -> list[Record]:
        return save((outcome for outcome in outcomes if note(outcome)), directory, writes)

    def note(outcome: Outcome) -> bool:
        method = outcome.line.method if isinstance(outcome.line, Record) else None
        with log.open("a") as file:
            file.write(json.dumps({"process": os.getpid(), "method": method}) + "\n")
        while cores > 1 and method in HEADS and len(head_trainers(log)) == 1:
            time.sleep(0.01)  # a piece of heads is left, and another process is there to take it
        return True

    made = recipe(*overrides)
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "save", noted)
        assert not run(made).failed
    results = json.loads((Path(made.output.dir) / made.name / "results.json").read_text())
    return results, [json.loads(line) for line in log.read_text().splitlines()]


def head_trainers(log: Path) -> set[int]:
    """The processes that have trained heads so far."""
    lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {line["process"] for line in lines if line["method"] in HEADS}


def hashes(folder: Path) -> dict[str, str]:
    files = sorted((folder / "models").rglob("*.safetensors"))
    assert files
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.slow
def test_small_methods_are_shared_out_and_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, alone = run_on(1, monkeypatch, "output.dir=alone")
    _, shared = run_on(3, monkeypatch, "output.dir=shared")
    assert len(alone) == len(shared) == 10, "every model once"
    assert {kept["method"] for kept in shared} >= set(HEADS)
    assert len(head_trainers(Path("log"))) > 1, "each method is one chunk, and one process did not train them all"
    assert hashes(Path("alone/small")) == hashes(Path("shared/small"))


@pytest.mark.slow
def test_the_longest_piece_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, kept = run_on(1, monkeypatch)
    order = list(dict.fromkeys(one["method"] for one in kept))
    assert order == ["linear_probe", "fish", "sam", "erm", "vrex"], "equal ones as the recipe has them"


@pytest.mark.slow
def test_extra_models_come_before_those_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = run_on(3, monkeypatch, "protocol.selection=cross_domain", "methods=[erm,fish,linear_probe]")
    assert all("cross_domain" in record["selected"] for record in results["runs"])
    assert len(results["runs"]) == 6


def piece(*rules: str) -> pieces.Piece:
    missing: Any = None
    job = Job(ModelKey("erm", ("sketch",), 0, 0), missing, Setup(missing, 2, 5, 0), missing, None, missing)
    item: Any = None
    return pieces.Piece(item, [job], Criteria(rules, "accuracy"), frozenset({job.key}), 1)


def test_a_piece_is_taken_once_until_the_run_begins_again(tmp_path: Path) -> None:
    state, other = RunDirectory(tmp_path), RunDirectory(tmp_path, "1", main=False)
    name = piece("train_val").name
    assert state.take(name) and not other.take(name)
    assert other.take(piece("cross_domain").name), "other rules, as extra models have them"
    with state:
        state.lock()
        assert other.take(name)


def test_what_a_checkpoint_says_of_its_models_is_what_json_reads() -> None:
    made = piece("train_val", "oracle")
    assert made.identity(made.jobs) == [[["erm", ["sketch"], 0, 0, 5]], ["train_val", "oracle"]]
    assert json.loads(json.dumps(made.identity(made.jobs))) == made.identity(made.jobs)


def test_what_a_dead_process_took_is_released_unless_it_is_done(tmp_path: Path) -> None:
    dead, alive = RunDirectory(tmp_path, "worker-1", main=False), RunDirectory(tmp_path, "worker-10", main=False)
    for name in ("a", "b"):
        assert dead.take(name)
    assert alive.take("c")
    dead.finish("b")
    alive.release("worker-1")
    assert alive.take("a") and not alive.take("b") and not dead.take("c")
    assert alive.finished() == ["b"]


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder, RunDirectory(tmp_path) as directory:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="another run is writing here"):
            directory.lock()
        holder.kill()
        holder.wait()
        began = time.monotonic()
        directory.lock()
        assert time.monotonic() - began < 10
