"""What the launcher asks for: precision, GPUs, processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import miniature
import pytest
import torch

from xdm_ft.experiment.machine import as_launched, start
from xdm_ft.recipe.check import load
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SMALL = """\
name: small
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, test_domains: [sketch], seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}, trainable: true}
features: {dir: cache, workers: 0}
methods: [erm]
training: {steps: 2, batch_size: 2, evaluate_every: 2}
report: {page: false}
output: {dir: out}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    for name in ("ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def recipe(*overrides: str) -> Recipe:
    return load("small.yaml", list(overrides))


@pytest.mark.parametrize(
    ("own", "launched", "used"),
    [
        (None, None, "no"),
        (None, "no", "no"),
        (None, "bf16", "bf16"),
        (None, "FP16", "fp16"),
        ("bf16", "bf16", "bf16"),
        ("bf16", "no", "bf16"),  # as the launcher has it that was asked for nothing
        ("no", None, "no"),
    ],
)
def test_the_precision_is_the_recipes_else_the_launchers(
    own: str | None, launched: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    made = recipe(*([] if own is None else [f'training.mixed_precision="{own}"']))
    assert as_launched(made).training.mixed_precision == used


@pytest.mark.parametrize(
    ("launched", "overrides", "words"),
    [
        ("bf16", ['training.mixed_precision="no"'], ["training.mixed_precision: no", "--mixed_precision bf16"]),
        ("fp16", ["training.mixed_precision=bf16"], ["training.mixed_precision: bf16", "--mixed_precision fp16"]),
        ("fp8", [], ["--mixed_precision fp8", "not supported"]),
        ("fp16", ["methods=[erm,sam]"], ["--mixed_precision fp16", "second pass of sam"]),
    ],
)
def test_a_conflict_is_refused(
    launched: str, overrides: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    with pytest.raises(UserError) as error:
        as_launched(recipe(*overrides))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_the_launchers_precision_is_nothing_to_a_frozen_encoder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert as_launched(recipe("encoder.trainable=false")).training.mixed_precision == "no"
    assert "--mixed_precision bf16" in caplog.text and "has no effect" in caplog.text


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "GPU 0,1 is selected"),
        ({"WORLD_SIZE": "2"}, "2 processes are launched for GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0", "ACCELERATE_USE_CPU": "False"}, "GPU 0 is selected"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{words}.*ACCELERATE_USE_CPU=1"):
        start(recipe())


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_no_wish_for_one(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    start(recipe())


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`accelerate launch … xdm_ft/run.py small.yaml`."""
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    script = [str(ROOT / "xdm_ft" / "run.py"), "small.yaml"]
    return subprocess.run([accelerate, "launch", *arguments, *script], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_real_launches() -> None:
    miniature.domainbed(Path("data"), "pacs")
    two = ("--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16")
    done = launch(*two, ACCELERATE_USE_CPU="1")
    assert done.returncode == 0, done.stderr
    results = json.loads(Path("out/small/results.json").read_text())
    assert results["environment"]["mixed_precision"] == "bf16" and results["environment"]["processes"] == 2
    assert results["recipe"]["training"]["mixed_precision"] == "bf16"
    other = launch("--num_processes", "1", "--cpu")  # the same recipe, in another precision
    assert other.returncode == 1
    assert "It differs in\n  training.mixed_precision\n" in other.stderr
    if not torch.cuda.is_available():
        gone = launch("--num_processes", "1", "--gpu_ids", "0")
        lines = [line for line in gone.stderr.splitlines() if line.startswith("xdm-ft:")]
        assert gone.returncode == 1 and len(lines) == 1 and "GPU 0 is selected" in lines[0], gone.stderr
