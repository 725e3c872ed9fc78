"""Every kind of model, exported and loaded, predicts what its run has recorded; which model a run gives; mixtures."""

from __future__ import annotations

import io
import json
import logging
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
import timm
import torch
import xxhash
from exported import DATA, LAST, RUN, choice_of, exported, held_out, recorded, run
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.covariance import ledoit_wolf

import xdm_ft
from xdm_ft.cli.export import export_model
from xdm_ft.cli.parser import main
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.export.choose import Choice, read_parts
from xdm_ft.export.directory import TRAINING_IMAGES, read_config
from xdm_ft.export.hub import check_files
from xdm_ft.export.onnx import PACKAGES
from xdm_ft.export.predictor import Model, load
from xdm_ft.results.run import read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.results_file import write_results
from xdm_ft.storage.run_directory import RunDirectory

Enter = Callable[[str], None]
PHOTO = ("photo",)
FOLD = Choice("erm", PHOTO)


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RUN / "results.json").read_text())
    return found


def records() -> list[dict[str, Any]]:
    return results()["runs"]


PER_PUSH = [("heads", None), ("clip", None), ("trained", None), ("two encoders", True)]
OTHERS = [("heads", True), ("clip", True), ("trained", True), ("two encoders", None)]


@pytest.mark.parametrize(
    ("name", "with_encoder"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in PER_PUSH else pytest.mark.soak)
        for case in PER_PUSH + OTHERS
    ],
)
def test_every_model_predicts_what_was_recorded(
    name: str, with_encoder: bool | None, shared: Enter, tmp_path: Path
) -> None:
    shared(name)
    paths = held_out()
    for number, record in enumerate(one for one in records() if one["seed"] == 0):
        choice, target = choice_of(record), tmp_path / str(number)
        model = exported(choice, str(target), with_encoder=with_encoder)
        np.testing.assert_allclose(model.predict_proba(paths), recorded(record), rtol=0, atol=1e-6)
        assert model.predict(paths) == [model.class_names[n] for n in recorded(record).argmax(1)]
        if with_encoder is None:
            of_run = load(RUN, choice=choice)
            np.testing.assert_array_equal(of_run.predict_proba(paths), model.predict_proba(paths))
            np.testing.assert_array_equal(of_run.distance(paths), model.distance(paths))
            assert np.isfinite(model.distance(paths)).all()
        files = {path.name for path in target.glob("encoder*")}
        kind = record["method"].split(" @ ")[0]
        alone = {"all": "encoder.safetensors", **dict.fromkeys(("deep", "lora", "last"), "encoder_part.safetensors")}
        assert files == ({"encoder.safetensors"} if with_encoder else {alone[kind]} if kind in alone else set())
        assert model.config.model_dump(mode="json")["encoder"]["trained"] == record["trainable"]
        assert model.config.renamed == ({"dog": "hound"} if name == "heads" else {})


