"""Distances to the training features: of models in run and model directories, and as columns of predictions."""

from __future__ import annotations

import csv
import io
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from exported import DATA, END_TO_END, RUN, choice_of, exported, held_out, run
from sklearn.covariance import ledoit_wolf
from small_runs import recipe

import xdm_ft
from xdm_ft.cli.export import export_model
from xdm_ft.cli.parser import main
from xdm_ft.evaluation.distance import Reference
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.export.choose import Choice
from xdm_ft.export.hub import FILES, READ
from xdm_ft.export.predictor import load
from xdm_ft.protocol.splits import with_validation
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.names import reference_beside, reference_file
from xdm_ft.storage.run_directory import RunDirectory

SHARED = RUN / "training_features/photo.safetensors"


def naive(z: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
    means = {c: z[labels == c].mean(0, dtype=np.float64) for c in set(labels.tolist())}
    centred = np.stack([one - means[c] for one, c in zip(z.astype(np.float64), labels, strict=True)])
    precision = np.linalg.inv(ledoit_wolf(centred, assume_centered=True)[0])
    return np.array([min(np.sqrt((one - m) @ precision @ (one - m)) for m in means.values()) for one in new])


def stored(file: Path) -> Reference:
    path = RUN / file if not file.is_relative_to(RUN) else file
    tensors, _ = RunDirectory(RUN).tensors(str(path.relative_to(RUN)))
    return Reference.from_arrays({name: tensor.numpy() for name, tensor in tensors.items()})


def parts(*overrides: str) -> tuple[list[str], np.ndarray, list[str]]:
    """Paths and labels of the training images of the first seed, and paths of its validation images."""
    made = recipe("protocol.test_domains=[photo]", *overrides)
    dataset = read_data(made)
    [split] = make_plan(made, dataset).splits
    [training, validation] = torch.cat(split.train).tolist(), split.evaluation["train_val"].tolist()
    paths = [str(DATA / dataset.name_in_data(row)) for row in range(len(dataset))]
    return [paths[row] for row in training], dataset.labels[training], [paths[row] for row in validation]


def checked(model: xdm_ft.export.predictor.Model, *overrides: str) -> None:
    training, labels, validation = parts(*overrides)
    wanted = naive(model.encode(training), labels, model.encode(held_out()))
    np.testing.assert_allclose(model.distance(held_out()), wanted, rtol=1e-3)
    of_validation = model.distance(validation)
    shares = [100 * (of_validation < one).mean() for one in wanted]
    step = 100 / len(validation)
    found = model.distance_percentile(model.distance(held_out()))
    np.testing.assert_allclose(found, shares, atol=step + 1)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_distances_are_those_of_the_training_images_of_the_first_seed() -> None:
    results = run("methods=[erm]", "protocol.seeds=2")
    for record in results["runs"]:
        model = exported(choice_of(record), f"model{record['seed']}")
        checked(model, "methods=[erm]")
        np.testing.assert_array_equal(
            model.distance(held_out()), xdm_ft.load(RUN, held_out="photo").distance(held_out())
        )
    assert [path.name for path in SHARED.parent.iterdir()] == ["photo.safetensors"]
    assert model.distance([]).shape == (0,)
    ensemble = exported(Choice("erm", ("photo",)), "ensemble", ensemble=True)
    np.testing.assert_array_equal(model.distance(held_out()), ensemble.distance(held_out()))


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_methods_that_normalise_features_share_the_distances() -> None:
    results = run("methods=[{name: erm, normalize: true, label: unit}, erm]")
    one, two = (exported(choice_of(record), record["method"]) for record in results["runs"])
    np.testing.assert_array_equal(one.distance(held_out()), two.distance(held_out()))
    assert not np.allclose(one.encode(held_out()), two.encode(held_out()))


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_a_model_with_an_encoder_of_its_own_has_distances_of_its_own() -> None:
    results = run(*END_TO_END, "methods=[erm]", "protocol.final_fit=true")
    [record] = results["runs"]
    beside = reference_beside(record["selected"]["train_val"]["weights"])
    assert (RUN / beside).exists() and not SHARED.exists()
    checked(exported(choice_of(record)), *END_TO_END, "methods=[erm]")
    assert exported(Choice(), "final").distance(held_out()).shape == (len(held_out()),)
    final = stored(Path("models/final_fit/erm/model.reference.safetensors"))
    assert not np.array_equal(final.means, stored(Path(beside)).means)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_the_final_fit_keeps_a_part_of_its_images_for_percentiles() -> None:
    run("methods=[erm]", "protocol.final_fit=true")
    made = recipe()
    dataset = read_data(made)
    [split, *_] = make_plan(made, dataset).splits
    every = torch.arange(len(dataset))
    whole = with_validation(dataset, split, 0.4, 0)
    assert whole is split, "it has validation images"
    _, metadata = RunDirectory(RUN).tensors(reference_file(()))
    images, others = json.loads(metadata["images"]), json.loads(metadata["validation_images"])
    assert images + others == len(every) and 0.3 < others / len(every) <= 0.5
    model = exported(Choice())
    paths = [str(DATA / dataset.name_in_data(row)) for row in every.tolist()]
    percentiles = model.distance_percentile(model.distance(paths))
    assert percentiles.min() >= 0 and percentiles.max() <= 100


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_a_run_of_an_earlier_version_has_none_until_its_recipe_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    results = run("methods=[erm]")
    whole, document = SHARED.read_bytes(), (RUN / "results.json").read_bytes()
    shutil.rmtree(SHARED.parent)
    for model in (exported(choice_of(results["runs"][0])), xdm_ft.load(RUN, held_out="photo")):
        with pytest.raises(UserError, match=r"distance: not known for this model.* run its recipe again"):
            model.distance(held_out())
    caplog.clear()
    with caplog.at_level(logging.INFO, "xdm_ft"):
        run("methods=[erm]")
    assert SHARED.read_bytes() == whole and (RUN / "results.json").read_bytes() == document
    assert "erm: 1 model" not in caplog.text
    xdm_ft.load(RUN, held_out="photo").distance(held_out())
    SHARED.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    caplog.clear()
    with pytest.raises(UserError, match="the file is damaged"):
        xdm_ft.load(RUN, held_out="photo").distance(held_out())
    assert "photo.safetensors: is damaged (its checksum differs), so distances are not known" in caplog.text
    run("methods=[erm]")
    assert SHARED.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.usefixtures("small_pacs")
def test_a_damaged_or_foreign_file_of_a_model_directory_is_refused() -> None:
    results = run("methods=[erm]", "protocol.test_domains=[photo, sketch]")
    one, two = results["runs"]
    for record, target in ((one, "one"), (two, "two")):
        export_model(str(RUN), target, choice_of(record))
    file, other = Path("one/reference.safetensors"), Path("two/reference.safetensors").read_bytes()
    whole = file.read_bytes()
    for content, problem in ((whole[:-4], "is damaged"), (other, "is of another model"), (None, "does not exist")):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(UserError, match=f"one/reference.safetensors: .*{problem}.*export the model again"):
            load("one")
    file.write_bytes(whole)
    load("one")


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_predictions_have_columns_of_distances(  # type: ignore[no-untyped-def]
    small_model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sorted(str(path) for path in small_model.data.rglob("*.png"))[:7]
    model = load(small_model.model)
    distances = model.distance(images)
    percentiles = model.distance_percentile(distances)
    for given in ([small_model.model], [small_model.run, "--held-out", "sketch"]):
        assert main(["predict", *map(str, given), *images, "--distance", "--entropy", "--abstain-below", "0.5"]) == 0
        rows = table(capsys.readouterr().out)
        assert list(rows[0])[2:] == ["probability", "entropy", "distance", "distance_percentile", "abstained", "error"]
        np.testing.assert_allclose([float(row["distance"]) for row in rows], distances, rtol=1e-4)
        np.testing.assert_allclose([float(row["distance_percentile"]) for row in rows], percentiles, atol=0.1)
    assert main(["predict", str(small_model.model), *images, "--distance", "--group-by", r"\w+\.png"]) == 0
    assert len(table(capsys.readouterr().out)) == len({Path(image).name for image in images})
    by_group = ["--distance", "--probabilities", "--group-by", "pacs|PACS"]
    assert main(["predict", str(small_model.model), *images, *by_group]) == 0
    [row] = table(capsys.readouterr().out)
    assert float(row["distance"]) == pytest.approx(distances.mean(), rel=1e-4) and row["images"] == "7"
    assert float(row["distance_percentile"]) == pytest.approx(percentiles.mean(), abs=0.1)
    broken = tmp_path / "broken.png"
    broken.write_text("no")
    for more in ([], ["--group-by", "broken"]):
        assert main(["predict", str(small_model.model), str(broken), "--distance", *more]) == 2
        [row] = table(capsys.readouterr().out)
        assert row["error"] and not row["distance"] and not row["label"]


def test_distances_that_are_not_known_are_refused_before_any_image(  # type: ignore[no-untyped-def]
    small_model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old"
    shutil.copytree(small_model.run, old)
    shutil.rmtree(old / "training_features")
    [image, *_] = sorted(str(path) for path in small_model.data.rglob("*.png"))
    assert main(["predict", str(old), image, "--held-out", "sketch", "--distance"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    [line] = [line for line in said.err.splitlines() if line.startswith("xdm-ft: ")]
    assert line.startswith("xdm-ft: --distance: not known for this model") and "run its recipe again" in line


def test_the_file_goes_to_the_hub_and_comes_from_it(small_model) -> None:  # type: ignore[no-untyped-def]
    files = {path.name for path in small_model.model.iterdir()}
    assert files <= {*FILES} and "reference.safetensors" in files & {*READ}
