"""An analysis that is killed, or that one of several processes makes, ends like one that was left alone."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from quick_saves import save_after_every_step
from real_runs import Run, bank, leftovers

pytestmark = pytest.mark.slow
LINES = "state/analysis/*.jsonl"
MORE = ("protocol.seeds=3", "methods=[erm, xdomainmix]")


def lines(run: Path) -> int:
    """Returns how many models the analysis has written."""
    return sum(path.read_bytes().count(b"\n") for path in run.glob(LINES))


def measuring_slowly(cores: int) -> None:
    """As other runs here, and every model takes long enough for a kill to come between two of them."""
    from xdm_ft.experiment import analyse

    save_after_every_step(cores)
    measure = analyse.entry

    def slow(*of_model: Any) -> Any:
        time.sleep(0.5)
        return measure(*of_model)

    analyse.entry = slow  # type: ignore[assignment]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes]:
    """A recipe, the folder of its finished run, and the analysis that such a run has when nobody disturbs it."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = bank(folder, steps=10)
    assert Run(recipe, folder / "out", *MORE).end() == 0
    shutil.copytree(folder / "out", folder / "whole")
    assert Run(recipe, folder / "whole", *MORE, "analyse=true").end() == 0
    return recipe, folder / "out", (folder / "whole/small/analysis.json").read_bytes()


def test_a_kill_loses_no_model_that_was_measured(trained: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    recipe, finished, expected = trained
    shutil.copytree(finished, tmp_path / "out")
    run, written = tmp_path / "out/small", 0
    for _ in range(2):
        process = Run(recipe, tmp_path / "out", *MORE, "analyse=true", cores=2, first=measuring_slowly)
        while lines(run) <= written:  # a file is there before its first line
            assert process.changes(1, LINES), process.text()
        process.kill()
        process.end()
        assert not (run / "analysis.json").exists()
        written = lines(run)
    process = Run(recipe, tmp_path / "out", *MORE, "analyse=true")
    assert process.end() == 0, process.text()
    assert (run / "analysis.json").read_bytes() == expected and leftovers(tmp_path / "out") == []


def test_of_several_processes_one_analyses(trained: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    recipe, finished, expected = trained
    shutil.copytree(finished, tmp_path / "out")
    process = Run(recipe, tmp_path / "out", *MORE, "analyse=true", processes=2)
    assert process.end() == 0, process.text()
    assert (tmp_path / "out/small/analysis.json").read_bytes() == expected and leftovers(tmp_path / "out") == []
