"""Runs and exported models that the tests of this folder share. Who changes one takes a copy."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import miniature
import pytest
import small_models
import small_runs
from exported import CLIP, LAST, run
from small_models import parts

from xdm_ft.experiment import run as run_recipe
from xdm_ft.export.choose import Choice, read_parts, with_training_images
from xdm_ft.export.directory import write_directory
from xdm_ft.report.finished import read_run

VIT = "{label: vit, name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}"
CNN = "{label: cnn, name: timm, model: test_resnet, preprocessing: {size: 32}}"
RUNS = {
    "heads": [
        "protocol.seeds=2",
        "data.class_names={dog: hound}",
        "methods=[erm, {name: erm, head: cosine, label: cosine}, {name: erm, head: mlp, mlp.hidden_width: 8, "
        "label: mlp}, {name: erm, normalize: true, label: unit}, linear_probe, {name: knn, neighbours: [1, 3]}, "
        "prototypes]",
    ],
    "clip": [
        CLIP,
        "training={steps: 2, lr: 0.01, evaluate_every: 1}",
        "methods=[zero_shot, {name: erm, head_init: zero_shot, label: tuned}, "
        "{name: erm, head_init: zero_shot, label: deep, trainable: {blocks: 1}}]",
    ],
    "trained": [
        "protocol.seeds=2",
        "training.steps=4",
        "methods=[{name: erm, label: all, trainable: true}, "
        "{name: erm, label: lora, trainable: {lora: {rank: 2, blocks: 2, dropout: 0.1}}}]",
    ],
    "two encoders": ["training.steps=4", f"methods=[{{name: erm, label: head}}, {LAST}]"],
}


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name in `RUNS` → folder with miniature PACS in `data` and the run in `output/small`, photo held out."""
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
            miniature.domainbed(made[name] / "data", "pacs", per_class=4)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(made[name])
                if name == "two encoders":
                    text = re.sub("encoder: .*", f"encoders: [{VIT}, {CNN}]", small_runs.RECIPE)
                    patch.setattr(small_runs, "RECIPE", text)
                run(*RUNS[name])
        return made[name]

    return folder_of


@pytest.fixture
def shared(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Changes into the folder of a run, which stays as it is."""
    return lambda name: monkeypatch.chdir(folder_of(name))


@pytest.fixture
def copied(folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Changes into a copy of the folder of a run."""

    def enter(name: str) -> None:
        shutil.copytree(folder_of(name), tmp_path / "copy")
        monkeypatch.chdir(tmp_path / "copy")

    return enter


@pytest.fixture
def small_pacs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with miniature PACS under data/."""
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs", per_class=4)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Miniature PACS in `data/`, a run on it in `run`, with its features in `cache`; the exported model in `model`."""
    folder, before = tmp_path_factory.mktemp("small"), Path.cwd()
    os.chdir(folder)
    try:
        miniature.domainbed(folder / "data", "pacs")
        made = small_runs.recipe(
            "methods=[erm]", "encoder.normalize=true", "protocol.test_domains=sketch", "features.batch_size=8"
        )
        assert not run_recipe(made).failed
        directory = folder / made.output.dir / made.name
        found = read_run(directory)
        chosen = read_parts(found, Choice(held_out=("sketch",)))
        write_directory(with_training_images(found, chosen), folder / "model", with_encoder=True)
    finally:
        os.chdir(before)
    paths = SimpleNamespace(folder=folder, data=folder / "data", cache=folder / "cache", run=directory)
    paths.model = folder / "model"
    return paths


@pytest.fixture(scope="session")
def exported_clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    encoder, settings = small_models.demo_clip()
    write_directory(parts(encoder, settings, "cosine", name="open_clip", normalize=True), folder, with_encoder=True)
    return folder


@pytest.fixture
def model(exported_clip, tmp_path):
    """A copy of a model directory with an architecture of its own."""
    return Path(shutil.copytree(exported_clip, tmp_path / "model"))
