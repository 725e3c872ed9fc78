"""Runs that are killed while they grow end like ones that grew undisturbed: the same results and files, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from real_runs import Run, bank, end_to_end, kill_until_done, leftovers, outcome

from xdm_ft.storage.results_file import COSTS

GROWN = "methods=[rsc, erm+swad, linear_probe, xdomainmix+sam]", "protocol.seeds=2", "protocol.final_fit=true"
CROSSED = "protocol.selection=cross_domain", "methods=[erm]"
SEARCHED = "search={trials: 2, preset: frozen}", "methods=[erm, linear_probe]", "training.patience=null"
BANKS = {
    "methods, seeds, final fit": ([], GROWN),
    "cross_domain": (CROSSED, ["protocol.seeds=2", "methods=[rsc, erm]"]),
    "trials": (SEARCHED, ["search.trials=5", "protocol.final_fit=true"]),
}


def records(folder: Path) -> dict[str, str]:
    runs = json.loads((folder / "small" / "results.json").read_text())["runs"]
    return {json.dumps([r[key] for key in ("method", "test_domains", "seed", "trial")]): json.dumps(r) for r in runs}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BANKS)
def test_a_finished_run_is_killed_while_it_grows(kind: str, tmp_path: Path) -> None:
    short, grown = BANKS[kind]
    recipe = bank(tmp_path)
    kill_until_done(recipe, tmp_path / "whole", *short)
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    before, files = records(tmp_path / "whole"), outcome(tmp_path / "whole")[1]
    kill_until_done(recipe, tmp_path / "whole", *short, *grown)
    killed = kill_until_done(recipe, tmp_path / "out", *short, *grown, kills=3, changes=40, seed=3)
    assert killed >= 2
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")
    assert leftovers(tmp_path / "out") == []
    assert before.items() < records(tmp_path / "out").items(), "records keep their bytes, training times included"
    assert files.items() < outcome(tmp_path / "out")[1].items()
    assert outcome(tmp_path / "out")[0]["grown_from"]


@pytest.mark.slow
def test_a_run_that_was_killed_grows_and_is_killed_again(tmp_path: Path) -> None:
    """Models of the first recipe resume from their checkpoints, as the recipe that grows leaves these valid."""
    recipe = bank(tmp_path)
    run = Run(recipe, tmp_path / "whole")
    assert run.changes(6, "state/checkpoints/*.safetensors")
    run.kill()
    assert run.end() == -signal.SIGKILL
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    kill_until_done(recipe, tmp_path / "whole", *GROWN)
    text = (tmp_path / "whole.log").read_text()
    assert "resumes after" in text and "was written for other settings" not in text
    assert kill_until_done(recipe, tmp_path / "out", *GROWN, kills=4, changes=50, seed=5) >= 2
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")
    # the chunks of the first recipe are those of a run that never grew
    kill_until_done(recipe, tmp_path / "alone")
    short = {key: cut(value) for key, value in records(tmp_path / "alone").items()}
    assert short.items() < {key: cut(value) for key, value in records(tmp_path / "out").items()}.items()
    assert leftovers(tmp_path / "out") == []


def cut(record: str) -> str:
    """A record without its training time."""
    return json.dumps({key: value for key, value in json.loads(record).items() if key not in COSTS})


@pytest.mark.slow
def test_a_run_end_to_end_is_killed_while_it_grows(tmp_path: Path) -> None:
    recipe = end_to_end(tmp_path, "test_resnet", methods="[erm]", steps=6)
    short, grown = ["training.evaluate_every=3"], ["training.evaluate_every=3", "methods=[rsc, erm]"]
    assert Run(recipe, tmp_path / "whole", *short).end() == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    assert Run(recipe, tmp_path / "whole", *grown).end() == 0
    assert kill_until_done(recipe, tmp_path / "out", *grown, kills=2, changes=12, seed=2, cores=1) >= 1
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")
    assert leftovers(tmp_path / "out") == []
