"""Columns of distances to the training features, in predictions."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import numpy as np
import pytest

from xdm_ft.cli.parser import main
from xdm_ft.export.hub import FILES, READ
from xdm_ft.export.predictor import load


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