@pytest.mark.slow
def test_only_what_was_trained_is_in_a_part(shared: Enter, tmp_path: Path) -> None:
    shared("two encoders")
    before, after = (exported(Choice(f"{one} @ vit", PHOTO), str(tmp_path / one)) for one in ("head", "last"))
    part = load_file(tmp_path / "last/encoder_part.safetensors")
    states = [one.module.encoder.state_dict() for one in (before, after)]
    assert {name for name, value in states[1].items() if not torch.equal(value, states[0][name])} == set(part)
    assert {name.split(".")[1] for name in part} == {"blocks", "norm"}
    assert "encoder: last 1 block trained; class head trained" in (tmp_path / "last/README.md").read_text()
    with pytest.raises(UserError, match='--method: no model last @ cmn; did you mean "last @ cnn"'):
        xdm_ft.load(RUN, method="last @ cmn")
    whole = exported(Choice("last @ vit", PHOTO), str(tmp_path / "whole"), with_encoder=True)
    own = timm.create_model("test_vit", num_classes=0, img_size=32).eval()
    own.load_state_dict(load_file(tmp_path / "whole/encoder.safetensors"))
    with torch.no_grad():
        z = own(torch.stack([whole.transform(Image.open(path).convert("RGB")) for path in held_out()]))
    np.testing.assert_allclose(z.numpy(), whole.encode(held_out()), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.needs(*PACKAGES)
def test_low_rank_updates_as_a_part_and_as_onnx(shared: Enter, tmp_path: Path) -> None:
    """A part that is lost, or that of another model, is one line."""
    shared("trained")
    answer = export_model(str(RUN), str(tmp_path / "lora"), Choice("lora", PHOTO), onnx=True, no_site=True)
    written, file = answer.document["onnx"], tmp_path / "lora/encoder_part.safetensors"
    assert written.difference < 1e-5 and written.path == tmp_path / "lora/model.onnx" and written.path.exists()
    part = load_file(file)
    assert len(part) == 8 and all(".blocks.4." in name or ".blocks.5." in name for name in part)
    assert "LoRA of rank 2 in the last 2 blocks" in (tmp_path / "lora/README.md").read_text()
    config, _ = read_config(tmp_path / "lora")
    assert file.name in check_files(tmp_path / "lora", config)
    shutil.copy(tmp_path / "lora/model.safetensors", file)
    with pytest.raises(UserError, match=r"encoder_part\.safetensors: is damaged .* export the model again"):
        load(tmp_path / "lora")
    file.unlink()
    with pytest.raises(UserError, match=r"encoder_part\.safetensors: does not exist; export the model again"):
        load(tmp_path / "lora")
    with pytest.raises(UserError, match=r"lacks encoder_part\.safetensors; export the model again"):
        check_files(tmp_path / "lora", config)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_an_encoder_from_a_file_is_asked_for_and_checked() -> None:
    torch.manual_seed(3)
    save_file(timm.create_model("test_vit", num_classes=0, img_size=32).state_dict(), "own.safetensors")
    run(f"methods=[erm, {LAST}]", "encoder.weights=./own.safetensors", "training.steps=2")
    head, last = records()
    for record, name in ((head, "head"), (last, "last")):
        whole = exported(choice_of(record), f"{name}-whole")
        assert Path(f"{name}-whole/encoder.safetensors").exists()
        assert not Path(f"{name}-whole/encoder_part.safetensors").exists()
        answer = export_model(str(RUN), name, choice_of(record), with_encoder=False, no_site=True)
        assert answer.document["needs_encoder_weights"] and "--encoder-weights" in answer.text()
        for model in (whole, load(name, encoder_weights="own.safetensors")):
            np.testing.assert_allclose(model.predict_proba(held_out()), recorded(record), rtol=0, atol=1e-6)
        needed = read_config(Path(name))[0].encoder.named_xxh3
        assert needed in Path(f"{name}/README.md").read_text()
        assert "own.safetensors" not in Path(f"{name}/config.json").read_text()
        with pytest.raises(UserError, match=f"come from a file .xxh3 {needed}.*give that file"):
            load(name)
        shutil.copy("last-whole/encoder.safetensors" if name == "last" else "own.safetensors", "wrong.safetensors")
        state = load_file("wrong.safetensors")
        next(iter(state.values())).view(-1)[0] += 1
        save_file(state, "wrong.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=f"differ from those that trained the model .xxh3 {needed}"):
            load(name, encoder_weights="wrong.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_another_precision_is_near() -> None:
    run("methods=[erm]", "features.precision=fp16")
    [record], model = records(), exported(FOLD)
    assert model.module.precision == "fp16"
    for loaded in (model, load("model", precision="fp32")):
        np.testing.assert_allclose(loaded.predict_proba(held_out()), recorded(record), rtol=0, atol=1e-2)
    with pytest.raises(UserError, match="precision: half is not known"):
        load("model", precision="half")


def test_all_kinds_of_images_give_the_same(small_model: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = load(small_model.run, choice=Choice(held_out=("sketch",)))
    assert torch.equal(torch.rand(3), expected), "loading leaves the generator as it was"
    assert repr(model) == f"Model(erm, {len(model.class_names)} classes, test_vit, {model.device})"
    path = str(next(small_model.data.rglob("*.png")))
    with Image.open(path) as image:
        kinds = [path, Path(path), image.copy(), np.asarray(image)]
    content = Path(path).read_bytes()
    kinds += [content, bytearray(content), memoryview(content), io.BytesIO(content)]
    found = model.predict_proba(kinds)
    assert found.shape == (8, len(model.class_names)) and np.ptp(found, axis=0).max() < 1e-6
    assert model.encode(path).shape == (1, model.config.encoder.width)
    assert model.predict([]) == [] and model.predict_proba([]).shape == (0, len(model.class_names))
    assert model.encode([]).shape == (0, model.config.encoder.width) and model.distance([]).shape == (0,)
    pixels = torch.stack([model.transform(image)])
    torch.testing.assert_close(model.module(pixels).softmax(1), torch.from_numpy(found[:1]))
    grey = np.asarray(image)[..., 0]
    assert np.array_equal(model.predict_proba(grey), model.predict_proba(np.stack([grey] * 3, 2)))
    for one in (content, io.BytesIO(content), Path(path)):  # not a list of its bytes or lines
        np.testing.assert_allclose(model.predict_proba(one), found[:1], atol=1e-6)
    sixteen = grey.astype(np.uint16) * 257
    assert np.array_equal(model.predict_proba(sixteen), model.predict_proba(grey))


def test_what_is_no_image_is_refused_in_one_line(small_model: Any, tmp_path: Path) -> None:
    model = load(small_model.model)
    (tmp_path / "text.png").write_text("no image")
    arrays = [np.zeros((4, 4, 4), np.uint8), np.zeros((2, 4, 4, 3), np.uint8), np.zeros((0, 4), np.uint8)]
    arrays += [np.zeros((4, 4), np.int64), np.zeros((4, 4), bool), np.full((4, 4), np.nan, np.float32)]
    closed = io.BytesIO()
    closed.close()
    with (tmp_path / "text.png").open() as text:
        others = [None, 5, {"a.png": 1}, object(), torch.zeros(3, 4, 4), [None], [5], b"no image", io.BytesIO(), closed]
        others += [text, "", "no such file", str(tmp_path), "a\0b", tmp_path / "text.png", "~nobody-here/x.png"]
        for wrong in [*arrays, *others]:
            for verb in (model.predict, model.predict_proba, model.encode, model.distance):
                with pytest.raises(UserError) as caught:
                    verb(wrong)
                assert "\n" not in str(caught.value), wrong
    truncated = Image.open(io.BytesIO(next(small_model.data.rglob("*.png")).read_bytes()[:-60]))
    with pytest.raises(UserError, match="an image: does not decode"):
        model.predict(truncated)


def test_the_example_of_a_model_runs(small_model: Any, monkeypatch: Any, capsys: Any) -> None:
    paths = [str(path) for path in sorted(small_model.data.rglob("*.png"))[:2]]
    monkeypatch.setattr(sys, "argv", ["example.py", *paths])
    runpy.run_path(str(small_model.model / "example.py"), run_name="__main__")
    told = [line.split(": ")[1].split(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == load(small_model.model).predict(paths)


# which model


@pytest.mark.slow
def test_final_fits_are_trained_once_and_lie_side_by_side(copied: Enter, caplog: pytest.LogCaptureFixture) -> None:
    copied("heads")
    assert "final_fit" not in results()
    with caplog.at_level("INFO", "xdm_ft"):
        named = export_model(str(RUN), "model", Choice(method="erm"), no_site=True)
    assert "trains the final fit of erm on all labelled images" in caplog.text
    assert "final fit, about 10 s: settings are those of" in caplog.text
    assert "erm was named (" in named.document["model"] and load("model").config.method["test_domains"] == []
    assert results()["recipe"]["output"] == {"dir": "output"}, "as before"
    before = results()
    assert [*before["final_fits"]] == ["erm"] and load(RUN, choice=Choice("erm")).config.chosen.startswith("final fit")
    answer = export_model(str(RUN), "chosen", Choice(), no_site=True)
    chosen = answer.document["model"]
    lines = answer.text().splitlines()
    assert lines[0] == f"model: {chosen.partition('; ')[0]}" and len(lines[0]) < 140
    assert "  no test result was read for this choice" in lines, "the further clauses have lines of their own"
    assert exported(Choice("erm"), "members", ensemble=True).config.members == (0, 1)
    found = results()
    both = {str(seed): f"models/final_fit/erm/{name}.safetensors" for seed, name in enumerate(("model", "seed1"))}
    files = found["final_fits"]["erm"]["files"]
    assert before["final_fits"]["erm"]["files"].items() <= files.items() and {*both.values()} <= files.keys()
    assert found["final_fits"]["erm"] == before["final_fits"]["erm"] | {"seeds": both, "files": files}
    assert found["final_fit"] == found["final_fits"][found["final_fit"]["method"]]
    best = found["final_fit"]
    assert best["chosen_by"]["by_name_only"] == ["knn"] and chosen.startswith("final fit: ")
    weights = RUN / best["weights"]
    assert best["weights"] == f"models/final_fit/{best['method']}/model.safetensors"
    at = weights.stat().st_mtime_ns
    export_model(str(RUN), "again", Choice(), best=True, no_site=True)
    assert weights.stat().st_mtime_ns == at and load(RUN).config.chosen == chosen
    assert Path("chosen/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()
    assert {bytes(row) for row in load("chosen").training_images} == checksums_below("")  # type: ignore[union-attr]
    model, everything = load("chosen"), sorted(map(str, DATA.rglob("*.png")))
    percentiles = model.distance_percentile(model.distance(everything))
    assert percentiles.min() >= 0 and percentiles.max() <= 100


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(method="ermm"), 'no model ermm; did you mean "erm"'),
        (Choice(held_out=("sketch",)), "--held-out: no model sketch"),
        (Choice(held_out=PHOTO, seed=7), "--seed: no model 7; known: 0"),
        (Choice(seed=0), "--seed names a model that was trained without a domain; add --held-out photo"),
        (Choice("erm"), r"has no final fit of erm.*`xdm-ft export output/small DIR --method erm`.*--held-out photo"),
    ],
)
def test_an_unknown_model_is_one_line(choice: Choice, message: str, shared: Enter) -> None:
    shared("heads")
    with pytest.raises(UserError, match=message) as found:
        load(RUN, choice=choice)
    assert "\n" not in str(found.value)


def of_slow_run(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "choice", "options", "message"),
    [
        ("heads", Choice("linear_probe"), {"ensemble": True}, "linear_probe has the same head under every seed"),
        ("heads", Choice("erm"), {"wise_ft": 0.5}, "did not start from class embeddings"),
        ("heads", Choice("knn"), {"push_to_hub": "me/mine"}, "of knn contains .*; --allow-training-features uploads"),
        ("heads", Choice("erm", PHOTO, seed=0), {"ensemble": True}, "takes the heads of all seeds; leave --seed out"),
        ("heads", Choice("erm", PHOTO), {"best": True}, "--best names the final fit, but --held-out a model that was"),
        of_slow_run("clip", Choice("zero_shot", PHOTO), {"wise_ft": 0.5}, "zero_shot is zero-shot itself; choose a"),
        of_slow_run("trained", Choice("all", PHOTO), {"ensemble": True}, "an ensemble needs one encoder"),
    ],
)
def test_options_that_fit_no_model_are_refused_before_one_is_trained(
    name: str, choice: Choice, options: dict[str, Any], message: str, shared: Enter, tmp_path: Path
) -> None:
    shared(name)
    with pytest.raises(UserError, match=message):
        export_model(str(RUN), str(tmp_path / "model"), choice, **options, no_site=True)
    assert not (RUN / "models/final_fit").exists() and not (tmp_path / "model").exists()


@pytest.mark.usefixtures("small_pacs")
def test_a_run_by_oracle_names_its_model() -> None:
    run("methods=[erm]", "protocol.selection=oracle")
    with pytest.raises(UserError, match="selection: oracle has none; export a model of the estimate by --held-out"):
        export_model(str(RUN), "model", Choice(), no_site=True)
    with pytest.raises(UserError, match=r"has no final fit .*unbiased estimate of one; name .*: --held-out photo$"):
        xdm_ft.load(RUN)
    told = export_model(str(RUN), "model", Choice(held_out=PHOTO), no_site=True).document["model"]
    assert told.startswith("trained without photo (held out), seed 0, trial 0; ")


def test_a_fold_is_of_the_first_seed_and_no_test_result_chooses_it(copied: Enter) -> None:
    """erm is taken, of its best validated seed 0 and its first seed 1 the latter; all others test best."""
    copied("heads")
    found = results()
    found["recipe"]["protocol"]["seeds"] = [1, 0]
    for record in found["runs"]:
        picked, is_erm = record["selected"]["train_val"], record["method"] == "erm"
        picked["value"] = 0.8 + 0.1 * (record["seed"] == 0) if is_erm else 0.2
        picked["metrics"]["test"]["accuracy"] = 0.0 if is_erm else 1.0
    write_results(RUN / "results.json", found)
    config = xdm_ft.load(RUN, held_out="photo").config
    assert (config.method["label"], config.method["seed"]) == ("erm", 1)
    assert "no test result was read" in config.chosen and "without photo (held out)" in config.chosen
    assert xdm_ft.load(RUN, held_out="photo", seed=0).config.method["seed"] == 0
    export_model(str(RUN), "fold", Choice(held_out=PHOTO), no_site=True)
    assert "**It lacks photo**" in Path("fold/README.md").read_text() and not (RUN / "models/final_fit").exists()


def test_a_growth_that_was_refused_is_not_carried_out(copied: Enter) -> None:
    """Such a run leaves the larger recipe in recipe.yaml."""
    copied("heads")
    before, text = results()["runs"], (RUN / "recipe.yaml").read_text()
    (RUN / "recipe.yaml").write_text(text.replace("- 0\n  - 1\n", "- 0\n  - 1\n  - 7\n"))
    assert (RUN / "recipe.yaml").read_text() != text
    export_model(str(RUN), "model", Choice("erm"), no_site=True)
    assert results()["runs"] == before and (RUN / "recipe.yaml").read_text() == text


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_an_official_split_gives_its_own_model_unless_a_final_fit_is_wanted() -> None:
    part = {"photo": "train", "sketch": "val", "cartoon": "test"}
    images = [image for image in sorted(Path("data").rglob("*.png")) if image.parts[-3] in part]
    lines = [f"{image},{image.parts[-2]},{image.parts[-3]},{part[image.parts[-3]]}" for image in images]
    Path("table.csv").write_text("\n".join(["path,label,domain,split", *lines]))
    official = "protocol={name: official, selection: val_domain, seeds: [3, 1]}"
    small_runs.results("data={name: table, file: table.csv}", official, "methods=[erm]")
    told = export_model(str(RUN), "own", Choice(), no_site=True).document["model"]
    assert told.startswith("trained without cartoon (held out), seed 3, trial 0; ") and xdm_ft.load(RUN)
    assert not (RUN / "models/final_fit").exists()
    assert exported(Choice(), "heads", ensemble=True).config.members == (1, 3)
    for number, how in enumerate(({"best": True}, {})):
        assert (
            export_model(str(RUN), f"fit{number}", Choice(), **how, no_site=True)
            .document["model"]
            .startswith("final fit: ")
        )
    small_runs.results("data={name: table, file: table.csv}", official.replace("1]", "1, 5]"), "methods=[erm]")
    assert exported(Choice(), "more", ensemble=True, best=True).config.members == (1, 3, 5)


# what a model holds of the training images


def checksums_below(*folders: str) -> set[bytes]:
    files = [path for folder in folders for path in Path("data/PACS", folder).rglob("*.png")]
    return {xxhash.xxh3_128_digest(path.read_bytes()) for path in files}


def test_a_fold_has_the_checksums_of_its_own_images(shared: Enter, tmp_path: Path) -> None:
    shared("heads")
    images = exported(FOLD, str(tmp_path / "fold")).training_images
    assert images is not None and {bytes(row) for row in images} == checksums_below("art_painting", "cartoon", "sketch")
    assert (np.lexsort(images.T[::-1]) == np.arange(len(images))).all(), "sorted: no order of the data set"
    assert load(RUN, choice=FOLD).training_images is None
    assert f"The file {TRAINING_IMAGES}, where it is present" in (tmp_path / "fold/README.md").read_text()


def test_without_the_runs_images_the_export_says_so(copied: Enter, caplog: pytest.LogCaptureFixture) -> None:
    copied("heads")
    first, second, *_ = sorted(Path("data/PACS/sketch").rglob("*.png"))
    first.write_bytes(second.read_bytes())
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        export_model(str(RUN), "model", FOLD, no_site=True)
    [line] = [message for message in caplog.messages if "checksums" in message]
    assert "no checksums of the training images, as they cannot be read: " in line and "\n" not in line
    assert not (Path("model") / TRAINING_IMAGES).exists() and load("model").training_images is None
    assert TRAINING_IMAGES not in Path("model/README.md").read_text()


def test_heads_of_training_features_and_of_few_images_are_marked(shared: Enter, tmp_path: Path) -> None:
    shared("heads")
    told = export_model(str(RUN), str(tmp_path / "knn"), Choice("knn", PHOTO), no_site=True).text()
    images = read_parts(read_run(RUN), Choice("knn", PHOTO)).training_features
    marked = f"contains the features of all {images:,} training images"
    assert marked in told and marked in (tmp_path / "knn/README.md").read_text()
    few = exported(Choice("prototypes", PHOTO), str(tmp_path / "means")).config.few_images
    assert few and max(few.values()) < 10
    means = " mean features of fewer than ten training images: "
    assert f"the head and reference.safetensors contain{means}" in (tmp_path / "means/README.md").read_text()
    told = export_model(str(RUN), str(tmp_path / "erm"), FOLD, no_site=True).text()
    assert marked not in told and f"reference.safetensors contains{means}" in told


def test_no_path_of_this_machine_is_in_a_model_directory(small_model: Any) -> None:
    for file in small_model.model.iterdir():
        for private in (str(small_model.folder), str(Path.home()), "data/PACS", ".png"):
            assert private.encode() not in file.read_bytes(), (file, private)


def naive_distance(z: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
    means = {c: z[labels == c].mean(0, dtype=np.float64) for c in set(labels.tolist())}
    centred = np.stack([one - means[c] for one, c in zip(z.astype(np.float64), labels, strict=True)])
    precision = np.linalg.inv(ledoit_wolf(centred, assume_centered=True)[0])
    return np.array([min(np.sqrt((one - m) @ precision @ (one - m)) for m in means.values()) for one in new])


def check_distances(model: Model) -> None:
    """Against those to the training images of the first seed; percentiles against its validation images."""
    made = small_runs.recipe("protocol.test_domains=[photo]")
    dataset = read_data(made)
    [split] = make_plan(made, dataset).splits
    paths = [str(DATA / dataset.name_in_data(row)) for row in range(len(dataset))]
    training, validation = torch.cat(split.train).tolist(), split.evaluation["train_val"].tolist()
    wanted = naive_distance(
        model.encode([paths[row] for row in training]), dataset.labels[training], model.encode(held_out())
    )
    distances = model.distance(held_out())
    np.testing.assert_allclose(distances, wanted, rtol=1e-3)
    of_validation = model.distance([paths[row] for row in validation])
    shares = [100 * (of_validation < one).mean() for one in wanted]
    np.testing.assert_allclose(model.distance_percentile(distances), shares, atol=100 / len(validation) + 1)


def test_distances_are_those_of_the_training_images_of_the_first_seed(shared: Enter) -> None:
    shared("heads")
    models = [load(RUN, choice=Choice(method, PHOTO, seed)) for method, seed in (("erm", 0), ("erm", 1), ("unit", 0))]
    check_distances(models[0])
    for other in models[1:]:  # methods that normalise features share them
        np.testing.assert_array_equal(models[0].distance(held_out()), other.distance(held_out()))
    assert [path.name for path in (RUN / "training_features").iterdir()] == ["photo.safetensors"]


@pytest.mark.slow
def test_each_encoder_has_distances_of_its_own(shared: Enter) -> None:
    shared("trained")
    check_distances(load(RUN, choice=Choice("all", PHOTO)))
    shared("two encoders")
    for label, file in (
        ("head @ vit", "training_features/vit/photo.safetensors"),
        ("last @ cnn", "models/last %40 cnn/photo/seed0-trial0/train_val.reference.safetensors"),
    ):
        reference = read_parts(read_run(RUN), Choice(label, PHOTO)).reference
        kept, _ = RunDirectory(RUN).tensors(file)
        assert reference is not None
        np.testing.assert_array_equal(reference.means, kept["means"].numpy())


@pytest.mark.slow
def test_lost_and_damaged_files_come_back_with_the_recipe(copied: Enter, caplog: pytest.LogCaptureFixture) -> None:
    copied("two encoders")
    file, head = RUN / "training_features/vit/photo.safetensors", Choice("head @ vit", PHOTO)
    intact = file.read_bytes()
    file.unlink()
    with pytest.raises(UserError, match=r"distance: unknown for this model.* run its recipe again"):
        load(RUN, choice=head).distance(held_out())
    file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    with pytest.raises(UserError, match="the file was damaged"):
        load(RUN, choice=head).distance(held_out())
    assert "photo.safetensors: is damaged (its checksum differs), so distances are not known" in caplog.text
    weights = RUN / records()[0]["selected"]["train_val"]["weights"]
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"is damaged .*run the run's recipe again to train this model again"):
        load(RUN, choice=head)
    assert main(["run", str(RUN / "recipe.yaml"), "--quiet"]) == 0 and file.read_bytes() == intact


# mixtures


@pytest.mark.slow
def test_an_ensemble_is_the_mean_of_its_logits(shared: Enter, tmp_path: Path) -> None:
    shared("heads")
    for label, has_mean in (("erm", True), ("cosine", False), ("mlp", False)):
        model = exported(Choice(label, PHOTO), str(tmp_path / label), ensemble=True)
        single = [load(RUN, choice=Choice(label, PHOTO, seed)) for seed in range(2)]
        z = torch.from_numpy(model.encode(held_out()))
        logits = torch.stack([one.module.logits(z) for one in single]).mean(0)
        torch.testing.assert_close(model.module.logits(z), logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(model.module.member_logits(z).mean(0), logits, rtol=0, atol=1e-5)
        assert model.config.members == (0, 1) and (model.module.head is not None) == has_mean


@pytest.mark.slow
@pytest.mark.parametrize("label", [pytest.param("tuned", marks=pytest.mark.soak), "deep"])
def test_wise_ft_lies_between_zero_shot_and_the_trained_model(label: str, shared: Enter, tmp_path: Path) -> None:
    shared("clip")
    ends = {record["method"]: recorded(record) for record in records()}
    choice = Choice(label, PHOTO)
    models = [exported(choice, str(tmp_path / f"{label}-{alpha}"), wise_ft=alpha) for alpha in (0.0, 0.5, 1.0)]
    found = [model.predict_proba(held_out()) for model in models]
    np.testing.assert_allclose(found[0], ends["zero_shot"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[2], ends[label], rtol=0, atol=1e-6)
    assert np.abs(found[1] - found[0]).max() > 1e-5 < np.abs(found[1] - found[2]).max()
    assert "WiSE-FT: 0.5" in models[1].config.chosen
    start, middle, end = (model.module.state_dict() for model in models)
    moved = {name for name in end if not torch.equal(start[name], end[name])}
    assert any(name.startswith("encoder.") for name in moved) == (label == "deep")
    for name in moved:
        torch.testing.assert_close(middle[name], (start[name] + end[name]) / 2)
