"""What a run leaves besides its results: the trace of a training, and nowhere the name of the machine."""

from __future__ import annotations

import json
import os
import platform
import socket
from pathlib import Path

import pytest
import small_runs
import torch

from xdm_ft.cli.parser import main
from xdm_ft.experiment.pieces import profiled

NAME = "name-of-this-machine"


def take_steps(file: Path | None, steps: int) -> None:
    x = torch.ones(4, 4)
    with profiled(file) as after_step:
        for _ in range(steps):
            x @ x
            after_step()


def test_five_steps_are_traced_and_the_machine_is_not_named(tmp_path: Path) -> None:
    take_steps(tmp_path / "erm.json", 20)
    assert [file.name for file in tmp_path.iterdir()] == ["erm.json"]
    trace = json.loads((tmp_path / "erm.json").read_text())
    assert [event["name"] for event in trace["traceEvents"]].count("aten::mm") == 5
    assert trace["host_name"] == "", "torch writes the name of the machine here"
    assert socket.gethostname() not in [value for key, value in trace.items() if key != "traceEvents"]


def test_a_short_training_leaves_none(tmp_path: Path) -> None:
    take_steps(tmp_path / "erm.json", 3)
    take_steps(None, 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_file_names_the_machine(small_pacs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((uname[0], NAME, *uname[2:])))
    monkeypatch.setattr(socket, "gethostname", lambda: NAME)
    monkeypatch.setattr(platform, "node", lambda: NAME)
    monkeypatch.setenv("HOSTNAME", NAME)
    small_runs.results("training.profile=true", "report.page=true", "protocol.test_domains=[sketch]")
    run = Path("output") / "small"
    assert main(["export", str(run), "model", "--method", "erm"]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "data" not in path.parts]
    names = {path.relative_to(tmp_path).parts[0] for path in files}
    assert {"output", "cache", "model"} <= names and [*(run / "profiles").iterdir()] and [*(run / "events").iterdir()]
    assert not [path for path in files if NAME in str(path.relative_to(tmp_path)) or NAME.encode() in path.read_bytes()]
