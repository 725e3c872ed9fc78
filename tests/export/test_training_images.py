"""Checksums of training images in a model directory: whose they are, and where they do not go."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from exported import RUN, run
from safetensors.numpy import load_file
from test_hub import FakeApi

from xdm_ft.cli.export import export_model
from xdm_ft.cli.parser import main
from xdm_ft.export.choose import Choice
from xdm_ft.export.directory import TRAINING_IMAGES, read_config
from xdm_ft.export.predictor import load

pytestmark = pytest.mark.usefixtures("small_pacs")


def checksums_below(*folders: str) -> set[bytes]:
    files = [path for folder in folders for path in Path("data/PACS", folder).rglob("*.png")]
    return {xxhash.xxh3_128_digest(path.read_bytes()) for path in files}


def exported_to(target: str) -> set[bytes]:
    return {bytes(row) for row in load_file(Path(target) / TRAINING_IMAGES)["xxh3_128"]}


@pytest.mark.slow
def test_a_fold_has_its_own_and_a_final_fit_all_images() -> None:
    run("methods=[erm]")
    first, *_ = sorted(Path("data/PACS/photo").rglob("*.png"))
    assert main(["export", str(RUN), "fold", "--held-out", "photo"]) == 0
    assert exported_to("fold") == checksums_below("art_painting", "cartoon", "sketch")
    export_model(str(RUN), "fit", Choice())
    assert exported_to("fit") == checksums_below("") > exported_to("fold")
    assert (load("fit").training_images is not None) and load(RUN).training_images is None
    assert f"The file {TRAINING_IMAGES}, where it is present, has a checksum" in Path("fit/README.md").read_text()
    shutil.rmtree("cache")  # with its index of hashes: the files are hashed again
    export_model(str(RUN), "again", Choice())
    assert exported_to("again") == exported_to("fit")
    assert xxhash.xxh3_128_digest(first.read_bytes()) in exported_to("fit")


@pytest.mark.parametrize("change", ["gone", "other"])
def test_without_the_runs_images_the_export_says_so_and_leaves_it_out(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    run("methods=[erm]")
    if change == "gone":
        Path("data").rename("elsewhere")
    else:
        first, second, *_ = sorted(Path("data/PACS/sketch").rglob("*.png"))
        first.write_bytes(second.read_bytes())
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        export_model(str(RUN), "model", Choice(held_out=("photo",)))
    [line] = [message for message in caplog.messages if "checksums" in message]
    assert "no checksums of the training images, as they can not be read: " in line and "\n" not in line
    assert not (Path("model") / TRAINING_IMAGES).exists()
    assert read_config(Path("model"))[0].training_images_xxh3 is None and load("model").training_images is None
    assert TRAINING_IMAGES not in Path("model/README.md").read_text()


def test_they_go_to_the_hub_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run("methods=[erm]")
    for options, are_uploaded in (([], False), (["--with-training-hashes"], True)):
        api = FakeApi()
        monkeypatch.setattr("huggingface_hub.HfApi", lambda api=api, **_: api)
        target = f"model{len(options)}"
        arguments = ["export", str(RUN), target, "--method", "erm", "--push-to-hub", "org/name", "--private"]
        assert main([*arguments, *options]) == 0
        assert (TRAINING_IMAGES in api.uploaded) == are_uploaded and "config.json" in api.uploaded
        assert (Path(target) / TRAINING_IMAGES).exists()
        _, (_, how) = api.calls
        assert TRAINING_IMAGES in how["delete_patterns"], "that of an earlier model"
        model = Path(target)
        if not are_uploaded:
            (model / TRAINING_IMAGES).unlink()
        known = load(model).training_images  # as it is on the hub
        assert (known is not None) == are_uploaded and (known is None or known.dtype == np.uint8)
