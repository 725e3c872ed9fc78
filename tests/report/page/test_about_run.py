"""What the page says of the data, and of the machine that made the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_up_runs import write_run
from runs_in_memory import run

from xdm_ft.report.finished import read_run
from xdm_ft.report.page import about_run
from xdm_ft.runtime.errors import UserError


def test_paths_of_the_machine_are_shortened() -> None:
    places = {
        "data": {"name": "folder", "root": "/home/ann/clinic/scans"},
        "output": {"dir": "~/runs"},
        "encoder": {"weights": ["/mnt/private/w.safetensors", "laion2b"], "model": "ViT-B/16"},
    }
    panel = about_run.recipe(run(recipe=places))
    assert panel is not None and "recipe.yaml in the run directory has them whole" in panel.about
    for secret in ("ann", "clinic", "private", "~"):
        assert secret not in panel.code
    for shown in ("…/scans", "…/runs", "…/w.safetensors", "laion2b", "ViT-B/16"):
        assert shown in panel.code
    whole = about_run.recipe(run(recipe={"output": {"dir": "output"}}))
    assert whole is not None and "makes the same models" in whole.about and "dir: output" in whole.code


def test_missing_test_images_are_a_fault_with_a_remedy(tmp_path: Path) -> None:
    made = write_run(tmp_path, methods=("erm",), seeds=1)
    shutil.rmtree(made.path / "test_images")
    with pytest.raises(UserError, match=r"is damaged .*; run the same command to write it again"):
        _ = read_run(made.path).class_names
