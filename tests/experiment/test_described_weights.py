"""A weights file is enough: with the encoder that it names, it gives the probabilities and the accuracy of its run."""

import json
import shutil
from pathlib import Path

import pytest
import small_runs
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as without_prefix

from xdm_ft.experiment import models
from xdm_ft.features.key import weights_digest
from xdm_ft.images.decode import decode
from xdm_ft.images.transforms import Preprocessing, evaluation_transform
from xdm_ft.recipe.components import find, settings_model
from xdm_ft.recipe.method import EncoderCommon

RUN, DATA = Path("output/small"), Path("data/PACS")
CLIP = "encoder={name: open_clip, model: demo, weights: demo, prompts: ['{}', 'a {}'], normalize: true}"
FROM_TEXT = (
    "methods=[zero_shot, {name: erm, head_init: zero_shot, prompts: openai_imagenet, label: many prompts}, "
    "{name: erm, head: cosine, head_init: zero_shot, label: cosine}, {name: erm, label: plain}]"
)


def read(path):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return {key: json.loads(value) for key, value in metadata.items() if key not in ("file", "xxh3")}, load_file(path)


def part(state, prefix):
    weights = {name: value for name, value in state.items() if name.startswith(prefix)}
    without_prefix(weights, prefix)
    return weights


def encoder_of(metadata, state):
    described = metadata["encoder"]
    cls = find("encoders", described["settings"]["name"])
    block = settings_model(cls, EncoderCommon).model_validate(described["settings"])
    own = {name: getattr(block, name) for name in type(block).model_fields if name not in EncoderCommon.model_fields}
    torch.manual_seed(99 if described["in_this_file"] else described["seed"])
    encoder, weights = cls(**own), part(state, "encoder.")
    if described["in_this_file"]:
        encoder.load_state_dict(weights)
    else:
        assert weights_digest(encoder) == described["xxh3"] and not weights
    assert json.loads(json.dumps(encoder.identity())) == described["identity"] and encoder.width == described["width"]
    return encoder.eval()


@torch.no_grad()
def probabilities(path, names):
    """Of the images of these names, from the weights file alone: float32 [n,C]."""
    metadata, state = read(path)
    encoder, transform = encoder_of(metadata, state), evaluation_transform(Preprocessing(**metadata["preprocessing"]))
    described = metadata["head"]
    head = find("heads", described["name"])(
        encoder.width, len(metadata["class_names"]), 0, 0, **described["settings"]
    ).eval()
    head.load_state_dict(part(state, "head."))
    z = encoder(torch.stack([transform(decode(DATA / name, name)) for name in names]))
    return head(F.normalize(z, dim=-1) if metadata["normalize"] else z).softmax(-1)


def check_run(domain):
    """Checks every model of the run. Returns {label of the method: metadata}."""
    results, checked = small_runs.document(RUN), {}
    images = load_file(RUN / f"test_images/{domain}.safetensors")
    names = bytes(images["names"].tolist()).decode().split("\n")
    assert len(names) == len(images["rows"]) > 4 and all((DATA / name).is_file() for name in names)
    (line,) = {row["protocol"] for row in results["summary"] if row["selection"] == "train_val"}
    for record in results["runs"]:
        pick = record["selected"]["train_val"]
        metadata, _ = read(RUN / pick["weights"])
        labels = [metadata["class_names"][label] for label in images["labels"]]
        assert labels == [name.split("/")[-2] for name in names]
        stored = load_file((RUN / pick["weights"]).with_name("predictions.safetensors"))
        again = probabilities(RUN / pick["weights"], names)
        torch.testing.assert_close(again, stored["train_val.probabilities"], rtol=0, atol=1e-6)
        accuracy = (again.argmax(1) == images["labels"]).double().mean().item()
        assert accuracy == pick["metrics"]["test"]["accuracy"] == metadata["results"]["metrics"]["test"]["accuracy"]
        assert metadata["results"]["metrics"] == pick["metrics"] and metadata["step"] == pick["step"]
        assert metadata["method"]["hparams"].items() >= record["hparams"].items()
        assert (metadata["method"]["test_domains"], metadata["protocol"]["selected_by"]) == ([domain], "train_val")
        assert metadata["protocol"]["description"] == line
        checked[record["method"]] = metadata
    return checked


