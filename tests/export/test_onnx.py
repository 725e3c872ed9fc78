"""model.onnx computes what torch computes, describes itself, and says nothing of the machine that wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small_models
import torch
from PIL import Image
from small_models import Tiny, parts, photographs

from xdm_ft.export import onnx as own
from xdm_ft.export.hub import leaks_in
from xdm_ft.export.onnx import write_onnx
from xdm_ft.export.predictor import Model
from xdm_ft.runtime.errors import UserError

pytestmark = pytest.mark.needs(*own.PACKAGES)


def session(path: Path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def tiny(**changes):
    torch.manual_seed(0)
    return parts(Tiny(), {"model": "tiny"}, **changes)


def opened(paths: list[str]) -> list[Image.Image]:
    return [Image.open(path) for path in paths]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model with its file, which has the preprocessing inside."""
    folder = tmp_path_factory.mktemp("onnx")
    model = tiny(temperature=2.0, normalize=True)
    paths = photographs(folder)
    return model, write_onnx(model, folder, opened(paths), include_preprocessing=True), paths


def test_the_file_computes_what_the_model_computes(written):
    """Here from image files, so with the whole preprocessing; the temperature is inside."""
    model, file, paths = written
    assert file.include_preprocessing and file.compared_on == "4 images" and file.bytes == file.path.stat().st_size
    resized = own.resize_for_comparison(opened(paths), model.config.preprocessing)
    logits, probabilities = session(file.path).run(["logits", "probabilities"], {"images": resized})
    expected = Model(model, "cpu").predict_proba(paths)
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    assert 0 <= file.difference < 1e-6
    assert len({row.tobytes() for row in expected.round(4)}) == 4, "the images differ"
    exponentials = np.exp(logits)
    np.testing.assert_allclose(exponentials / exponentials.sum(1, keepdims=True), expected, atol=1e-6)


def test_the_file_describes_itself(written):
    model, file, _ = written
    found = session(file.path)
    about = found.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(about["class_names"])) == small_models.CLASSES
    assert json.loads(about["preprocessing"]) == model.config.preprocessing.model_dump(mode="json")
    assert {key: about[key] for key in ("opset", "temperature")} == {"opset": "20", "temperature": "2.0"}
    assert about["xdm_ft"]
    [image] = found.get_inputs()
    assert (image.name, image.type, image.shape) == ("images", "tensor(uint8)", ["batch", 32, 32, 3])
    assert [(one.name, one.type, one.shape) for one in found.get_outputs()] == [
        (name, "tensor(float)", ["batch", 4]) for name in ("logits", "probabilities")
    ]


def test_the_file_says_nothing_of_this_machine(written):
    """torch's exporter writes stack traces into it; here they are gone."""
    _, file, _ = written
    content = file.path.read_bytes()
    for place in (Path(own.__file__).parents[2], Path(torch.__file__).parents[1], file.path.parent, Path.home()):
        assert str(place).encode() + b"/" not in content
    assert b".py" not in content and b"stack_trace" not in content
    assert not leaks_in(file.path)


def test_a_file_that_differs_is_refused_and_not_kept(written, tmp_path, monkeypatch):
    """The file of another model stands for a fault of the exporter."""
    _, file, _ = written
    monkeypatch.setattr(own, "exported_bytes", lambda *_: file.path.read_bytes())
    other = tiny(temperature=0.1, normalize=True)
    with pytest.raises(UserError, match=r"model\.onnx: probabilities of ONNX Runtime and torch differ by up to [1-9]"):
        write_onnx(other, tmp_path, [], include_preprocessing=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_over_2_gb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match=r"its weights take .* GB, and an ONNX file holds 2 GB; leave --onnx out"):
        write_onnx(tiny(), tmp_path, [], include_preprocessing=False)
    assert not list(tmp_path.iterdir())


def test_an_encoder_that_does_not_export_is_reported_in_one_line(tmp_path):
    class Branching(Tiny):
        def forward(self, images):
            return super().forward(images if images.sum() > 0 else -images)  # a branch on data

    model = parts(Branching(), {"model": "branching"})
    with pytest.raises(
        UserError, match=r"encoder\.model: branching does not export to ONNX .*leave --onnx out"
    ) as found:
        write_onnx(model, tmp_path, [], include_preprocessing=False)
    assert len(str(found.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_without_the_packages_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(own, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(UserError, match=r"^ONNX needs onnxscript, not installed here; pip install 'xdm_ft\[onnx\]'$"):
        own.check_installed()


HEADS = [
    ("linear", {"normalize": True, "temperature": 0.5}),
    ("cosine", {}),
    ("mlp", {"temperature": 3.0}),
    ("linear", {"members": 3}),
    ("cosine", {"members": 3, "temperature": 2.0}),
    ("mlp", {"members": 2, "normalize": True}),
]


@pytest.mark.slow
def test_a_head_of_training_features_exports(tmp_path):
    given = tiny(head="neighbours")
    keys = torch.nn.functional.normalize(
        torch.rand(30, given.encoder.width, generator=torch.Generator().manual_seed(0))
    )
    state = {"keys": keys, "labels": torch.arange(30) % 4, "k": torch.tensor(5), "temperature": torch.tensor(0.07)}
    given.heads["head"].load_state_dict(state)
    file = write_onnx(given, tmp_path, opened(photographs(tmp_path)), include_preprocessing=False)
    assert file.difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("head", "changes"), HEADS)
def test_every_head_exports(tmp_path, head, changes):
    file = write_onnx(tiny(head=head, **changes), tmp_path, opened(photographs(tmp_path)), include_preprocessing=False)
    assert file.difference < 1e-6


NETWORKS = ["test_vit", "test_resnet", "resnet18", "mobilenetv2_100", "densenet121", "efficientnet_b0", "convnext_atto"]


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_encoders_of_timm_export(tmp_path, network):
    model = parts(*small_models.timm(network))
    file = write_onnx(model, tmp_path, opened(photographs(tmp_path)), include_preprocessing=False)
    assert file.difference < 1e-5
    pixels = torch.stack([Model(model, "cpu").transform(image) for image in opened(photographs(tmp_path, 5))])
    [found] = session(file.path).run(["probabilities"], {"pixels": pixels.numpy()})  # yet another batch size
    np.testing.assert_allclose(found, Model(model, "cpu").predict_proba(photographs(tmp_path, 5)), atol=1e-5)


@pytest.mark.slow
def test_pooled_tokens_export(tmp_path):
    """Those of timm and of open_clip; both poolings of tokens are in cls_mean."""
    clip = {"model": "demo", "weights": "demo", "pooling": "cls_mean"}
    for name, (encoder, settings) in {
        "timm": small_models.timm("test_vit", pooling="cls_mean"),
        "open_clip": (small_models.find("encoders", "open_clip")(**clip), clip),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        model = parts(encoder, settings, name=name)
        file = write_onnx(model, folder, opened(photographs(tmp_path)), include_preprocessing=False)
        assert file.difference < 1e-5


@pytest.mark.slow
def test_clip_exports_without_its_text_side(tmp_path):
    encoder, settings = small_models.demo_clip()
    model = parts(encoder, settings, "cosine", name="open_clip", normalize=True)
    file = write_onnx(model, tmp_path, opened(photographs(tmp_path)), include_preprocessing=True)
    assert file.difference < 1e-5
    visual = sum(tensor.nbytes for tensor in encoder.model.visual.state_dict().values())
    assert visual < file.bytes < 1.2 * visual + 50_000
