"""`xdm-ft analyse` on one finished run: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import miniature
import numpy as np
import pytest
import small_runs
import torch
import yaml
from filelock import FileLock
from PIL import Image
from torch import nn

from xdm_ft.analysis.reconstruction import decoder, vgg_encoder
from xdm_ft.cli import analyse
from xdm_ft.cli.parser import main
from xdm_ft.experiment.resume import written_recipe
from xdm_ft.results.run import Run, read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import LOCK

RECIPE = """\
name: small
data: {{name: folder, root: {folder}/data}}
protocol: {{test_domains: ["{bad}", ink], seeds: 2, val_fraction: 0.4}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {folder}/cache, workers: 0}}
methods: [{{name: erm, label: "<b>|x"}}, {{name: xdomainmix, warmup_steps: 2}}]
training: {{steps: 6, batch_size: 4, evaluate_every: 3}}
report: {{page: false}}
output: {{dir: {folder}/out}}
"""
BAD = "<i>|a,b"
FOLDER = "models/xdomainmix/%3Ci%3E%7Ca%2Cb/seed1-trial0"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    for d, domain in enumerate((BAD, "ink", "photo")):
        for c, name in enumerate(("cat", "dog")):
            for i in range(10):
                miniature.save(folder / "data" / domain / name / f"{i}.png", c, d, i)
    (folder / "small.yaml").write_text(RECIPE.format(folder=folder, bad=BAD))
    assert main(["run", str(folder / "small.yaml")]) == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A copy of the run's directory, elsewhere."""
    monkeypatch.setattr("xdm_ft.analysis.embedding.STEPS", 5)
    capsys.readouterr()
    return Path(shutil.copytree(finished / "out/small", tmp_path / "moved"))


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "events" not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that refuses a command."""
    assert main([*map(str, arguments)]) == 2
    error = capsys.readouterr().err
    [line] = [line for line in error.splitlines() if line.startswith("xdm-ft: ")]
    assert "Traceback" not in error
    return line


# ---- analyse


@pytest.mark.slow
def test_the_text_and_the_document_of_an_analysis(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(run)
    assert main(["analyse", str(run)]) == 0
    header, erm, xdomainmix, _, over, chance, temperatures, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["covariances", "risk", "variance", "ECE", "scaled", "MMD²", "removal"]
    assert erm.startswith("<b>|x  ") and xdomainmix.startswith("xdomainmix")
    assert erm.split()[-2:-1] == ["–"] and "±" in erm
    explained = "what the columns mean: xdm-ft explain analysis"
    assert over == f"means over held-out domains ± standard deviation over seeds; {explained}"
    assert last == f"all measures: {run / 'analysis.json'}"
    written = small_runs.document(run, "analysis")
    assert len(written["models"]) == 2 * 2 * 2
    shares = []
    for method in dict.fromkeys(m["method"] for m in written["models"]):
        parts = [m["representation_invariance"] for m in written["models"] if m["method"] == method]
        shares.append(round(100 * sum(p["paper_noise"] for p in parts) / sum(p["paper"] for p in parts)))
    share = f"{min(shares)}" if len({*shares}) == 1 else f"{min(shares)} to {max(shares)}"
    assert chance == f"covariances: {share}% of the distance is chance, which equal domains would show too"
    assert files(run) == before | {"analysis.json": (run / "analysis.json").read_bytes()}
    assert main(["analyse", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["models"] == 8 and document["path"] == str(run / "analysis.json") and document["page"] is None
    assert document["images"] == written["images"] and document["notes"] == written["notes"]
    calibration = [(m["test_ece"]["mean"], m["test_ece_scaled"]["mean"]) for m in document["means"].values()]
    lower = sum(scaled < plain for plain, scaled in calibration)
    assert temperatures == f"temperature scaling lowers the ECE on held-out domains for {lower} of 2 methods"
    means, models = document["means"]["xdomainmix"], [m for m in written["models"] if m["method"] == "xdomainmix"]
    variances = [[m["prediction_invariance"]["risk_variance"] for m in models if m["seed"] == s] for s in (0, 1)]
    first, second = (sum(of_seed) / 2 for of_seed in variances)
    assert means["risk_variance"]["mean"] == pytest.approx((first + second) / 2)
    assert means["risk_variance"]["std"] == pytest.approx(abs(first - second) / 2**0.5)
    domains = [m["calibration"]["domains"].values() for m in models]
    eces = [domain["ece"] for of_model in domains for domain in of_model if domain["role"] == "test"]
    assert means["test_ece"]["mean"] == pytest.approx(sum(eces) / 4)
    assert means["random_removal_area"]["std"] is None  # measured for the first seed alone


def test_what_is_no_finished_run_is_not_analysed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = tmp_path / "nothing"
    assert f"{nothing}: does not exist" in refused(capsys, "analyse", nothing)
    weights = f"--reconstruct: {nothing} lacks vgg_normalised.pth"
    assert weights in refused(capsys, "analyse", run, "--reconstruct", nothing)
    assert not (run / "analysis.json").exists()  # it looks for the weights before it measures
    (run / "state/records").mkdir(parents=True)
    unfinished = "the run has not finished; wait for it, or run its recipe again if it was stopped"
    assert refused(capsys, "analyse", run) == f"xdm-ft: {run}: {unfinished}"
    assert (run / "state/records").exists()
    shutil.rmtree(run / "state")
    with FileLock(run / LOCK):
        held = (
            "another process (xdm-ft run, analyse, audit or report) is writing here; wait until it ends and try again"
        )
        assert refused(capsys, "analyse", run) == f"xdm-ft: {run}: {held}", "output.dir is no remedy here"
    file = next(run.rglob("train_val.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])
    assert f"{file}: is damaged" in refused(capsys, "analyse", run)


def test_a_run_from_before_a_key_existed_is_not_edited(run: Path) -> None:
    values = yaml.safe_load((run / "recipe.yaml").read_text())
    before = json.loads((run / "results.json").read_text())["recipe"]
    for recipe in (values, before):
        del recipe["data"]["domain_min"]
    (run / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert written_recipe(run, before).values == values
    with pytest.raises(UserError, match=r"was edited or damaged: .*training\.steps"):
        written_recipe(run, before | {"training": before["training"] | {"steps": 1}})


def test_other_data_is_refused(finished: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, data, hidden = run / "recipe.yaml", finished / "data", finished / "data.hidden"
    text = recipe.read_text()
    assert str(data) in text and str(data) in (run / "results.json").read_text()
    recipe.write_text(text.replace(str(data), str(hidden)))
    assert "was edited or damaged" in refused(capsys, "analyse", run)
    recipe.write_text(text)
    data.rename(hidden)
    try:
        assert str(data) in refused(capsys, "analyse", run)
        shutil.copytree(hidden, data)
        miniature.save(data / "ink/cat/0.png", 7, 7, 7)
        changed = "images have changed since this run started (data.content); analyse it with"
        assert changed in refused(capsys, "analyse", run)
        (data / "ink/cat/0.png").unlink()
        assert "the number of images" in refused(capsys, "analyse", run)
    finally:
        shutil.rmtree(data, ignore_errors=True)
        hidden.rename(data)
    assert not (run / "analysis.json").exists()


@pytest.mark.slow
def test_features_of_another_device_are_noted(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def elsewhere(folder: Path) -> Run:
        run = read_run(folder)
        run.results["environment"]["features"] = {"key": "of a GPU"}
        return run

    monkeypatch.setattr(analyse, "read_run", elsewhere)
    assert main(["analyse", str(run)]) == 0
    note = "the features were computed by other libraries, or on another device, than those of the run"
    assert note in capsys.readouterr().err and small_runs.document(run, "analysis")["notes"][-1] == note


def test_a_run_without_a_trained_model(run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("xdm_ft.results.run.Run.picked", [])
    assert main(["analyse", str(run)]) == 0
    assert capsys.readouterr().out == f"no trained model to measure; written to {run / 'analysis.json'}\n"
    assert small_runs.document(run, "analysis")["models"] == [] and small_runs.document(run, "analysis")["images"] == {}
    failed = [dataclasses.replace(record, status="failed", reason="a nan") for record in read_run(run).every]
    monkeypatch.setattr("xdm_ft.cli.export.read_run", lambda of: dataclasses.replace(read_run(of), every=failed))
    words = f"no trained model; all {len(failed)} failed, the first: a nan"
    assert words in refused(capsys, "export", run, run.parent / "model")


@pytest.mark.slow
def test_images_of_augmented_features(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyse", str(run)]) == 0
    before = (run / "analysis.json").read_bytes()
    assert "reconstruct" not in capsys.readouterr().out and not (run / "reconstruction").exists()
    torch.manual_seed(0)
    for name, model in (("vgg_normalised", vgg_encoder()), ("decoder", decoder())):
        for layer in model:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)  # torch's own would make all pixels alike
        torch.save(model.state_dict(), tmp_path / f"{name}.pth")
    monkeypatch.setattr("xdm_ft.experiment.analyse.SIDE", 16)
    assert main(["analyse", str(run), "--reconstruct", str(tmp_path), "--json"]) == 0
    reconstruction = json.loads(capsys.readouterr().out)["reconstruction"]
    assert reconstruction["columns"] == ["original", "reconstructed", "augmented, τ_d 0.9", "augmented, τ_d 0.5"]
    assert [images["test_domains"] for images in reconstruction["sets"]] == [[BAD], ["ink"]]
    for images in reconstruction["sets"]:
        assert images["images"] == 8
        with Image.open(run / images["file"]) as image:
            assert image.size == (4 * 16, 8 * 16) and image.mode == "RGB" and not image.info
            pixels = np.asarray(image).reshape(8, 16, 4, 16, 3).swapaxes(1, 2)  # [image, column, H, W, 3]
        assert (pixels[:, 0].std((1, 2, 3)) > 0).all()
        assert not any(np.array_equal(pixels[:, column], pixels[:, column + 1]) for column in range(3))
    assert sorted(path.name for path in (run / "reconstruction").iterdir()) == ["%3Ci%3E%7Ca%2Cb.png", "ink.png"]
    assert (run / "analysis.json").read_bytes() == before
    monkeypatch.setattr("xdm_ft.analysis.reconstruction.fit_domain_head", lambda *_: None)  # one training domain
    assert main(["analyse", str(run), "--reconstruct", str(tmp_path)]) == 0
    assert "no images for ink: XDomainMix needs two" in capsys.readouterr().out
    assert list((run / "reconstruction").iterdir()) == []
