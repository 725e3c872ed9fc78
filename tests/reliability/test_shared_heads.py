"""Heads that share a file are as safe, and as much use, as those with files of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from damages import flip_a_digit, folder, garbage, remove, truncate
from quick_saves import save_after_every_step
from real_runs import Run, bank, kill_until_done, leftovers, outcome, ranks

from xdm_ft.cli.parser import main
from xdm_ft.experiment import pieces, plan, results
from xdm_ft.experiment.results import RECORDS, read_records
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.report.finished import read_run
from xdm_ft.storage.run_directory import RunDirectory

SEEDS = "protocol.seeds=3"  # of 2 held-out domains: 6 heads a method


def sharing(cores: int) -> None:
    plan.MOST_MODELS = 0
    save_after_every_step(cores)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recipe and of two finished runs of it: out/ with shared files, own/ without."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = bank(folder, steps=16)
    for name, first in (("out", sharing), ("own", save_after_every_step)):
        assert Run(recipe, folder / name, SEEDS, first=first).end() == 0
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of out/small, in a process that shares files."""
    monkeypatch.setattr(plan, "MOST_MODELS", 0)
    shutil.copytree(finished / "out/small", tmp_path / "small")
    return tmp_path / "small"


def run_again(finished: Path, run: Path, *overrides: str) -> int:
    return main(["run", str(finished / "small.yaml"), f"output.dir={run.parent}", SEEDS, *overrides])


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted((run / "models").rglob("*.*"))}


def test_a_method_has_a_file_per_chunk_and_the_same_numbers(finished: Path) -> None:
    shared, own = read_run(finished / "out/small"), read_run(finished / "own/small")
    assert sorted(path.rpartition("/heads-")[0] for path in files(shared.path)) == [
        "models/erm+swad", "models/xdomainmix+sam",
    ]  # fmt: skip
    assert not list((finished / "out/small/models").glob("*/ink*")), "no empty folders"
    assert [row.to_json() for row in shared.rows] == [row.to_json() for row in own.rows]
    for one, other in zip(shared.records, own.records, strict=True):
        weights, expected = one.selected["train_val"].weights, other.selected["train_val"].weights
        assert "#" in weights and "#" not in expected
        tensors, about = RunDirectory(shared.path).tensors(weights)
        same, as_about = RunDirectory(own.path).tensors(expected)
        assert tensors.keys() == same.keys() and all(tensors[name].equal(same[name]) for name in same)
        assert {**about, "file": ""} == {**as_about, "file": ""}
        assert (shared.prediction(one).predicted == own.prediction(other).predicted).all()


def in_pieces(cores: int) -> None:
    """Heads that train together share several files, each of which is written anew for every head."""
    sharing(cores)
    pieces.HEADS_PER_FILE = 4
    results.KEEP_SHARED_SECONDS = 0.0


def test_several_files_per_chunk_each_written_several_times(finished: Path, tmp_path: Path) -> None:
    recipe = finished / "small.yaml"
    assert Run(recipe, tmp_path / "out", SEEDS, first=in_pieces).end() == 0
    run, own = read_run(tmp_path / "out/small"), read_run(finished / "own/small")
    assert [path.rpartition("/")[0] for path in files(run.path)] == ["models/erm+swad"] * 2 + [
        "models/xdomainmix+sam"
    ] * 2
    for one, other in zip(run.records, own.records, strict=True):
        tensors, _ = RunDirectory(run.path).tensors(one.selected["train_val"].weights)
        same, _ = RunDirectory(own.path).tensors(other.selected["train_val"].weights)
        assert all(tensors[name].equal(same[name]) for name in same)
        assert (run.prediction(one).predicted == own.prediction(other).predicted).all()
    assert kill_until_done(recipe, tmp_path / "killed", SEEDS, kills=2, changes=40, seed=2, first=in_pieces) >= 1
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "out")


