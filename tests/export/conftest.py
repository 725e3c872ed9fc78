"""What the tests of exported models share."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import miniature
import pytest
import small_models
from small_models import parts
from small_runs import recipe

from xdm_ft.experiment import run
from xdm_ft.export.choose import Choice, read_parts, with_training_images
from xdm_ft.export.directory import write_directory
from xdm_ft.report.finished import read_run


@pytest.fixture
def small_pacs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with miniature PACS under data/."""
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Miniature PACS in `data/`, a run on it in `run`, with its features in `cache`; the exported model in `model`."""
    folder, before = tmp_path_factory.mktemp("small"), Path.cwd()
    os.chdir(folder)
    try:
        miniature.domainbed(folder / "data", "pacs")
        made = recipe(
            "methods=[erm]", "encoder.normalize=true", "protocol.test_domains=sketch", "features.batch_size=8"
        )
        assert not run(made).failed
        directory = folder / made.output.dir / made.name
        found = read_run(directory)
        parts = read_parts(found, Choice(held_out=("sketch",)))
        write_directory(with_training_images(found, parts), folder / "model", with_encoder=True)
    finally:
        os.chdir(before)
    paths = SimpleNamespace(folder=folder, data=folder / "data", cache=folder / "cache", run=directory)
    paths.model = folder / "model"
    return paths


@pytest.fixture(scope="session")
def exported_clip(tmp_path_factory):
    """A model directory with an architecture of its own; tests change copies of it (`model`)."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    encoder, settings = small_models.demo_clip()
    write_directory(parts(encoder, settings, "cosine", name="open_clip", normalize=True), folder, with_encoder=True)
    return folder


@pytest.fixture
def model(exported_clip, tmp_path):
    return Path(shutil.copytree(exported_clip, tmp_path / "model"))
