"""An exported model predicts what its run has recorded; a directory that is damaged or foreign is one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import miniature
import numpy as np
import pytest
import small_runs
import torch
from exported import CLIP, DATA, END_TO_END, RUN, choice_of, exported, held_out, recorded, run
from PIL import Image
from safetensors.torch import load_file, save_file
from small_models import CLASSES, parts, timm

import xdm_ft
from xdm_ft.cli.export import export_model
from xdm_ft.cli.parser import main
from xdm_ft.export.choose import Choice
from xdm_ft.export.directory import write_directory
from xdm_ft.export.predictor import load
from xdm_ft.features.key import weights_digest
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.digests import json_digest

pytestmark = pytest.mark.usefixtures("small_pacs")
PHOTO = ("photo",)
FOLD = Choice("erm", PHOTO)
HEADS = (
    "methods=[linear_probe, erm, {name: erm, head: cosine, label: cosine}, "
    "{name: erm, head: mlp, mlp.hidden_width: 8, label: mlp}, {name: erm, normalize: true, label: unit}]"
)


def check(results: dict[str, Any], **how: Any) -> None:
    """Every model of the run, exported and loaded, gives the recorded probabilities."""
    paths = held_out()
    for number, record in enumerate(results["runs"]):
        target = f"{'with' if how.get('with_encoder') else 'without'}-{number}"
        model = exported(choice_of(record), target, **how)
        np.testing.assert_allclose(model.predict_proba(paths), recorded(record), rtol=0, atol=1e-6)
        assert model.predict(paths) == [model.class_names[n] for n in recorded(record).argmax(1)]
        assert xdm_ft.load(RUN, method=record["method"], held_out="photo").predict(paths) == model.predict(paths)


def test_a_head_with_and_without_the_encoder() -> None:
    results = run("methods=[{name: erm, head: cosine, label: cosine}]")
    check(results)
    check(results, with_encoder=True)


@pytest.mark.slow
def test_every_head_with_and_without_the_encoder() -> None:
    results = run(HEADS)
    check(results)
    check(results, with_encoder=True)
    assert not Path("without-0/encoder.safetensors").exists() and Path("with-0/encoder.safetensors").exists()


@pytest.mark.slow
def test_clip_with_and_without_the_encoder() -> None:
    results = run(CLIP, "methods=[zero_shot, {name: erm, head_init: zero_shot, label: from text}]")
    check(results)
    check(results, with_encoder=True)


@pytest.mark.slow
def test_models_trained_end_to_end_bring_their_encoder() -> None:
    check(run(*END_TO_END, "methods=[erm, linear_probe]"))
    assert load("without-0").config.encoder.trained and not load("without-1").config.encoder.trained


@pytest.mark.slow
def test_clip_trained_end_to_end() -> None:
    check(run(CLIP, *END_TO_END, "methods=[{name: erm, head_init: zero_shot}]"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_another_precision_is_near(precision: str) -> None:
    results = run("methods=[erm]", f"features.precision={precision}")
    export_model(str(RUN), "model", choice_of(results["runs"][0]))
    paths = held_out()
    assert load("model").module.precision == precision
    np.testing.assert_allclose(load("model").predict_proba(paths), recorded(results["runs"][0]), rtol=0, atol=1e-2)
    whole = load("model", precision="fp32").predict_proba(paths)
    np.testing.assert_allclose(whole, recorded(results["runs"][0]), rtol=0, atol=1e-2)
    with pytest.raises(UserError, match="precision: half is not known"):
        load("model", precision="half")


@pytest.mark.slow
def test_all_kinds_of_images_give_the_same(tmp_path: Path) -> None:
    run("methods=[erm]")
    model = exported(FOLD)
    path = held_out()[0]
    with Image.open(path) as image:
        kinds = [path, Path(path), image.copy(), np.asarray(image)]
    found = model.predict_proba(kinds)
    assert found.shape == (4, len(model.class_names)) and np.ptp(found, axis=0).max() < 1e-6
    assert model.encode(path).shape == (1, model.config.encoder.width)
    assert model.predict([]) == [] and model.predict_proba([]).shape == (0, len(model.class_names))
    pixels = torch.stack([model.transform(image)])
    torch.testing.assert_close(model.module(pixels).softmax(1), torch.from_numpy(found[:1]))
    grey = np.asarray(image)[..., 0]
    assert np.array_equal(model.predict_proba(grey), model.predict_proba(np.stack([grey] * 3, 2)))
    for wrong in (np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8), "no such file", str(tmp_path)):
        with pytest.raises(UserError):
            model.predict(wrong)


@pytest.mark.slow
def test_a_fresh_process_runs_the_example() -> None:
    run("methods=[erm]")
    model = exported(FOLD)
    paths = held_out()[:2]
    done = subprocess.run([sys.executable, "model/example.py", *paths], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split(": ")[1].split(" (")[0] for line in lines] == model.predict(paths)
    assert len(Path("model/example.py").read_text().splitlines()) == 10


class TestWhichModel:
    @pytest.mark.slow
    def test_the_final_fit_is_the_default_and_is_trained_once(self) -> None:
        run("methods=[erm, linear_probe]")
        assert "final_fit" not in json.loads((RUN / "results.json").read_text())
        answer = export_model(str(RUN), "model", Choice())
        assert answer.document["model"].startswith("final fit: ") and load("model").config.method["test_domains"] == []
        assert json.loads((RUN / "results.json").read_text())["recipe"]["output"] == {"dir": "output"}, "as before"
        before = (RUN / "models/final_fit/linear_probe/model.safetensors").stat().st_mtime_ns
        export_model(str(RUN), "again", Choice(), best=True)
        assert (RUN / "models/final_fit/linear_probe/model.safetensors").stat().st_mtime_ns == before
        assert Path("model/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()
        assert load(str(RUN)).config.chosen == answer.document["model"]

    @pytest.mark.slow
    def test_final_fits_of_several_methods_lie_side_by_side(self, caplog: pytest.LogCaptureFixture) -> None:
        run("methods=[erm, linear_probe]", "protocol.seeds=2")
        with caplog.at_level("INFO", "xdm_ft"):
            named = export_model(str(RUN), "model", Choice(method="erm"))
        assert "trains the final fit of erm on all labelled images: about" in caplog.text
        assert "erm was named (" in named.document["model"] and load("model").config.method["test_domains"] == []
        before = json.loads((RUN / "results.json").read_text())
        assert [*before["final_fits"]] == ["erm"] and load(RUN, choice=Choice("erm")) is not None
        export_model(str(RUN), "chosen", Choice())
        export_model(str(RUN), "members", Choice("erm"), ensemble=True)
        found = json.loads((RUN / "results.json").read_text())
        both = {str(seed): f"models/final_fit/erm/{name}.safetensors" for seed, name in enumerate(("model", "seed1"))}
        assert found["final_fits"]["erm"] == before["final_fits"]["erm"] | {"seeds": both}
        assert found["final_fit"]["method"] == "linear_probe"
        assert found["final_fit"] == found["final_fits"][found["final_fit"]["method"]]
        for method, fit in found["final_fits"].items():
            assert fit["weights"] == f"models/final_fit/{method}/model.safetensors" and (RUN / fit["weights"]).exists()
        # the recipe goes on as before; a fit stays as long as its runs determine the same one
        again = run("methods=[erm, linear_probe]", "protocol.seeds=2")
        assert again["final_fits"] == found["final_fits"] and again["recipe"]["protocol"]["final_fit"] is False
        grown = run("methods=[erm, linear_probe, vrex]", "protocol.seeds=2")
        assert {method: fit["weights"] for method, fit in grown["final_fits"].items()} == {
            method: fit["weights"] for method, fit in found["final_fits"].items()
        }

    @pytest.mark.slow
    def test_a_killed_export_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from xdm_ft.experiment import pieces

        run("methods=[erm]", "protocol.seeds=3")
        save, saved = pieces.save, list[int]()

        def once(outcomes: Any, directory: Any, writes: bool) -> list[Any]:
            kept = [*outcomes][:1] if not saved else [*outcomes]
            records = save(kept, directory, writes)
            saved.extend(outcome.line["seed"] for outcome in kept)
            if len(saved) == 1:
                raise InterruptedError
            return records

        monkeypatch.setattr(pieces, "save", once)
        with pytest.raises(InterruptedError):
            export_model(str(RUN), "model", Choice(), ensemble=True)
        assert not Path("model").exists() and (RUN / "state").exists()
        export_model(str(RUN), "model", Choice(), ensemble=True)
        assert sorted(saved) == [0, 1, 2] and load("model").config.members == (0, 1, 2)

    def test_without_a_final_fit_a_run_has_no_model_to_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("methods=[erm]")
        with pytest.raises(UserError, match=r"has no final fit of erm.*`xdm-ft export output/small DIR --method erm`"):
            xdm_ft.load(RUN)
        assert main(["predict", str(RUN), str(DATA / "photo"), "--quiet"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "--held-out photo" in told
        with pytest.raises(UserError, match=r"no model other; known: erm$"):
            xdm_ft.load(RUN, method="other")

    @pytest.mark.slow
    def test_a_fold_on_purpose_is_of_the_first_seed_and_says_what_it_lacks(self) -> None:
        """No test result chooses: erm is taken, of its best validated seed 1 and its first seed 2 the latter."""
        results = run("methods=[erm, linear_probe]", "protocol.seeds=[2, 0, 1]")
        from xdm_ft.storage.results_file import write_results

        for record in results["runs"]:
            picked = record["selected"]["train_val"]
            picked["value"] = {"erm": 0.8 + 0.1 * (record["seed"] == 1), "linear_probe": 0.2}[record["method"]]
            picked["metrics"]["test"]["accuracy"] = 0.0 if record["method"] == "erm" else 1.0
        write_results(RUN / "results.json", results)
        model = xdm_ft.load(RUN, held_out="photo")
        assert (model.config.method["label"], model.config.method["seed"]) == ("erm", 2)
        assert "no test result was read" in model.config.chosen and "without photo (held out)" in model.config.chosen
        assert xdm_ft.load(RUN, held_out="photo", seed=1).config.method["seed"] == 1
        export_model(str(RUN), "fold", Choice(held_out=PHOTO))
        assert "**It lacks photo**" in Path("fold/README.md").read_text()
        assert not (RUN / "models/final_fit").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            (Choice(method="ermm"), 'no model ermm; did you mean "erm"'),
            (Choice(held_out=("sketch",)), "--held-out: no model sketch"),
            (Choice(held_out=PHOTO, seed=7), "--seed: no model 7; known: 0"),
            (Choice(held_out=PHOTO, trial=1), "--trial: no model 1"),
            (Choice(seed=0), "--seed names a model that was trained without a domain; add --held-out photo"),
            (Choice(trial=0), "--trial names a model that was trained without a domain; add --held-out photo"),
        ],
    )
    def test_an_unknown_model_is_one_line(self, choice: Choice, message: str) -> None:
        run("methods=[erm]")
        with pytest.raises(UserError, match=message):
            export_model(str(RUN), "model", choice)
        assert not (RUN / "models/final_fit").exists()

    def test_a_run_by_oracle_names_its_model(self) -> None:
        run("methods=[erm]", "protocol.selection=oracle")
        with pytest.raises(UserError, match="selection: oracle has none; export a model of the estimate by --held-out"):
            export_model(str(RUN), "model", Choice())
        with pytest.raises(UserError, match=r"has no final fit .*unbiased estimate of one; name .*: --held-out photo$"):
            xdm_ft.load(RUN)
        told = export_model(str(RUN), "model", Choice(held_out=PHOTO)).document["model"]
        assert told.startswith("trained without photo (held out), seed 0, trial 0; ")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("changes", "options", "message"),
        [
            (["methods=[erm]", "protocol.seeds=1"], {"ensemble": True}, "--ensemble needs models of several seeds"),
            (
                ["methods=[linear_probe]", "protocol.seeds=2"],
                {"ensemble": True},
                "linear_probe has the same head under every seed",
            ),
            ([*END_TO_END, "methods=[erm]", "protocol.seeds=2"], {"ensemble": True}, "an ensemble needs one encoder"),
            (["methods=[erm]"], {"wise_ft": 0.5}, "did not start from class embeddings"),
            (["methods=[erm]"], {"wise_ft": 2.0}, "2.0 is not in 0…1"),
            (["methods=[knn]"], {"push_to_hub": "me/mine"}, "--allow-training-features uploads them"),
        ],
    )
    def test_options_that_fit_no_model_are_refused_before_one_is_trained(
        self, changes: list[str], options: dict[str, Any], message: str
    ) -> None:
        run(*changes)
        with pytest.raises(UserError, match=message):
            export_model(str(RUN), "model", Choice(), **options)
        assert not (RUN / "models/final_fit").exists()

    @pytest.mark.slow
    def test_an_official_split_gives_its_own_model_unless_a_final_fit_is_wanted(self) -> None:
        lines = ["path,label,domain,split"]
        part = {"photo": "train", "sketch": "val", "cartoon": "test"}
        for image in sorted(Path("data").rglob("*.png")):
            if image.parts[-3] in part:
                lines.append(f"{image},{image.parts[-2]},{image.parts[-3]},{part[image.parts[-3]]}")
        Path("table.csv").write_text("\n".join(lines) + "\n")
        official = "protocol={name: official, selection: val_domain, seeds: [3, 1]}"
        results = small_runs.results("data={name: table, file: table.csv}", official, "methods=[erm]")
        picks = [record["selected"]["val_domain"] for record in results["runs"]]
        assert all("temperature" not in pick for pick in picks), "no training domain has validation images"
        nll = [pick["metrics"]["val_domain"]["nll"] for pick in picks]
        assert [pick["validation_nll"] for pick in picks] == pytest.approx(nll, rel=1e-6)
        told = export_model(str(RUN), "own", Choice()).document["model"]
        assert told.startswith("trained without cartoon (held out), seed 3, trial 0; ") and xdm_ft.load(RUN)
        assert not (RUN / "models/final_fit").exists()
        assert exported(Choice(), "heads", ensemble=True).config.members == (1, 3)
        assert export_model(str(RUN), "best", Choice(), best=True).document["model"].startswith("final fit: ")
        assert export_model(str(RUN), "again", Choice("erm")).document["model"].startswith("final fit: ")


class TestTrainingFeatures:
    @pytest.mark.slow
    def test_a_head_of_training_features_is_marked_and_not_uploaded_unasked(self) -> None:
        results = run("methods=[{name: knn, neighbours: [1, 3]}, erm]", "protocol.final_fit=true")
        assert results["final_fit"]["method"] == "erm" and results["final_fit"]["chosen_by"]["by_name_only"] == ["knn"]
        by_method = {record["method"]: record for record in results["runs"]}
        assert by_method["knn"]["training_features"] > 0 and by_method["knn"]["tuned_settings"] == 6
        assert "training_features" not in by_method["erm"] and "tuned_settings" not in by_method["erm"]
        told = export_model(str(RUN), "model", Choice("knn"))
        n = sum(json.loads((RUN / "results.json").read_text())["final_fits"]["knn"]["images"].values())
        marked = f"contains the features of all {n:,} training images"
        assert marked in told.text() and marked in Path("model/README.md").read_text()
        assert marked not in export_model(str(RUN), "erm", Choice()).text()
        with pytest.raises(UserError, match=r"--push-to-hub: the head of knn contains .*; --allow-training-features"):
            export_model(str(RUN), "hub", Choice("knn"), push_to_hub="me/mine")
        assert not Path("hub").exists()

    @pytest.mark.slow
    def test_class_means_of_few_images_are_marked(self) -> None:
        run("methods=[prototypes]")
        few = exported(Choice("prototypes", PHOTO), "fold").config.few_images
        assert few and max(few.values()) < 10
        marked = " mean features of fewer than ten training images: "
        assert marked in Path("fold/README.md").read_text()
        told = export_model(str(RUN), "whole", Choice("prototypes")).text()
        assert (f"the head and reference.safetensors contain{marked}" in told) == bool(load("whole").config.few_images)

    @pytest.mark.slow
    def test_class_means_beside_any_head_are_marked(self) -> None:
        for image in [*Path("data").rglob("*/dog/*.png")][1:]:
            image.unlink()
        run("methods=[erm]", "data.counts=any")
        told = export_model(str(RUN), "whole", Choice()).text()
        assert "reference.safetensors contains mean features of fewer than ten training images: " in told
        assert "dog (1)" in told and "Privacy: reference.safetensors contains" in Path("whole/README.md").read_text()


class TestCombined:
    @pytest.mark.slow
    def test_an_ensemble_is_the_mean_of_its_logits(self) -> None:
        run(HEADS, "protocol.seeds=3")
        paths = held_out()
        for label, has_mean in (("erm", True), ("cosine", False), ("mlp", False)):
            model = exported(Choice(label, PHOTO), label, ensemble=True)
            single = [xdm_ft.load(RUN, method=label, held_out="photo", seed=seed) for seed in range(3)]
            z = torch.from_numpy(model.encode(paths))
            logits = torch.stack([one.module.logits(z) for one in single]).mean(0)
            torch.testing.assert_close(model.module.logits(z), logits, rtol=0, atol=1e-5)
            assert model.config.members == (0, 1, 2) and (model.module.head is not None) == has_mean
            assert model.module.member_logits(z).shape == (3, len(paths), len(model.class_names))

    @pytest.mark.slow
    def test_the_ensemble_of_the_final_fit_has_all_seeds(self) -> None:
        run("methods=[erm]", "protocol.seeds=2")
        assert exported(Choice(), ensemble=True).config.members == (0, 1)

    @pytest.mark.slow
    def test_an_ensemble_of_linear_heads_is_their_mean(self) -> None:
        run("methods=[erm]", "protocol.seeds=2")
        model, paths = exported(FOLD, ensemble=True), held_out()
        states = [xdm_ft.load(RUN, held_out="photo", seed=seed).module.head.state_dict() for seed in range(2)]
        assert torch.equal(model.module.head.weight, torch.stack([one["weight"] for one in states]).mean(0))
        z = torch.from_numpy(model.encode(paths))
        torch.testing.assert_close(model.module.logits(z), model.module.member_logits(z).mean(0), rtol=0, atol=1e-5)

    @pytest.mark.slow
    def test_one_seed_is_no_ensemble(self) -> None:
        run("methods=[linear_probe]")
        for choice in (Choice(), Choice("linear_probe", PHOTO)):
            with pytest.raises(UserError, match="--ensemble needs models of several seeds, but there is one"):
                exported(choice, ensemble=True)
        with pytest.raises(UserError, match="--ensemble takes the heads of all seeds; leave --seed out"):
            exported(Choice("linear_probe", PHOTO, seed=0), ensemble=True)

    @pytest.mark.slow
    def test_the_temperature_divides_the_logits(self) -> None:
        results = run("methods=[erm]")
        choice, paths = choice_of(results["runs"][0]), held_out()
        plain, scaled = exported(choice, "plain"), exported(choice, "scaled", temperature=True)
        fitted = results["runs"][0]["selected"]["train_val"]["temperature"]
        assert scaled.config.temperature == fitted == plain.config.fitted_temperature != 1.0
        z = torch.from_numpy(plain.encode(paths))
        torch.testing.assert_close(scaled.module.logits(z) * fitted, plain.module.logits(z))

    @pytest.mark.slow
    def test_wise_ft_lies_between_zero_shot_and_the_trained_model(self) -> None:
        results = run(CLIP, "methods=[zero_shot, {name: erm, head_init: zero_shot, label: tuned}]")
        paths, tuned = held_out(), Choice("tuned", PHOTO)
        ends = {record["method"]: recorded(record) for record in results["runs"]}
        at = {alpha: exported(tuned, f"at-{alpha}", wise_ft=alpha).predict_proba(paths) for alpha in (0.0, 0.5, 1.0)}
        np.testing.assert_allclose(at[0.0], ends["zero_shot"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(at[1.0], ends["tuned"], rtol=0, atol=1e-6)
        assert np.abs(at[0.5] - at[0.0]).max() > 1e-4 < np.abs(at[0.5] - at[1.0]).max()
        for wrong, choice in ((1.5, tuned), (0.5, Choice("zero_shot", PHOTO))):
            with pytest.raises(UserError):
                exported(choice, "wrong", wise_ft=wrong)

    @pytest.mark.slow
    def test_wise_ft_acts_on_the_final_fit(self) -> None:
        run(CLIP, "methods=[{name: erm, head_init: zero_shot}]")
        models = [exported(Choice(), f"at-{alpha}", wise_ft=alpha) for alpha in (0.0, 0.5, 1.0)]
        a, b, c = (model.module.head.weight for model in models)
        torch.testing.assert_close(b, (a + c) / 2)
        torch.testing.assert_close(c, xdm_ft.load(RUN).module.head.weight)
        assert "final fit: " in models[1].config.chosen and "WiSE-FT: 0.5" in models[1].config.chosen

    @pytest.mark.slow
    def test_wise_ft_moves_an_encoder_that_was_trained(self) -> None:
        run(CLIP, *END_TO_END, "training.lr=0.01", "methods=[{name: erm, head_init: zero_shot}]")
        start, middle, end = (exported(FOLD, f"m{a}", wise_ft=a) for a in (0.0, 0.5, 1.0))
        name = "model.visual.conv1.weight"
        a, b, c = (one.module.encoder.state_dict()[name] for one in (start, middle, end))
        torch.testing.assert_close(b, (a + c) / 2)
        assert not torch.equal(a, c)

    @pytest.mark.slow
    def test_wise_ft_without_class_embeddings_is_refused(self) -> None:
        run("methods=[erm]")
        with pytest.raises(UserError, match="did not start from class embeddings"):
            exported(FOLD, wise_ft=0.5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a run of ERM, and its model with the encoder."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        miniature.domainbed(folder / "data", "pacs")
        run("methods=[erm]")
        export_model(str(RUN), "model", Choice(method="erm"), with_encoder=True)
    return folder


class TestFaults:
    @pytest.fixture
    def model(self, made: Path, tmp_path: Path) -> Path:
        shutil.copytree(made, tmp_path, dirs_exist_ok=True)
        return Path("model")

    def test_an_encoder_that_differs_by_one_weight_is_refused(self, model: Path) -> None:
        file = model / "encoder.safetensors"
        state = load_file(file)
        name = next(iter(state))
        state[name].view(-1)[0] += 1
        save_file(state, file, {"format": "pt"})
        with pytest.raises(UserError, match=r"encoder's weights .* are not those that the model was trained with"):
            load(model)

    @pytest.mark.slow
    def test_weights_from_a_file_are_asked_for_and_checked(self, model: Path) -> None:
        (model / "encoder.safetensors").rename("mine.safetensors")
        small = ("encoder.weights=mine.safetensors", "name=small")
        run("methods=[erm]", *small, "output.dir=again", "features.dir=again/cache")
        assert not export_model("again/small", "whole", Choice(method="erm")).document["needs_encoder_weights"]
        assert load("whole").predict(held_out()[:1])
        answer = export_model("again/small", "head", Choice(method="erm"), with_encoder=False)
        assert answer.document["needs_encoder_weights"] and "--encoder-weights" in answer.text()
        with pytest.raises(UserError, match=r"come from a file .* give it \("):
            load("head")
        assert load("head", encoder_weights="mine.safetensors").predict(held_out()[:1])
        state = load_file("mine.safetensors")
        next(iter(state.values())).view(-1)[0] += 1
        save_file(state, "other.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match="not those that the model was trained with"):
            load("head", encoder_weights="other.safetensors")
        assert "mine.safetensors" not in Path("head/config.json").read_text()

    def test_an_edited_config_is_refused(self, model: Path) -> None:
        path = model / "config.json"
        path.write_text(path.read_text().replace('"temperature": 1.0', '"temperature": 2.0'))
        with pytest.raises(UserError, match="its checksum differs"):
            load(model)

    @pytest.mark.parametrize("key", ["model", "weights"])
    def test_a_config_that_names_files_elsewhere_is_refused(self, model: Path, key: str) -> None:
        path = model / "config.json"
        document = json.loads(path.read_text())
        document["encoder"]["settings"][key] = "../elsewhere.json" if key == "model" else "/etc/passwd.pth"
        document["encoder"]["file"] = None
        del document["checksum"]
        path.write_text(json.dumps({**document, "checksum": json_digest(document)}))
        with pytest.raises(UserError, match="of this directory"):
            load(model)

    def test_the_head_of_another_model_is_refused(self, model: Path) -> None:
        run("methods=[erm]", "training.lr=0.5", "name=small", "output.dir=other")
        export_model("other/small", "second", Choice(method="erm"))
        Path("second/model.safetensors").replace(model / "model.safetensors")
        with pytest.raises(UserError, match="it is of another model"):
            load(model)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "encoder.safetensors"])
    @pytest.mark.parametrize("damage", ["missing", "empty", "cut", "noise", "folder"])
    def test_damage_is_one_line(self, model: Path, name: str, damage: str) -> None:
        file = model / name
        content = file.read_bytes()
        file.unlink()
        if damage == "folder":
            file.mkdir()
        elif damage != "missing":
            file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "noise": b"\xff" * 999}[damage])
        with pytest.raises(UserError) as caught:
            load(model)
        assert "\n" not in str(caught.value) and "model" in str(caught.value)

    def test_foreign_directories_are_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf/config.json").write_text('{"architectures": ["ViT"], "model_type": "vit"}')
        (tmp_path / "a file").write_text("")
        for name, what in (("empty", "neither"), ("hf", "not of xdm_ft"), ("a file", "is a file"), ("no", "not exist")):
            with pytest.raises(UserError, match=what):
                load(tmp_path / name)

    def test_a_taken_directory_is_refused_and_kept(self, model: Path) -> None:
        before = (model / "config.json").read_bytes()
        with pytest.raises(UserError, match="exists already"):
            export_model(str(RUN), "model", Choice(method="erm"))
        assert (model / "config.json").read_bytes() == before
        Path("new").mkdir()
        export_model(str(RUN), "new", Choice(method="erm"))
        assert sorted(p.name for p in Path.cwd().iterdir() if p.name.startswith(".")) == []


def test_no_path_of_this_machine_is_in_a_model_directory(tmp_path: Path) -> None:
    run("methods=[erm]")
    exported(Choice(method="erm"), with_encoder=True)
    for file in Path("model").iterdir():
        content = file.read_bytes()
        for private in (str(tmp_path), str(Path.home()), "data/PACS", ".png", str(DATA)):
            assert private.encode() not in content, (file, private)


def test_loading_leaves_the_generator_as_it_was() -> None:
    run("methods=[erm]")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = xdm_ft.load(RUN, held_out="photo")
    assert torch.equal(torch.rand(3), expected)
    assert weights_digest(load_again := model.module.encoder) == weights_digest(load_again)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("temperature",), 0.0),
        (("temperature",), -1.0),
        (("class_names",), ["cat"] * len(CLASSES)),
        (("encoder", "width"), 0),
        (("encoder", "width"), -1),
        (("encoder", "width"), 10**30),
        (("encoder", "seed"), 2**70),
        (("head", "settings"), {"hidden": 5}),
        (("preprocessing", "size"), 0),
        (("preprocessing", "std"), [0, 0, 0]),
        (("preprocessing", "crop"), 1e-9),
    ],
)
def test_values_that_no_model_has_are_one_line(place: tuple[str, ...], value: object, tmp_path: Path) -> None:
    write_directory(parts(*timm("test_vit")), tmp_path / "model", with_encoder=True)
    path = tmp_path / "model/config.json"
    document = json.loads(path.read_text())
    *blocks, key = place
    reduce(getitem, blocks, document)[key] = value
    del document["checksum"]
    path.write_text(json.dumps({**document, "checksum": json_digest(document)}))
    with pytest.raises(UserError) as caught:
        load(tmp_path / "model", device="cpu")
    assert "\n" not in str(caught.value)