@pytest.mark.parametrize("later", ["0", "0.1"])
def test_of_two_records_the_one_counts_whose_files_are_whole(later: str, copy: Path) -> None:
    """A head that is trained again on another kind of device may get into another file than before."""
    record = read_run(copy).records[0]
    lost = {
        rule: replace(pick, weights=pick.weights.replace("heads-", "heads-0")) for rule, pick in record.selected.items()
    }
    for process, selected in (("0.1" if later == "0" else "0", lost), (later, record.selected)):
        RunDirectory(copy, process).append(RECORDS, replace(record, selected=selected).to_json())
    found = read_records(RunDirectory(copy))[record.key]
    assert found.selected["train_val"].weights == record.selected["train_val"].weights


def test_a_killed_run(finished: Path, tmp_path: Path) -> None:
    recipe = finished / "small.yaml"
    assert kill_until_done(recipe, tmp_path / "out", SEEDS, kills=3, changes=40, seed=1, first=sharing) >= 2
    assert outcome(tmp_path / "out") == outcome(finished / "out")
    assert leftovers(tmp_path / "out") == []


@pytest.mark.slow
def test_two_processes(finished: Path, tmp_path: Path) -> None:
    both = ranks(finished / "small.yaml", tmp_path / "out", SEEDS, count=2, first=sharing)
    assert [run.end() for run in both] == [0, 0], both[0].text()
    assert outcome(tmp_path / "out") == outcome(finished / "out")


@pytest.mark.parametrize("damage", [truncate, garbage, remove])
def test_a_lost_file_is_written_again(
    damage: Callable[[Path], None], finished: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, whole = next((copy / "models/erm+swad").iterdir()), files(copy)
    damage(path)
    assert run_again(finished, copy) == 0
    assert files(copy) == whole and outcome(copy.parent)[0] == outcome(finished / "out")[0]
    told = [message for message in caplog.messages if "is damaged" in message]
    assert len(told) == (0 if damage is remove else 1), "not once per model"
    assert all(one.startswith(str(path)) and one.endswith("its models will be trained again") for one in told)


def test_one_damaged_head_is_trained_again_alone(finished: Path, copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, whole = next((copy / "models/erm+swad").iterdir()), files(copy)
    flip_a_digit(path)
    caplog.set_level("INFO", "xdm_ft")
    assert run_again(finished, copy) == 0
    assert files(copy) == whole
    assert any(f"{path}: is damaged (metadata of ink/seed2-trial0/" in message for message in caplog.messages)
    assert any("erm+swad: 1 model" in message for message in caplog.messages)


def test_a_folder_in_its_place_is_named(finished: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((copy / "models/erm+swad").iterdir())
    folder(path)
    assert run_again(finished, copy) == 2
    assert f"{path}: can not be written, as it is a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_grows_large_keeps_the_files_of_its_first_heads(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished / "own/small", tmp_path / "small")
    before = files(tmp_path / "small")
    monkeypatch.setattr(plan, "MOST_MODELS", 0)
    assert run_again(finished, tmp_path / "small", "protocol.seeds=4") == 0
    after = files(tmp_path / "small")
    assert before.items() < after.items()
    assert all("/heads-" in path for path in after.keys() - before.keys())
    found = json.loads((tmp_path / "small/results.json").read_text())
    assert {"#" in run["selected"]["train_val"]["weights"] for run in found["runs"] if run["seed"] < 3} == {False}
    assert {"#" in run["selected"]["train_val"]["weights"] for run in found["runs"] if run["seed"] == 3} == {True}


@pytest.mark.slow
def test_a_head_of_a_shared_file_is_exported_and_trained_again(
    finished: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = Choice("erm+swad", ("ink",), seed=1)
    head, expected = (
        read_parts(read_run(run), chosen).heads["head"].state_dict() for run in (copy, finished / "own/small")
    )
    assert head.keys() == expected.keys() and all(head[name].equal(expected[name]) for name in expected)
    assert main(["retrain", str(copy), "erm+swad", "ink", "1"]) == 0
    assert "weights the same bits" in capsys.readouterr().out
