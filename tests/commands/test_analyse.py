"""`xdm-ft analyse`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import miniature
import numpy as np
import pytest
import torch
from analysed import analysis
from filelock import FileLock
from PIL import Image
from torch import nn

from xdm_ft.analysis.reconstruction import decoder, vgg_encoder
from xdm_ft.cli import analyse
from xdm_ft.cli.parser import main
from xdm_ft.report.finished import Run, read_run
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
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run's directory, elsewhere."""
    return Path(shutil.copytree(finished / "out/small", tmp_path / "moved"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("xdm_ft.analysis.embedding.STEPS", 5)
    yield


def refused(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that refuses an analysis."""
    capsys.readouterr()
    assert main(["analyse", str(run)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xdm-ft: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.slow
def test_text_and_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["analyse", str(run)]) == 0
    text = capsys.readouterr().out
    header, erm, xdomainmix, _, over, temperatures, last = text.splitlines()
    assert header.split() == ["covariances", "risk", "variance", "ECE", "scaled", "MMD²", "removal"]
    assert erm.startswith("<b>|x  ") and xdomainmix.startswith("xdomainmix")
    assert erm.split()[-2:-1] == ["–"] and "±" in erm
    explained = "what the columns mean: xdm-ft explain analysis"
    assert over == f"means over held-out domains ± standard deviation over seeds; {explained}"
    assert last == f"all measures: {run / 'analysis.json'}"
    found = analysis(run)
    assert len(found["models"]) == 2 * 2 * 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before | {
        run / "analysis.json": (run / "analysis.json").read_bytes()
    }
    assert main(["analyse", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["models"] == 8 and document["path"] == str(run / "analysis.json") and document["page"] is None
    assert document["images"] == found["images"] and document["notes"] == found["notes"]
    means = document["means"]["xdomainmix"]
    both = [(one["test_ece"]["mean"], one["test_ece_scaled"]["mean"]) for one in document["means"].values()]
    lower = sum(after < before for before, after in both)
    assert temperatures == f"temperature scaling lowers the ECE on held-out domains for {lower} of 2 methods"
    of_seeds = [
        sum(m["prediction_invariance"]["risk_variance"] for m in found["models"] if (m["method"], m["seed"]) == key) / 2
        for key in (("xdomainmix", 0), ("xdomainmix", 1))
    ]
    assert means["risk_variance"]["mean"] == pytest.approx(sum(of_seeds) / 2)
    assert means["risk_variance"]["std"] == pytest.approx(abs(of_seeds[0] - of_seeds[1]) / 2**0.5)
    assert means["random_removal_area"]["std"] is None  # measured for the first seed alone


def test_what_is_no_finished_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path / 'nothing'}: does not exist" in refused(tmp_path / "nothing", capsys)
    assert main(["analyse", str(run), "--reconstruct", str(tmp_path / "none")]) == 2
    assert f"xdm-ft: --reconstruct: {tmp_path / 'none'} lacks vgg_normalised.pth" in capsys.readouterr().err
    assert not (run / "analysis.json").exists()  # it looks for the weights before it measures
    (run / "state/records").mkdir(parents=True)
    assert refused(run, capsys) == (
        f"xdm-ft: {run}: the run has not finished; run its recipe again to finish it, then analyse it"
    )
    assert (run / "state/records").exists()
    shutil.rmtree(run / "state")
    with FileLock(run / LOCK):
        assert "another run is writing here" in refused(run, capsys)
    weights = next(run.rglob("train_val.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4])
    assert f"{weights}: is damaged" in refused(run, capsys)


def test_other_data_is_refused(finished: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(shutil.copytree(finished / "data", tmp_path / "data"))
    for name in ("recipe.yaml", "results.json"):
        assert str(finished / "data") in (run / name).read_text()
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(finished / "data"), str(data)))
    assert "was edited or is damaged" in refused(run, capsys)
    recipe.write_text(recipe.read_text().replace(str(data), str(finished / "data")))
    hidden = finished / "data.hidden"
    (finished / "data").rename(hidden)
    try:
        assert f"{finished / 'data'}" in refused(run, capsys)
        shutil.copytree(hidden, finished / "data")
        miniature.save(finished / "data/ink/cat/0.png", 7, 7, 7)
        assert "images have changed since this run started (data.content); analyse it with" in refused(run, capsys)
        (finished / "data/ink/cat/0.png").unlink()
        assert "the number of images" in refused(run, capsys)
    finally:
        shutil.rmtree(finished / "data", ignore_errors=True)
        hidden.rename(finished / "data")
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
    capsys.readouterr()
    assert main(["analyse", str(run)]) == 0
    note = "the features were computed by other libraries, or on another device, than those of the run"
    assert note in capsys.readouterr().err and analysis(run)["notes"][-1] == note


def test_a_run_without_a_trained_model(run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("xdm_ft.report.finished.Run.picked", [])
    assert main(["analyse", str(run)]) == 0
    assert capsys.readouterr().out == f"no trained model to measure; written to {run / 'analysis.json'}\n"
    assert analysis(run)["models"] == [] and analysis(run)["images"] == {}


def random_weights(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)  # torch's own would make all pixels alike
    return model


@pytest.mark.slow
def test_images_of_augmented_features(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyse", str(run)]) == 0
    before = (run / "analysis.json").read_bytes()
    assert "reconstruct" not in capsys.readouterr().out and not (run / "reconstruction").exists()
    torch.manual_seed(0)
    torch.save(random_weights(vgg_encoder()).state_dict(), tmp_path / "vgg_normalised.pth")
    torch.save(random_weights(decoder()).state_dict(), tmp_path / "decoder.pth")
    monkeypatch.setattr("xdm_ft.experiment.analyse.SIDE", 16)
    assert main(["analyse", str(run), "--reconstruct", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["reconstruction"]
    assert found["columns"] == ["original", "reconstructed", "augmented, τ_d 0.9", "augmented, τ_d 0.5"]
    assert [one["test_domains"] for one in found["sets"]] == [[BAD], ["ink"]]
    for one in found["sets"]:
        assert one["images"] == 8
        with Image.open(run / one["file"]) as image:
            assert image.size == (4 * 16, 8 * 16) and image.mode == "RGB" and not image.info
            pixels = np.asarray(image).reshape(8, 16, 4, 16, 3).swapaxes(1, 2)  # [image, column, H, W, 3]
        assert (pixels[:, 0].std((1, 2, 3)) > 0).all()
        for one_column, other in ((0, 1), (1, 2), (2, 3)):
            assert not np.array_equal(pixels[:, one_column], pixels[:, other])
    assert sorted(path.name for path in (run / "reconstruction").iterdir()) == ["%3Ci%3E%7Ca%2Cb.png", "ink.png"]
    assert (run / "analysis.json").read_bytes() == before
    monkeypatch.setattr("xdm_ft.analysis.reconstruction.fitted_domain_head", lambda *_: None)  # one training domain
    assert main(["analyse", str(run), "--reconstruct", str(tmp_path)]) == 0
    assert "no images for ink: XDomainMix needs two" in capsys.readouterr().out
    assert list((run / "reconstruction").iterdir()) == []
