"""Runs that are killed and interrupted end like one that never was: the same results, the same files, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from real_runs import Run, bank, end_to_end, kill_until_done, leftovers, outcome
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from xdm_ft.storage.checkpoint import read
from xdm_ft.storage.tensorboard import Scalars, read_scalars

CHECKPOINTS = "state/checkpoints/*.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An end-to-end recipe, its encoder with batch norm, and the folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = end_to_end(folder, "test_resnet")
    assert Run(recipe, folder / "out").end() == 0
    return recipe, folder / "out"


@pytest.fixture(scope="module")
def both(whole: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run in two processes."""
    folder = tmp_path_factory.mktemp("both") / "out"
    undisturbed = Run(whole[0], folder, processes=2)
    assert undisturbed.end() == 0, undisturbed.text()
    return folder


def curves(output: Path) -> dict[str, Scalars]:
    """The scalars of a run. TensorBoard itself shows each point once, too, whatever was written twice."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(output / "small/events"))
    multiplexer.Reload()
    found = read_scalars(output / "small/events")
    assert found and found.keys() == multiplexer.Runs().keys()
    for name, scalars in found.items():
        for tag, points in scalars.items():
            assert [event.step for event in multiplexer.Tensors(name, tag)] == [step for step, _ in points], (name, tag)
    return found


@pytest.mark.slow
def test_end_to_end(whole: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, expected = whole
    assert kill_until_done(recipe, tmp_path / "out", kills=3, changes=40, seed=0, cores=1) >= 2
    assert outcome(tmp_path / "out") == outcome(expected)
    assert curves(tmp_path / "out") == curves(expected)
    assert leftovers(tmp_path / "out") == []


def test_a_bank(tmp_path: Path) -> None:
    recipe = bank(tmp_path)
    assert Run(recipe, tmp_path / "whole").end() == 0
    assert kill_until_done(recipe, tmp_path / "out", kills=3, changes=60, seed=1) >= 2
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")
    assert curves(tmp_path / "out") == curves(tmp_path / "whole")
    assert leftovers(tmp_path / "out") == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["test_resnet", "test_vit", "bank"])
def test_many_kills(tmp_path: Path, kind: str, seed: int) -> None:
    recipe = bank(tmp_path, steps=200) if kind == "bank" else end_to_end(tmp_path, kind, steps=40)
    assert Run(recipe, tmp_path / "whole").end() == 0
    assert kill_until_done(recipe, tmp_path / "out", kills=20, changes=25, seed=seed, cores=1) >= 5
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")
    assert leftovers(tmp_path / "out") == []


@pytest.mark.slow
def test_interrupted_runs_save_and_say_so(whole: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, expected = whole
    for number, to_all, status in (
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGTERM, True, 143),
    ):
        run = Run(recipe, tmp_path / "out")
        assert run.changes(3, CHECKPOINTS)
        before = len(run.text())
        sent = time.monotonic()
        (os.killpg if to_all else os.kill)(run.process.pid, number)
        assert run.end() == status, run.text()
        assert time.monotonic() - sent < 30
        [line] = run.text()[before:].strip().splitlines()
        assert line.startswith("xdm-ft: interrupted; saved: ") and line.endswith("; run the same command to resume")
        [kept] = run.output.glob(CHECKPOINTS)
        assert f": {read(kept)[0]['taken']} of 15 steps;" in line
    run = Run(recipe, tmp_path / "out")
    assert run.end() == 0, run.text()
    assert "resumes after" in run.text()
    assert outcome(tmp_path / "out") == outcome(expected)
    assert leftovers(tmp_path / "out") == []


@pytest.mark.slow
def test_another_recipe_is_refused_before_any_model_is_done(whole: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, _ = whole
    run = Run(recipe, tmp_path / "out")
    assert run.changes(2, CHECKPOINTS)
    run.kill()
    run.end()
    assert json.loads((run.output / "results.json").read_text())["runs"] == []
    other = Run(recipe, tmp_path / "out", "training.lr=0.5")
    assert other.end() == 2
    assert "It differs in\n  training.lr\n" in other.text()
    assert list(run.output.glob(CHECKPOINTS)), "nothing is lost by it"


def rank(run: Run, number: int) -> psutil.Process:
    """The process of a rank, once there is one."""
    for process in psutil.Process(run.process.pid).children(recursive=True):
        try:
            if process.environ().get("RANK") == str(number) and "quick_saves.py" in " ".join(process.cmdline()):
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"no rank {number}: {run.text()}")


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed(whole: tuple[Path, Path], both: Path, tmp_path: Path) -> None:
    recipe, _ = whole
    run = Run(recipe, tmp_path / "out", processes=2)
    assert run.changes(4, CHECKPOINTS)
    sent = time.monotonic()
    rank(run, 1).kill()
    assert run.end() != 0
    assert time.monotonic() - sent < 60
    text = run.text()
    assert "rank      : 1" in text and "Signal 9 (SIGKILL)" in text
    assert "xdm_ft/cli.py" not in text, "no traceback of ours"
    [kept] = run.output.glob(CHECKPOINTS)
    assert read(kept)[0]["taken"] >= 1

    again = Run(recipe, tmp_path / "out", processes=2)
    assert again.end() == 0, again.text()
    assert "resumes after" in again.text()
    assert outcome(tmp_path / "out") == outcome(both)
    assert leftovers(tmp_path / "out") == []


@pytest.mark.soak
def test_a_launcher_that_restarts_goes_on_from_the_checkpoint(
    whole: tuple[Path, Path], both: Path, tmp_path: Path
) -> None:
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else the second start finds addresses of the first
    run = Run(whole[0], tmp_path / "out", processes=2, restarts=1, environment=own_store)
    assert run.changes(4, CHECKPOINTS)
    rank(run, 1).kill()
    assert run.end() == 0, run.text()
    assert "resumes after" in run.text()
    assert outcome(tmp_path / "out") == outcome(both)
    assert leftovers(tmp_path / "out") == []


@pytest.mark.slow
def test_two_processes_interrupted_and_gone_on_with_by_one(whole: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, alone = whole
    run = Run(recipe, tmp_path / "out", processes=2)
    assert run.changes(3, CHECKPOINTS)
    sent = time.monotonic()
    run.kill(signal.SIGTERM)  # the launcher passes it on
    assert run.end() != 0
    assert time.monotonic() - sent < 60
    assert run.text().count("xdm-ft: interrupted; saved: ") == 1
    one = Run(recipe, tmp_path / "out")
    assert one.end() == 0, one.text()
    assert one.text().count("was written for other settings (processes was 2, is 1); this training starts again") == 1
    (results, files), (expected, expected_files) = outcome(tmp_path / "out"), outcome(alone)
    again = [run.pop("restarted") for run in results["runs"] if "restarted" in run]
    reason = "its checkpoint was written for other settings (processes was 2, is 1)"
    assert again == [{"times": 1, "reasons": [reason]}]
    assert (results, files) == (expected, expected_files)
