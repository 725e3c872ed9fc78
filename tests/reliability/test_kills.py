"""Runs that are killed and interrupted end like ones that nobody disturbed: the same results and files, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_runs import (
    CHECKPOINTS,
    Run,
    bank,
    end_to_end,
    kill_itself,
    leftovers,
    outcome,
    ranks,
    save_after_every_step,
    share_files,
)

from xdm_ft.storage.checkpoint import read


@dataclass(frozen=True)
class Command:
    recipe: Callable[[Path], Path] = bank
    overrides: tuple[str, ...] = ()
    grows_from: tuple[str, ...] | None = None  # overrides of the run that is in the directory before
    grows_from_killed: bool = False  # that run was killed
    prepare: Callable[[int], None] = save_after_every_step
    cores: int = 1  # numbers may depend on how many there are


COMMANDS = {
    "bank": Command(cores=2),
    "end to end": Command(end_to_end, ("methods=[erm, xdomainmix+swad]",)),
    "shared files": Command(overrides=("protocol.seeds=3",), prepare=share_files),
    "cross_domain": Command(
        overrides=("protocol.selection=cross_domain", "methods=[rsc, erm]", "protocol.seeds=2"),
        grows_from=("protocol.selection=cross_domain", "methods=[erm]"),
    ),
    "search": Command(
        overrides=("search={trials: 4, preset: frozen}", "methods=[erm, linear_probe]", "protocol.final_fit=true"),
        grows_from=("search={trials: 2, preset: frozen}", "methods=[erm, linear_probe]"),
    ),
    "growth": Command(
        overrides=("methods=[rsc, erm+swad, linear_probe, xdomainmix+sam]", "protocol.final_fit=all_seeds"),
        grows_from=(),
        grows_from_killed=True,
    ),
    "growth end to end": Command(end_to_end, ("methods=[rsc, erm]",), grows_from=()),
    "views": Command(end_to_end, (
        "encoder.trainable=false", "features.views=2", "data.train_augmentation=domainbed", "methods=[erm, xdomainmix]"
    )),
    "analysis": Command(overrides=("analyse=true",), grows_from=()),
}  # fmt: skip


def records(folder: Path) -> dict[str, str]:
    runs = json.loads((folder / "small" / "results.json").read_text())["runs"]
    return {json.dumps([r[key] for key in ("method", "test_domains", "seed", "trial")]): json.dumps(r) for r in runs}


def killed(command: Command, recipe: Path, folder: Path, overrides: tuple[str, ...], **at: Any) -> None:
    counts = folder.parent / f"{folder.name}.counts"
    first = functools.partial(kill_itself, counts=counts, prepare=command.prepare, **at)
    run = Run(recipe, folder, *overrides, cores=command.cores, first=first)
    assert run.end() == -signal.SIGKILL, run.text()


def undisturbed(command: Command, recipe: Path, folder: Path) -> dict[str, str]:
    """Runs it into `expected`, and counts its writes. `out` is as before it. Returns the records that were there."""
    expected, before = folder / "expected", dict[str, str]()
    first = functools.partial(kill_itself, counts=folder / "expected.counts", prepare=command.prepare)
    if command.grows_from is not None:
        if command.grows_from_killed:
            killed(command, recipe, expected, command.grows_from, at_file="checkpoints", number=6)
        else:
            assert Run(recipe, expected, *command.grows_from, cores=command.cores, first=first).end() == 0
            before = records(expected)
        shutil.copytree(expected, folder / "out")
    run = Run(recipe, expected, *command.overrides, cores=command.cores, first=first)
    assert run.end() == 0, run.text()
    assert "was written for other settings" not in run.text()
    assert ("resumes after" in run.text()) == command.grows_from_killed
    return before


PER_PUSH = ("bank", "end to end", "growth")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in PER_PUSH else pytest.mark.soak) for name in COMMANDS]
)
def test_a_run_that_is_killed_again_and_again(name: str, tmp_path: Path) -> None:
    """At one of its first writes, in its middle, and before its last files are in their places."""
    command, expected, folder = COMMANDS[name], tmp_path / "expected", tmp_path / "out"
    recipe = command.recipe(tmp_path)
    before = undisturbed(command, recipe, tmp_path)
    killed(command, recipe, folder, command.overrides, at_sync=3)
    if name == "analysis":
        killed(command, recipe, folder, command.overrides, at_sync=int((tmp_path / "expected.counts").read_text()) // 4)
    else:  # in the middle of a training, and again in what resumes it
        for number in (4, 2):
            killed(command, recipe, folder, command.overrides, at_file="checkpoints", number=number)
    last = "analysis.json" if name == "analysis" else "results.md"
    killed(command, recipe, folder, command.overrides, at_file=last)
    run = Run(recipe, folder, *command.overrides, cores=command.cores, first=command.prepare)
    assert run.end() == 0, run.text()
    assert outcome(folder) == outcome(expected) and leftovers(folder) == []
    if before and name != "analysis":
        assert before.items() < records(folder).items(), "records keep their bytes, training times included"
        assert outcome(folder)["results"]["grown_from"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", COMMANDS)
def test_kills_at_any_write(name: str, seed: int, tmp_path: Path) -> None:
    """Up to nine times, itself or one of its forks, before a write that is drawn."""
    draw, command, folder = random.Random(f"{name} {seed}"), COMMANDS[name], tmp_path / "out"
    recipe = command.recipe(tmp_path)
    undisturbed(command, recipe, tmp_path)
    writes = int((tmp_path / "expected.counts").read_text())
    first = functools.partial(kill_itself, counts=tmp_path / "out.counts", prepare=command.prepare)
    for _ in range(9):
        at_sync = draw.randint(1, max(1, writes // 6))
        run = Run(
            recipe, folder, *command.overrides, cores=command.cores, first=functools.partial(first, at_sync=at_sync)
        )
        if run.end() == 0:
            break
        assert run.end() == -signal.SIGKILL or "was killed (SIGKILL" in run.text(), run.text()
        print("killed", name, seed, at_sync)
    run = Run(recipe, folder, *command.overrides, cores=command.cores, first=command.prepare)
    assert run.end() == 0, run.text()
    assert outcome(folder) == outcome(tmp_path / "expected") and leftovers(folder) == []


@pytest.mark.slow
def test_interrupted_runs_save_and_say_so(tmp_path: Path) -> None:
    recipe = end_to_end(tmp_path, steps=30)
    assert Run(recipe, tmp_path / "expected").end() == 0
    for number, to_all, status in (
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGTERM, True, 143),
    ):
        run = Run(recipe, tmp_path / "out")
        run.changes(3, CHECKPOINTS)
        assert run.process.pid is not None
        (os.killpg if to_all else os.kill)(run.process.pid, number)
        assert run.end() == status, run.text()
        [line] = [line for line in run.text().splitlines() if line.startswith("xdm-ft: ")]
        assert line.startswith("xdm-ft: interrupted; saved: ") and line.endswith("; run the same command to resume")
        [checkpoint] = run.output.glob(CHECKPOINTS)
        assert f": {read(checkpoint)[0]['taken']} of 30 steps;" in line and "Traceback" not in run.text()

    assert json.loads((run.output / "results.json").read_text())["runs"] == []
    other = Run(recipe, tmp_path / "out", "training.lr=0.5")
    assert other.end() == 2 and "It differs in\n  training.lr\n" in other.text()
    assert list(run.output.glob(CHECKPOINTS)), "a refused recipe loses nothing"

    run = Run(recipe, tmp_path / "out")
    assert run.end() == 0 and "resumes after" in run.text()
    assert outcome(tmp_path / "out") == outcome(tmp_path / "expected") and leftovers(tmp_path / "out") == []


@pytest.mark.soak
def test_two_processes(tmp_path: Path) -> None:
    """One of them is killed; then both are interrupted; then one process resumes alone, from the first step."""
    recipe = end_to_end(tmp_path, steps=30)
    both = ranks(recipe, tmp_path / "expected")
    assert [run.end() for run in both] == [0, 0], both[0].text()
    both = ranks(recipe, tmp_path / "out")
    both[0].changes(4, CHECKPOINTS)
    both[1].send()
    assert [run.end() for run in both] == [1, -signal.SIGKILL]
    assert "xdm-ft: rank 0 stops because another process has died" in both[0].text()
    assert "Traceback" not in both[0].text()
    [checkpoint] = both[0].output.glob(CHECKPOINTS)
    assert read(checkpoint)[0]["taken"] >= 1
    shutil.copytree(tmp_path / "out", tmp_path / "alone")
    both = ranks(recipe, tmp_path / "out")
    assert [run.end() for run in both] == [0, 0] and "resumes after" in both[0].text()
    assert outcome(tmp_path / "out") == outcome(tmp_path / "expected") and leftovers(tmp_path / "out") == []

    both = ranks(recipe, tmp_path / "alone")
    both[0].changes(3, CHECKPOINTS)
    for run in both:
        run.send(signal.SIGTERM)
    assert [run.end() for run in both] == [143, 143]
    assert both[0].text().count("xdm-ft: interrupted; saved: ") == 1
    run = Run(recipe, tmp_path / "alone")
    assert run.end() == 0
    reason = "its checkpoint was written for other settings (processes was 2, is 1)"
    assert run.text().count(f"{reason.removeprefix('its checkpoint ')}; this training starts again") == 1
    [record] = json.loads((run.output / "results.json").read_text())["runs"]
    assert record["restarted"] == {"times": 1, "reasons": [reason]}
    assert Run(recipe, tmp_path / "one").end() == 0
    restarted, expected = outcome(tmp_path / "alone"), outcome(tmp_path / "one")
    del restarted["results"]["runs"][0]["restarted"]
    assert restarted == expected
