"""Runs and exported models that the tests of this folder share. Who changes one takes a copy."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import miniature
import pytest
import small_models
import small_runs
from exported import CLIP, LAST, RUN, run
from small_models import parts

from xdm_ft.export.choose import Choice, read_parts, with_training_images
from xdm_ft.export.directory import write_directory
from xdm_ft.results.run import read_run

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


def make_run(name: str) -> None:
    miniature.domainbed(Path("data"), "pacs")
    with pytest.MonkeyPatch.context() as patch:
        if name == "two encoders":
            patch.setattr(small_runs, "RECIPE", re.sub("encoder: .*", f"encoders: [{VIT}, {CNN}]", small_runs.RECIPE))
        run(*RUNS[name])


@pytest.fixture(scope="session")
def folder_of(made_once: Callable[..., Path]) -> Callable[[str], Path]:
    """Name in `RUNS` → folder with miniature PACS in `data` and the run in `output/small`, photo held out."""
    return lambda name: made_once(name.replace(" ", "-"), partial(make_run, name))


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


def make_model() -> None:
    miniature.domainbed(Path("data"), "pacs")
    small_runs.results(
        "methods=[erm]", "encoder.normalize=true", "protocol.test_domains=sketch", "features.batch_size=8"
    )
    found = read_run(RUN.absolute())
    chosen = read_parts(found, Choice(held_out=("sketch",)))
    write_directory(with_training_images(found, chosen), Path("model"), with_encoder=True)


@pytest.fixture(scope="session")
def small_model(made_once):
    """Miniature PACS in `data/`, a run on it in `run`, with its features in `cache`; the exported model in `model`."""
    folder = made_once("small", make_model)
    paths = {name: folder / name for name in ("data", "cache", "model")}
    return SimpleNamespace(folder=folder, run=folder / RUN, **paths)


def make_clip() -> None:
    encoder, settings = small_models.demo_clip()
    made = parts(encoder, settings, "cosine", name="open_clip", normalize=True)
    write_directory(made, Path("model"), with_encoder=True)


@pytest.fixture(scope="session")
def exported_clip(made_once):
    return made_once("exported_clip", make_clip) / "model"


@pytest.fixture
def model(exported_clip, tmp_path):
    """A copy of a model directory with an architecture of its own."""
    return Path(shutil.copytree(exported_clip, tmp_path / "model"))
