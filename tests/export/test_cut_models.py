"""Models that trained a part of an encoder, or stand beside others under several: exported, they are as recorded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import miniature
import numpy as np
import pytest
import small_runs
import timm
import torch
from exported import CLIP, DATA, RUN, choice_of, exported, held_out, recorded
from PIL import Image
from safetensors.torch import load_file, save_file

import xdm_ft
from xdm_ft.cli.evaluate import evaluate
from xdm_ft.cli.export import export_model
from xdm_ft.cli.parser import main
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.export.directory import read_config
from xdm_ft.export.hub import _checked_files
from xdm_ft.export.onnx import PACKAGES
from xdm_ft.export.predictor import load
from xdm_ft.report.finished import read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory

VIT = "name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}"
TWO = f"[{{label: vit, {VIT}}}, {{label: cnn, name: timm, model: test_resnet, preprocessing: {{size: 32}}}}]"
LORA = "{name: erm, label: lora, trainable: {lora: {rank: 2, blocks: 2, dropout: 0.1}}}"
LAST = "{name: erm, label: last, trainable: {blocks: 1}}"


def trained(folder: Path, *overrides: str, encoders: str | None = None) -> dict[str, Any]:
    """results.json of a run with photo held out; the folder is the current one."""
    if not (folder / "data").exists():
        miniature.domainbed(folder / "data", "pacs", per_class=3)
    text = small_runs.RECIPE.replace("steps: 10", "steps: 4")
    if encoders is not None:
        text = re.sub("encoder: .*", f"encoders: {encoders}", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_runs, "RECIPE", text)
        return small_runs.results("protocol.test_domains=[photo]", *overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head and a last block, each under two encoders, and the exports `head` and `last` of those under the first."""
    made = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        trained(made, f"methods=[{{name: erm, label: head}}, {LAST}]", encoders=TWO)
        for label in ("head", "last"):
            export_model(str(RUN), label, Choice(f"{label} @ vit", ("photo",)))
    return made


def copied(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RUN / "results.json").read_text())
    return found