@pytest.mark.slow
def test_every_head_on_a_frozen_encoder(bank, monkeypatch):
    monkeypatch.chdir(bank)
    described = check_run("sketch")
    assert {metadata["head"]["name"] for metadata in described.values()} == {"linear", "cosine", "mlp"}
    assert [label for label, metadata in described.items() if metadata["normalize"]] == ["unit"]
    assert {metadata["prompts"] for metadata in described.values()} == {None}


@pytest.mark.slow
def test_every_head_end_to_end(end_to_end, monkeypatch):
    monkeypatch.chdir(end_to_end)
    described = check_run("sketch")
    outside = {label for label, metadata in described.items() if not metadata["encoder"]["in_this_file"]}
    assert outside == {"linear_probe"} < {*described}


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [pytest.param(False, marks=pytest.mark.soak), True])
def test_heads_that_start_from_prompts(trainable, small_pacs):
    how = ("encoder.trainable=true", "training={steps: 2, batch_size: 2, evaluate_every: 2}") if trainable else ()
    small_runs.results("protocol.test_domains=[photo]", CLIP, FROM_TEXT, *how)
    described = check_run("photo")
    assert described["zero_shot"]["prompts"] == described["cosine"]["prompts"] == ["{}", "a {}"]
    assert len(described["many prompts"]["prompts"]) == 80 and described["plain"]["prompts"] is None
    assert described["zero_shot"]["encoder"]["settings"]["weights"] == "demo"
    inside = {label for label, metadata in described.items() if metadata["encoder"]["in_this_file"]}
    assert inside == ({"many prompts", "cosine", "plain"} if trainable else set())


@pytest.mark.slow
def test_equal_runs_write_equal_files_wherever_they_and_their_data_lie(small_pacs, tmp_path, monkeypatch):
    keys = "methods=[erm]", "protocol.final_fit=true", "protocol.test_domains=[photo, sketch]"
    results = small_runs.results(*keys)
    shutil.move("data", tmp_path / "elsewhere")
    moved = (f"data.root={tmp_path / 'elsewhere'}", "output.dir=deeper/other", "features.dir=new")
    small_runs.results(*keys, *moved)
    files = [sorted(run.rglob("*.safetensors")) for run in (RUN, Path("deeper/other/small"))]
    assert {path.stem for path in files[0]} >= {"train_val", "predictions", "photo", "sketch", "model"}
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes(), one
        assert str(tmp_path).encode() not in one.read_bytes()

    # the final fit has its images instead of metrics
    final = results["final_fit"]
    metadata, state = read(RUN / final["weights"])
    assert metadata["results"]["images"] == final["images"] and "metrics" not in metadata["results"]
    assert metadata["results"]["how"] in final["how"], "after why this method"
    assert metadata["method"]["test_domains"] == [] and len(metadata["method"]["train_domains"]) == 4
    assert encoder_of(metadata, state) and state["head.weight"].shape[0] == len(metadata["class_names"])

    # of very many images and classes the probabilities of the predicted classes are kept
    file = "models/erm/photo/seed0-trial0/predictions.safetensors"
    complete = load_file(RUN / file)
    monkeypatch.setattr(models, "LARGEST", complete["train_val.probabilities"].nbytes - 1)
    small_runs.results("methods=[erm]", "protocol.test_domains=[photo]", "output.dir=large", *moved[::2])
    short = load_file(f"large/small/{file}")
    highest, predicted = complete["train_val.probabilities"].max(1)
    torch.testing.assert_close(short["train_val.probabilities"], highest)
    assert torch.equal(short["train_val.predicted"], predicted.int()) and "oracle.probabilities" not in complete
