"""A weights file is enough: with the encoder that it names, it gives the probabilities and the accuracy of its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as without_prefix

from xdm_ft.encoders import Encoder
from xdm_ft.experiment import models
from xdm_ft.features.key import weights_digest
from xdm_ft.images.decode import decode
from xdm_ft.images.transforms import Preprocessing, evaluation_transform
from xdm_ft.recipe.components import find, settings_model
from xdm_ft.recipe.method import EncoderCommon

pytestmark = pytest.mark.usefixtures("small_pacs")
RUN, DATA = Path("output/small"), Path("data/PACS")
HEADS = (
    "erm, {name: erm, head: cosine, cosine.scale: 3.0, label: cosine}, "
    "{name: erm, head: mlp, mlp.hidden_width: 8, mlp.activation: relu, label: mlp}"
)
CLIP = ("encoder={name: open_clip, model: demo, weights: demo, prompts: ['{}', 'a {}'], normalize: true}",)
FROM_TEXT = (
    "zero_shot, {name: erm, head_init: zero_shot, prompts: openai_imagenet, label: many prompts}, "
    "{name: erm, head: cosine, head_init: zero_shot, label: cosine}"
)
END_TO_END = ("encoder.trainable=true", "training.steps=2")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    del metadata["file"], metadata["xxh3"]
    return {key: json.loads(value) for key, value in metadata.items()}, load_file(path)


def encoder_of(about: dict[str, Any], state: dict[str, Tensor]) -> Encoder:
    described = about["encoder"]
    cls = find("encoders", described["settings"]["name"])
    block = settings_model(cls, EncoderCommon).model_validate(described["settings"])
    own = {name: getattr(block, name) for name in type(block).model_fields if name not in EncoderCommon.model_fields}
    torch.manual_seed(99 if described["in_this_file"] else described["seed"])
    encoder: Encoder = cls(**own)
    if described["in_this_file"]:
        weights = {name: value for name, value in state.items() if name.startswith("encoder.")}
        without_prefix(weights, "encoder.")
        encoder.load_state_dict(weights)
    else:
        assert weights_digest(encoder) == described["xxh3"]
        assert not any(name.startswith("encoder.") for name in state)
    assert json.loads(json.dumps(encoder.identity())) == described["identity"] and encoder.width == described["width"]
    return encoder


@torch.no_grad()
def probabilities(path: Path, names: list[str]) -> Tensor:
    """Of the images of these names, from the weights file alone: float32 [n,C]."""
    about, state = read(path)
    encoder, transform = encoder_of(about, state), evaluation_transform(Preprocessing(**about["preprocessing"]))
    head = find("heads", about["head"]["name"])(
        encoder.width, len(about["class_names"]), 0, 0, **about["head"]["settings"]
    )
    weights = {name: value for name, value in state.items() if name.startswith("head.")}
    without_prefix(weights, "head.")
    head.load_state_dict(weights)
    z = encoder(torch.stack([transform(decode(DATA / name, name)) for name in names]))
    logits: Tensor = head.eval()(F.normalize(z, dim=-1) if about["normalize"] else z)
    return logits.softmax(-1)


def check(*overrides: str) -> dict[str, dict[str, Any]]:
    """Checks every model of the run. Returns {label of the method: metadata}."""
    found, checked = small_runs.results("protocol.test_domains=[photo]", *overrides), {}
    images = load_file(RUN / "test_images/photo.safetensors")
    names = bytes(images["names"].tolist()).decode().split("\n")
    assert len(names) == len(images["rows"]) > 4 and all((DATA / name).is_file() for name in names)
    for record in found["runs"]:
        picked = record["selected"]["train_val"]
        about, _ = read(RUN / picked["weights"])
        assert [about["class_names"][label] for label in images["labels"]] == [name.split("/")[-2] for name in names]
        stored = load_file((RUN / picked["weights"]).with_name("predictions.safetensors"))
        again = probabilities(RUN / picked["weights"], names)
        torch.testing.assert_close(again, stored["train_val.probabilities"], rtol=0, atol=1e-6)
        accuracy = (again.argmax(1) == images["labels"]).double().mean().item()
        assert accuracy == picked["metrics"]["test"]["accuracy"] == about["results"]["metrics"]["test"]["accuracy"]
        assert about["results"]["metrics"] == picked["metrics"] and about["step"] == picked["step"]
        assert about["method"]["hparams"].items() >= record["hparams"].items()
        assert (about["method"]["test_domains"], about["protocol"]["selected_by"]) == (["photo"], "train_val")
        (line,) = {row["protocol"] for row in found["summary"] if row["selection"] == "train_val"}
        assert about["protocol"]["description"] == line
        checked[record["method"]] = about
    return checked


def test_every_head_on_a_frozen_encoder() -> None:
    about = check(f"methods=[{HEADS}, {{name: erm, normalize: true, label: unit}}]")
    assert {one["head"]["name"] for one in about.values()} == {"linear", "cosine", "mlp"}
    assert [one["normalize"] for one in about.values()] == [False, False, False, True]
    assert {one["prompts"] for one in about.values()} == {None}


@pytest.mark.slow
def test_heads_that_start_from_prompts() -> None:
    about = check(*CLIP, f"methods=[{FROM_TEXT}, erm]")
    assert about["zero_shot"]["prompts"] == about["cosine"]["prompts"] == ["{}", "a {}"]
    assert len(about["many prompts"]["prompts"]) == 80 and about["erm"]["prompts"] is None
    assert about["erm"]["encoder"]["settings"]["weights"] == "demo"


@pytest.mark.slow
def test_every_head_end_to_end() -> None:
    about = check(*END_TO_END, f"methods=[{HEADS}, linear_probe]")
    assert {name for name, one in about.items() if not one["encoder"]["in_this_file"]} == {"linear_probe"}


@pytest.mark.slow
def test_clip_end_to_end() -> None:
    about = check(*CLIP, *END_TO_END, f"methods=[{FROM_TEXT}]")
    assert {name for name, one in about.items() if not one["encoder"]["in_this_file"]} == {"zero_shot"}


@pytest.mark.slow
def test_probabilities_of_very_many_images_and_classes_are_those_of_the_predicted_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check("methods=[erm]")
    file = "models/erm/photo/seed0-trial0/predictions.safetensors"
    whole = load_file(RUN / file)
    monkeypatch.setattr(models, "LARGEST", whole["train_val.probabilities"].nbytes - 1)
    small_runs.results("methods=[erm]", "protocol.test_domains=[photo]", "output.dir=again")
    short = load_file("again/small" / Path(file))
    most, predicted = whole["train_val.probabilities"].max(1)
    assert torch.equal(short["train_val.probabilities"], most)
    assert torch.equal(short["train_val.predicted"], predicted.int()) and "oracle.probabilities" not in whole


@pytest.mark.slow
def test_the_final_fit_has_its_images_instead_of_metrics() -> None:
    found = small_runs.results("methods=[erm]", "protocol.final_fit=true")
    path = RUN / found["final_fit"]["weights"]
    about, state = read(path)
    assert about["results"]["images"] == found["final_fit"]["images"] and "metrics" not in about["results"]
    assert about["results"]["how"] in found["final_fit"]["how"], "after why this method"
    assert about["method"]["test_domains"] == [] and len(about["method"]["train_domains"]) == 4
    assert encoder_of(about, state) and state["head.weight"].shape[0] == len(about["class_names"])


@pytest.mark.slow
def test_equal_runs_write_equal_files_wherever_they_and_their_data_lie(tmp_path: Path) -> None:
    keys = "methods=[erm]", "protocol.final_fit=true", "protocol.test_domains=[photo, sketch]"
    small_runs.results(*keys)
    shutil.move("data", tmp_path / "elsewhere")
    small_runs.results(*keys, f"data.root={tmp_path / 'elsewhere'}", "output.dir=deeper/other", "features.dir=new")
    files = [sorted(run.rglob("*.safetensors")) for run in (RUN, Path("deeper/other/small"))]
    assert {path.stem for path in files[0]} >= {"train_val", "predictions", "photo", "sketch", "model"}
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes(), one
        assert str(tmp_path).encode() not in one.read_bytes()
