"""`training.profile`: the trace that is left of a training."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import torch

from xdm_ft.experiment.pieces import profiled


def take_steps(file: Path | None, steps: int) -> None:
    x = torch.ones(4, 4)
    with profiled(file) as after_step:
        for _ in range(steps):
            x @ x
            after_step()


def test_five_steps_are_traced(tmp_path: Path) -> None:
    take_steps(tmp_path / "erm.json", 20)
    names = [event["name"] for event in json.loads((tmp_path / "erm.json").read_text())["traceEvents"]]
    assert names.count("aten::mm") == 5
    assert [file.name for file in tmp_path.iterdir()] == ["erm.json"]


def test_a_trace_does_not_name_the_machine(tmp_path: Path) -> None:
    take_steps(tmp_path / "erm.json", 20)
    trace = json.loads((tmp_path / "erm.json").read_text())
    assert trace["host_name"] == "", "torch writes the name of the machine here"
    assert socket.gethostname() not in [value for key, value in trace.items() if key != "traceEvents"]


def test_a_short_training_leaves_none(tmp_path: Path) -> None:
    take_steps(tmp_path / "erm.json", 3)
    take_steps(None, 3)
    assert not list(tmp_path.iterdir())
