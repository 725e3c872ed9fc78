"""`xdm-ft retrain --keep`: the model that it trains again becomes a run directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import miniature
import pytest

from xdm_ft.cli.cache import referenced_by
from xdm_ft.cli.parser import main
from xdm_ft.storage.results_file import COSTS, read_results
from xdm_ft.storage.run_directory import RunDirectory

RECIPE = """\
name: small
data: {{name: pacs, root: {data}, counts: any}}
protocol: {{name: leave_one_domain_out, test_domains: [sketch, photo], seeds: 2, selection: {selection}}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {cache}, workers: 0}}
methods: [erm]
training: {{steps: 6, batch_size: 4, evaluate_every: 3}}
report: {{page: false}}
output: {{dir: {out}}}
"""
MODEL = ["erm", "sketch", "1"]
FOLDER = "models/erm/sketch/seed1-trial0"


def fill(folder: Path, selection: str = "train_val") -> Path:
    """Returns the directory of a finished run."""
    miniature.domainbed(folder / "data", "pacs", per_class=3)
    text = RECIPE.format(data=folder / "data", cache=folder / "cache", out=folder / "out", selection=selection)
    (folder / "small.yaml").write_text(text)
    assert main(["run", str(folder / "small.yaml")]) == 0
    return folder / "out" / "small"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("finished"))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "events" not in str(path)}


@pytest.mark.slow
@pytest.mark.parametrize("exists", [False, True])
def test_what_is_kept_is_a_run_directory_with_this_model(
    exists: bool, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "a folder" / "kept 1"
    if exists:
        kept.mkdir(parents=True)
    before = files(run)
    capsys.readouterr()
    assert main(["retrain", str(run), *MODEL, "--keep", str(kept)]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"\nkept in {kept}\n") and said.count("weights the same bits") == 2
    weights = [f"{FOLDER}/{name}.safetensors" for name in ("train_val", "oracle", "predictions")]
    picked = json.loads((run / "results.json").read_text())["runs"]
    [own] = [r for r in picked if (r["method"], r["test_domains"], r["seed"]) == ("erm", ["sketch"], 1)]
    expected = {pick["weights"] for pick in own["selected"].values()} | {weights[2]}
    shared = ("test_images/sketch.safetensors", "training_features/sketch.safetensors")
    rest = {"recipe.yaml", "results.json", "run.lock", *shared}
    assert files(kept) == expected | rest
    for file in (*expected, *shared):
        assert (kept / file).read_bytes() == (run / file).read_bytes()
        assert RunDirectory(kept).verify_or_warn(file)
    results, original = read_results(kept / "results.json"), read_results(run / "results.json")
    [record] = results["runs"]
    measured = dict.fromkeys(COSTS, 0)
    assert {**record, **measured} == {**own, **measured}
    same = "tested_on", "findings"
    assert [results[key] for key in same] == [original[key] for key in same]
    assert results["environment"] == original["environment"]
    assert files(run) == before and [path.name for path in kept.parent.iterdir()] == ["kept 1"]
    assert referenced_by([str(kept)]) == referenced_by([str(run)])


@pytest.mark.slow
def test_what_is_kept_can_be_retrained_and_completed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, again = tmp_path / "kept", tmp_path / "again"
    assert main(["retrain", str(run), *MODEL, "--keep", str(kept)]) == 0
    capsys.readouterr()
    assert main(["retrain", str(kept), *MODEL, "--keep", str(again)]) == 0
    assert capsys.readouterr().out.count("weights the same bits") == 2
    assert (again / FOLDER / "train_val.safetensors").read_bytes() == (
        run / FOLDER / "train_val.safetensors"
    ).read_bytes()
    written = (kept / FOLDER / "train_val.safetensors").stat().st_ino
    assert main(["run", str(kept / "recipe.yaml")]) == 0
    said = capsys.readouterr().err
    assert "erm: 3 models" in said and "grows" not in said
    assert (kept / FOLDER / "train_val.safetensors").stat().st_ino == written
    completed, original = (json.loads((folder / "results.json").read_text()) for folder in (kept, run))
    assert completed["summary"] == original["summary"]


def test_a_folder_that_can_not_be_kept_in_is_refused_before_training(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    cases = {
        tmp_path / "full": "exists and is not an empty folder; name a new one",
        tmp_path / "file": "exists and is not an empty folder; name a new one",
        tmp_path / "file" / "below": "can not be written",
        tmp_path / ("x" * 300): "can not be written",
        tmp_path / "a\nb": "must be a text without slashes or control characters",
        run: "exists and is not an empty folder",
    }
    before = files(tmp_path)
    for keep, problem in cases.items():
        assert main(["retrain", str(run), *MODEL, "--keep", str(keep)]) == 2
        said = capsys.readouterr().err
        [line] = [line for line in said.splitlines() if line.startswith("xdm-ft: ")]
        assert problem in line and "Traceback" not in said, said
    assert files(tmp_path) == before and not list(tmp_path.glob(".*"))


def test_without_keep_nothing_is_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = files(run)
    assert main(["retrain", str(run), *MODEL]) == 0
    assert files(run) == before and not [path for path in tmp_path.iterdir() if "retrain" in path.name]


@pytest.mark.slow
def test_models_of_every_generation_are_trained_with_their_chunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fill(tmp_path, "cross_domain")
    shutil.copytree(run, tmp_path / "copy")
    grown = "methods=[rsc, erm]", "protocol.seeds=4"
    assert main(["run", str(tmp_path / "small.yaml"), *grown]) == 0
    capsys.readouterr()
    for method, seed in (("erm", "1"), ("erm", "3"), ("rsc", "0")):
        kept = tmp_path / f"kept-{method}{seed}"
        assert main(["retrain", str(run), method, "photo", seed, "--keep", str(kept)]) == 0
        assert capsys.readouterr().out.count("weights the same bits") == 3
        assert read_results(kept / "results.json")["grown_from"] == read_results(run / "results.json")["grown_from"]
        assert main(["retrain", str(kept), method, "photo", seed]) == 0
        assert capsys.readouterr().out.count("weights the same bits") == 3


@pytest.mark.slow
def test_a_domain_whose_name_holds_a_comma(tmp_path: Path) -> None:
    miniature.domainbed(tmp_path / "data", "pacs", per_class=3)
    (root := tmp_path / "data/PACS").joinpath("photo").rename(root / "pho,to")
    text = RECIPE.format(data=root, cache=tmp_path / "cache", out=tmp_path / "out", selection="train_val")
    (tmp_path / "small.yaml").write_text(text.replace("name: pacs", "name: folder").replace(", counts: any", ""))
    only = "protocol.test_domains=['pho,to']", "protocol.seeds=1"
    assert main(["run", str(tmp_path / "small.yaml"), *only]) == 0
    run, kept = tmp_path / "out/small", tmp_path / "kept"
    assert main(["retrain", str(run), "erm", "pho,to", "0", "--keep", str(kept)]) == 0
    assert {file for file in files(kept) if file.startswith("test_images")} == {
        file for file in files(run) if file.startswith("test_images")
    }
    assert main(["export", str(kept), str(tmp_path / "model"), "--held-out", "pho,to"]) == 0