@pytest.mark.slow
class TestTwoEncoders:
    @pytest.fixture(autouse=True)
    def here(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)

    def test_models_predict_what_the_run_recorded(self) -> None:
        paths, records = held_out(), results()["runs"]
        assert [one["method"] for one in records] == ["head @ vit", "last @ vit", "head @ cnn", "last @ cnn"]
        for record in records:
            model = xdm_ft.load(RUN, method=record["method"], held_out="photo")
            np.testing.assert_allclose(model.predict_proba(paths), recorded(record), rtol=0, atol=1e-6)
            assert model.config.encoder.width == (64 if "vit" in record["method"] else 96)
            assert np.isfinite(model.distance(paths)).all()
        for record, name in zip(records, ("head", "last"), strict=False):
            found = load(name).predict_proba(paths)
            np.testing.assert_allclose(found, recorded(record), rtol=0, atol=1e-6)

    def test_only_what_was_trained_is_exported(self) -> None:
        assert not list(Path("head").glob("encoder*")) and not Path("last/encoder.safetensors").exists()
        part = load_file("last/encoder_part.safetensors")
        before, after = (load(name).module.encoder.state_dict() for name in ("head", "last"))
        changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert changed == set(part)
        assert {name.split(".")[1] for name in changed} == {"blocks", "norm"}
        assert {name.split(".")[2] for name in changed if "blocks" in name} == {"5"}
        card = Path("last/README.md").read_text()
        assert "encoder: last 1 block trained; class head trained" in card

    def test_each_model_measures_distances_in_its_own_features(self) -> None:
        run = read_run(RUN)
        for label, file in (
            ("head @ vit", "training_features/vit/photo.safetensors"),
            ("last @ cnn", "models/last %40 cnn/photo/seed0-trial0/train_val.reference.safetensors"),
        ):
            found = read_parts(run, Choice(label, ("photo",))).reference
            kept, _ = RunDirectory(RUN).tensors(file)
            assert found is not None
            np.testing.assert_array_equal(found.means, kept["means"].numpy())

    def test_the_choice_names_the_encoder(self) -> None:
        with pytest.raises(UserError, match='--method: no model last @ cmn; did you mean "last @ cnn"'):
            xdm_ft.load(RUN, method="last @ cmn")

    def test_the_part_goes_to_the_hub(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        copied(folder / "last", tmp_path / "last", monkeypatch)
        config, _ = read_config(tmp_path / "last")
        assert "encoder_part.safetensors" in _checked_files(tmp_path / "last", config)
        (tmp_path / "last/encoder_part.safetensors").unlink()
        with pytest.raises(UserError, match=r"lacks encoder_part\.safetensors; export the model again"):
            _checked_files(tmp_path / "last", config)

    def test_a_part_that_is_missing_or_of_another_model_is_one_line(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copied(folder / "last", tmp_path / "last", monkeypatch)
        part = tmp_path / "last/encoder_part.safetensors"
        shutil.copy(tmp_path / "last/model.safetensors", part)
        with pytest.raises(UserError, match=r"encoder_part\.safetensors: is damaged .* export the model again"):
            load(tmp_path / "last")
        part.unlink()
        with pytest.raises(UserError, match=r"encoder_part\.safetensors: does not exist; export the model again"):
            load(tmp_path / "last")


@pytest.mark.slow
class TestTwoEncodersWhole:
    """The same run; a copy of it, which tests may change."""

    @pytest.fixture(autouse=True)
    def here(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        copied(folder, tmp_path, monkeypatch)

    def test_the_whole_encoder_loads_with_its_library(self) -> None:
        model, paths = exported(Choice("last @ vit", ("photo",)), "whole", with_encoder=True), held_out()
        assert not Path("whole/encoder_part.safetensors").exists()
        own = timm.create_model("test_vit", num_classes=0, img_size=32).eval()
        own.load_state_dict(load_file("whole/encoder.safetensors"))
        with torch.no_grad():
            z = own(torch.stack([model.transform(Image.open(path).convert("RGB")) for path in paths]))
        np.testing.assert_allclose(z.numpy(), model.encode(paths), rtol=0, atol=1e-5)

    def test_the_final_fit_is_of_one_encoder(self) -> None:
        export_model(str(RUN), "final", Choice())
        final = results()["final_fit"]
        model = load("final")
        assert final["status"] == "ok" and model.config.method["label"] == final["method"] and " @ " in final["method"]
        assert model.config.chosen.startswith("final fit: ")
        assert np.isfinite(model.distance(held_out())).all()

    def test_an_export_is_evaluated_and_a_run_predicts(self) -> None:
        record = next(one for one in results()["runs"] if one["method"] == "last @ cnn")
        model = exported(choice_of(record), "cnn", with_encoder=True)
        found = evaluate(model, "cnn", str(DATA / "photo"), group=None, domains=None, batch_size=4)
        expected = record["selected"]["train_val"]["metrics"]["test"]["accuracy"]
        assert found.whole.metrics["accuracy"].value == pytest.approx(expected)
        command = [
            "predict",
            str(RUN),
            str(DATA / "photo"),
            "--method",
            "last @ cnn",
            "--held-out",
            "photo",
            "--probabilities",
            "--out",
        ]
        assert main([*command, "found.csv"]) == 0 and Path("found.csv").read_text().startswith("path,label")

    def test_the_analysis_measures_the_trained_part(self) -> None:
        assert main(["analyse", str(RUN)]) == 0
        measured = json.loads((RUN / "analysis.json").read_text())["models"]
        records = {one["method"]: one for one in results()["runs"]}
        assert [one["method"] for one in measured] == list(records)
        for one in measured:
            test = records[one["method"]]["selected"]["train_val"]["metrics"]["test"]
            for name in ("nll", "ece"):
                assert one["calibration"]["domains"]["photo"][name] == pytest.approx(test[name], rel=1e-4), one[
                    "method"
                ]

    def test_a_kept_retraining_is_a_run_with_the_same_model(self) -> None:
        assert main(["retrain", str(RUN), "last @ cnn", "photo", "0", "--keep", "kept"]) == 0
        again, before = (load(run, choice=Choice("last @ cnn", ("photo",))) for run in ("kept", RUN))
        np.testing.assert_array_equal(again.predict_proba(held_out()), before.predict_proba(held_out()))
        assert np.isfinite(again.distance(held_out())).all()


@pytest.mark.slow
class TestOneEncoder:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 5e-3)])
    def test_low_rank_updates_blocks_and_all(self, tmp_path: Path, precision: str, tolerance: float) -> None:
        """Cached activations in bf16 are rounded, and the exported model computes all in float32."""
        both = "{name: erm, label: all, trainable: true}"
        found = trained(tmp_path, f"methods=[{LAST}, {LORA}, {both}]", f"features.precision={precision}")
        paths = held_out()
        for record in found["runs"]:
            model = exported(choice_of(record), record["method"])
            np.testing.assert_allclose(model.predict_proba(paths), recorded(record), rtol=0, atol=tolerance)
        part = load_file("lora/encoder_part.safetensors")
        assert len(part) == 8 and all(".blocks.4." in name or ".blocks.5." in name for name in part)
        assert "LoRA of rank 2 in the last 2 blocks" in Path("lora/README.md").read_text()
        assert Path("all/encoder.safetensors").exists() and not Path("all/encoder_part.safetensors").exists()

    @pytest.mark.needs(*PACKAGES)
    def test_onnx_of_low_rank_updates(self, tmp_path: Path) -> None:
        found = trained(tmp_path, f"methods=[{LORA}]")
        written = export_model(str(RUN), "model", choice_of(found["runs"][0]), onnx=True)
        assert written.document["onnx"].difference < 1e-5

    def test_an_encoder_from_a_file(self, tmp_path: Path) -> None:
        torch.manual_seed(3)
        other = timm.create_model("test_vit", num_classes=0, img_size=32)
        save_file(other.state_dict(), "own.safetensors")
        found = trained(tmp_path, f"methods=[{LAST}]", "encoder.weights=./own.safetensors")
        (record,), paths = found["runs"], held_out()
        whole = exported(choice_of(record), "whole")
        assert Path("whole/encoder.safetensors").exists() and not Path("whole/encoder_part.safetensors").exists()
        answer = export_model(str(RUN), "part", choice_of(record), with_encoder=False)
        assert answer.document["needs_encoder_weights"] and Path("part/encoder_part.safetensors").exists()
        part = load("part", encoder_weights="own.safetensors")
        for model in (whole, part):
            np.testing.assert_allclose(model.predict_proba(paths), recorded(record), rtol=0, atol=1e-6)
        before = json.loads(Path("part/config.json").read_text())["encoder"]["part"]["named_xxh3"]
        assert before in Path("part/README.md").read_text()
        with pytest.raises(UserError, match=f"come from a file .xxh3 {before}"):
            load("part")
        shutil.copy("whole/encoder.safetensors", "wrong.safetensors")  # after training, not before
        with pytest.raises(UserError, match=f"are not those that the model was trained with .*needed {before}"):
            load("part", encoder_weights="wrong.safetensors")

    def test_wise_ft_moves_the_trained_part_alone(self, tmp_path: Path) -> None:
        tuned = "{name: erm, head_init: zero_shot, label: tuned, trainable: {blocks: 1}}"
        found = trained(tmp_path, CLIP, "training.lr=0.01", f"methods=[zero_shot, {tuned}]")
        paths = held_out()
        models = {
            alpha: exported(Choice("tuned", ("photo",)), f"at-{alpha}", wise_ft=alpha) for alpha in (0.0, 0.5, 1.0)
        }
        for alpha, record in ((0.0, found["runs"][0]), (1.0, found["runs"][1])):
            np.testing.assert_allclose(models[alpha].predict_proba(paths), recorded(record), rtol=0, atol=1e-6)
        start, middle, end = (one.module.encoder.state_dict() for one in models.values())
        part = set(load_file("at-0.5/encoder_part.safetensors"))
        assert {name for name in end if not torch.equal(start[name], end[name])} == part
        for name in part:
            torch.testing.assert_close(middle[name], (start[name] + end[name]) / 2)

    def test_a_run_of_an_earlier_version(self, tmp_path: Path) -> None:
        """Its files say by a boolean whether the encoder's weights are in them, and not how much of it trained."""
        both = "{name: erm, label: all, trainable: true}"
        found = trained(tmp_path, f"methods=[{{name: erm, label: head}}, {both}]")
        directory = RunDirectory(RUN)
        for record, kept in zip(found["runs"], (False, True), strict=True):
            file = record["selected"]["train_val"]["weights"]
            state, about = directory.tensors(file)
            encoder = json.loads(about["encoder"])
            del encoder["trainable"], encoder["label"]
            about["encoder"] = json.dumps(encoder | {"in_this_file": kept})
            directory.write_tensors(file, state, {key: value for key, value in about.items() if key != "file"})
            model = xdm_ft.load(RUN, method=record["method"], held_out="photo")
            assert model.config.encoder.trained is kept
            np.testing.assert_allclose(model.predict_proba(held_out()), recorded(record), rtol=0, atol=1e-6)
