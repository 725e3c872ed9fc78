"""A model whose loss is not finite fails by itself, with its step and its images; gaps in the data are told."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import miniature
import pytest
import torch

from xdm_ft.cli.parser import main
from xdm_ft.experiment import pieces
from xdm_ft.runtime.machine import out_of_memory_as_user_error
from xdm_ft.training.end_to_end.gradients import StepGradients

RECIPE = """\
name: small
data: {name: folder, root: data/PACS}
protocol: {test_domains: [sketch], seeds: 1}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
features: {dir: cache, workers: 0}
methods: [erm, {name: vrex, penalty_weight: 1.0e+300, anneal_steps: 0}, xdomainmix]
training: {steps: 4, batch_size: 2, evaluate_every: 2}
report: {page: false}
output: {dir: out}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    base = miniature.domainbed(tmp_path / "data", "pacs", per_class=3)
    if base.name != "PACS":
        base.rename(base.with_name("PACS"))
    Path("small.yaml").write_text(RECIPE)
    return tmp_path / "data/PACS"


def results() -> dict:
    return json.loads(Path("out/small/results.json").read_text())


@pytest.mark.parametrize("trainable", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_fails_alone(trainable: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "small.yaml", f"encoder.trainable={trainable}"]) == 1
    status = {run["method"]: run["status"] for run in results()["runs"]}
    assert status == {"erm": "ok", "vrex": "failed", "xdomainmix": "ok"}
    [failed] = [run for run in results()["runs"] if run["status"] == "failed"]
    assert re.search(r"loss .*at step \d of 4; .*rows", failed["reason"]), failed["reason"]
    told = capsys.readouterr()
    assert "vrex: 1 of 1 runs failed" in told.out and "Traceback" not in told.err
    assert "- vrex: 1 of 1 runs failed" in Path("out/small/results.md").read_text()


def test_a_class_missing_in_a_domain_is_told(here: Path) -> None:
    shutil.rmtree(here / "photo" / "dog")
    assert main(["run", "small.yaml", "methods=[erm, xdomainmix]"]) == 0
    protocol = results()["summary"][0]["protocol"]
    assert "no training image of dog in photo" in protocol


def test_a_validation_part_that_is_empty_is_told(here: Path) -> None:
    for path in (here / "photo").glob("*/*"):
        if path.name != "000.png" or path.parent.name not in ("dog", "horse"):
            path.unlink()
    assert main(["run", "small.yaml", "methods=[erm]"]) == 0
    protocol = results()["summary"][0]["protocol"]
    assert "no validation image of photo" in protocol and "no training image of elephant in photo" in protocol


def one_line(text: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith("xdm-ft:")]
    assert "Traceback" not in text, text
    return line


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_heads_that_do_not_fit_the_memory(
    cores: int, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "own_cores", lambda: cores)
    assert main(["run", "small.yaml", "methods=[erm,irm]", "training.batch_size=1000000000000"]) == 2
    line = one_line(capfd.readouterr().err)
    assert re.search("(erm|irm), one head: does not fit the memory of this machine; lower training.batch_size", line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        None,
    ],
)
def test_a_model_that_does_not_fit_the_memory(
    error: Exception | None, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_out(*arguments: object) -> None:
        torch.empty(1 << 50)  # the real thing
        raise AssertionError

    def raises(*arguments: object) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr(StepGradients, "run", runs_out if error is None else raises)
    assert main(["run", "small.yaml", "methods=[erm]", "encoder.trainable=true"]) == 2
    line = one_line(capfd.readouterr().err)
    assert "erm, sketch held out, seed 0: does not fit " in line
    assert line.endswith("; lower training.batch_size or raise training.accumulation")


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory_as_user_error("erm", "lower it"):
        raise RuntimeError("shapes do not match")
