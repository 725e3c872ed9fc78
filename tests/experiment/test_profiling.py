"""`training.profile`: the trace that is left of a training."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from xdm_ft.experiment.machine import set_precision_on_gpus
from xdm_ft.experiment.pieces import profiled
from xdm_ft.runtime.progress import unseen


def take_steps(file: Path | None, steps: int) -> None:
    x, bar = torch.ones(4, 4), unseen()
    with profiled(bar, file) as watched:
        watched.skip(3)
        for _ in range(steps):
            x @ x
            watched.advance(2, "loss 1")
    assert bar.done == 3 + 2 * steps
    assert (watched is bar) == (file is None)


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


@pytest.mark.parametrize("tf32", [True, False])
def test_products_on_gpus_have_the_precision_of_the_recipe(tf32: bool) -> None:
    set_precision_on_gpus(tf32)
    # reading them raises where the newer flag of only some operators was set
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (tf32, tf32)
