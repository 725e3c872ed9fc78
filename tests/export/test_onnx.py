"""Other programs read a model: model.onnx, and timm, open_clip and ONNX Runtime by the programs in docs/examples/."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_models
import torch
import torch.nn.functional as F
from PIL import Image
from small_models import Tiny, parts, photographs

import xdm_ft
from xdm_ft.export import Classifier
from xdm_ft.export import onnx as own
from xdm_ft.export.directory import write_directory
from xdm_ft.export.onnx import write_onnx
from xdm_ft.export.predictor import Model
from xdm_ft.runtime.errors import UserError


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


@pytest.mark.needs(*own.PACKAGES)
def test_the_file_computes_what_the_model_computes_and_describes_itself(written):
    """Here from image files, so with the whole preprocessing; the temperature is inside."""
    model, file, paths = written
    assert file.include_preprocessing and file.compared_on == "4 images" and file.bytes == file.path.stat().st_size
    runtime = session(file.path)
    resized = own.resize_for_comparison(opened(paths), model.config.preprocessing)
    logits, probabilities = runtime.run(["logits", "probabilities"], {"images": resized})
    expected = Model(model, "cpu").predict_proba(paths)
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(torch.from_numpy(logits).softmax(1), expected, atol=1e-6)
    assert 0 <= file.difference < 1e-6 and len({row.tobytes() for row in expected.round(4)}) == 4, "images differ"

    about = runtime.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(about["class_names"])) == small_models.CLASSES and about["xdm_ft"]
    assert json.loads(about["preprocessing"]) == model.config.preprocessing.model_dump(mode="json")
    assert {key: about[key] for key in ("opset", "temperature")} == {"opset": "20", "temperature": "2.0"}
    assert [(one.name, one.type, one.shape) for one in [*runtime.get_inputs(), *runtime.get_outputs()]] == [
        ("images", "tensor(uint8)", ["batch", 32, 32, 3]),
        *((name, "tensor(float)", ["batch", 4]) for name in ("logits", "probabilities")),
    ]
    content = file.path.read_bytes()  # torch's exporter writes stack traces into it
    for folder in (Path(own.__file__).parents[2], Path(torch.__file__).parents[1], file.path.parent, Path.home()):
        assert str(folder).encode() + b"/" not in content
    assert b".py" not in content and b"stack_trace" not in content


@pytest.mark.needs(*own.PACKAGES)
def test_a_file_that_differs_is_refused_and_not_kept(written, tmp_path, monkeypatch):
    """The file of another model stands for a fault of the exporter."""
    _, file, _ = written
    monkeypatch.setattr(own, "export_bytes", lambda *_: file.path.read_bytes())
    other = tiny(temperature=0.1, normalize=True)
    with pytest.raises(UserError, match=r"model\.onnx: probabilities of ONNX Runtime and torch differ by up to [1-9]"):
        write_onnx(other, tmp_path, [], include_preprocessing=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.needs(*own.PACKAGES)
@pytest.mark.slow
def test_a_model_over_2_gb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match=r"its weights take .* GB, and an ONNX file holds 2 GB; leave --onnx out"):
        write_onnx(tiny(), tmp_path, [], include_preprocessing=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.needs(*own.PACKAGES)
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


KEYS = F.normalize(torch.arange(240.0).view(30, 8).sin(), dim=1)
NEIGHBOURS = {"keys": KEYS, "labels": torch.arange(30) % 4, "k": torch.tensor(5), "temperature": torch.tensor(0.07)}


@pytest.mark.needs(*own.PACKAGES)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        pytest.param("linear", {"normalize": True, "temperature": 0.5}, marks=pytest.mark.soak),
        pytest.param("cosine", {}, marks=pytest.mark.soak),
        pytest.param("mlp", {"temperature": 3.0}, marks=pytest.mark.soak),
        pytest.param("linear", {"members": 3}, marks=pytest.mark.soak),
        ("mlp", {"members": 2, "normalize": True}),
        ("neighbours", {}),
    ],
)
def test_every_head_exports(tmp_path, head, changes):
    model = tiny(head=head, **changes)
    if head == "neighbours":
        model.heads["head"].load_state_dict(NEIGHBOURS)
    file = write_onnx(model, tmp_path, opened(photographs(tmp_path)), include_preprocessing=False)
    assert file.difference < 1e-5


OTHERS = ("mobilenetv2_100", "densenet121", "convnext_atto", "test_resnet")


@pytest.mark.needs(*own.PACKAGES)
@pytest.mark.slow
@pytest.mark.parametrize("network", ["test_vit", *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def test_encoders_of_timm_export(tmp_path, network):
    model, paths = parts(*small_models.timm(network)), photographs(tmp_path, 5)
    file = write_onnx(model, tmp_path, opened(paths[:4]), include_preprocessing=False)
    assert file.difference < 1e-5
    pixels = torch.stack([Model(model, "cpu").transform(image) for image in opened(paths)])
    [found] = session(file.path).run(["probabilities"], {"pixels": pixels.numpy()})  # yet another batch size
    np.testing.assert_allclose(found, Model(model, "cpu").predict_proba(paths), atol=1e-5)


@pytest.mark.needs(*own.PACKAGES)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "pooling"),
    [
        ("open_clip", ""),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("open_clip", "cls_mean"), ("timm", "cls_mean"))),
    ],
)
def test_pooled_tokens_export_and_clip_does_without_its_text_side(tmp_path, library, pooling):
    """Both poolings of tokens are in cls_mean."""
    chosen = {"pooling": pooling} if pooling else {}
    settings = {"model": "demo", "weights": "demo", **chosen}
    encoder = small_models.find("encoders", "open_clip")(**settings)
    if library == "timm":
        encoder, settings = small_models.timm("test_vit", **chosen)
    model = parts(encoder, settings, "cosine", name=library, normalize=True)
    file = write_onnx(model, tmp_path, opened(photographs(tmp_path)), include_preprocessing=True)
    assert file.difference < 1e-5
    if library == "open_clip" and not pooling:
        visual = sum(tensor.nbytes for tensor in encoder.model.visual.state_dict().values())
        assert visual < file.bytes < 1.2 * visual + 50_000


# the programs in docs/examples/

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def run_example(name: str) -> dict[str, object]:
    """Returns the variables of the program after it has run."""
    return runpy.run_path(str(EXAMPLES / name))


@pytest.fixture
def images(in_folder):
    """The folder of the programs, with their two images."""
    for path, name in zip(photographs(in_folder, 2), ("a.png", "b.png"), strict=True):
        Path(path).rename(name)
    return ["a.png", "b.png"]


def pixels_of(model, images):
    return torch.stack([model.transform(Image.open(path)) for path in images])


def saved_by_timm(network: str, changes: dict[str, object], temperature: float = 1.0):
    """A model directory whose encoder is not that of its seed, so that a file must be read."""
    encoder, settings = small_models.timm(network)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.02)
    write_directory(parts(encoder, settings, temperature=temperature, **changes), Path("timm_model"), with_encoder=True)
    return xdm_ft.load("timm_model", device="cpu")


@pytest.mark.parametrize("network", ["test_vit", pytest.param("mobilenetv2_100", marks=pytest.mark.soak)])
def test_timm_loads_the_encoder_and_the_classifier(images, network):
    import timm

    model = saved_by_timm(network, {"head": "linear"}, temperature=2.0)
    made = run_example("timm_model.py")
    pixels = pixels_of(model, images).to(memory_format=torch.channels_last)  # as `Model` computes
    overlay = {"file": "timm_model/encoder.safetensors"}
    again = timm.create_model(
        made["name"], pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay, **made["kwargs"]
    ).eval()
    with torch.no_grad():
        for encoder in (made["network"], again):
            features = encoder.to(memory_format=torch.channels_last)(pixels)
            assert features.numpy().tobytes() == model.encode(images).tobytes()
        logits = made["classifier"](pixels)
        torch.testing.assert_close(logits / 2, model.module(pixels), rtol=1e-5, atol=1e-5)
    assert logits.std() > 1e-3, "they depend on class or image"


def test_open_clip_loads_a_fine_tuned_clip_and_takes_the_head_as_class_embeddings(images):
    encoder, settings = small_models.demo_clip()
    with torch.no_grad():
        encoder.model.visual.proj.mul_(1.5)
    tuned = parts(encoder, settings, "cosine", name="open_clip", normalize=True, temperature=0.5, trained=True)
    write_directory(tuned, Path("clip_model"), with_encoder=True)
    model = xdm_ft.load("clip_model", device="cpu")
    made = run_example("open_clip_model.py")
    with torch.no_grad():
        features = made["clip"].encode_image(pixels_of(model, images))
    np.testing.assert_allclose(F.normalize(features, dim=-1).numpy(), model.encode(images), atol=1e-6)
    np.testing.assert_allclose(made["clip_probabilities"].numpy(), model.predict_proba(images), atol=1e-5)


@pytest.mark.slow
@pytest.mark.needs(*own.PACKAGES)
def test_onnx_runtime_predicts_from_image_files(images):
    torch.manual_seed(0)
    Path("onnx_model").mkdir()
    model = parts(*small_models.timm("test_vit"), temperature=0.1)
    write_onnx(model, Path("onnx_model"), [], include_preprocessing=True)
    found = run_example("onnx_runtime.py")["onnx_probabilities"]
    # the temperature makes rounding of the logits ten times as large
    np.testing.assert_allclose(found, Model(model, "cpu").predict_proba(images), atol=1e-5)
    for mode in ("I;16", "RGBA"):  # Pillow alone would clip the one, and drop the alpha of the other
        Image.new(mode, (40, 40)).save("b.png")
        with pytest.raises(SystemExit, match=r"b\.png: this program reads neither"):
            run_example("onnx_runtime.py")


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        pytest.param("cosine", {}, marks=pytest.mark.soak),
        ("cosine", {"normalize": True, "temperature": 2.0}),
        ("linear", {"normalize": True, "temperature": 0.5}),
        ("linear", {"normalize": True, "members": 3}),
        ("cosine", {"members": 3, "temperature": 3.0}),
    ],
)
def test_class_embeddings_give_the_logits(head, changes):
    classifier = Classifier(parts(Tiny(), {"model": "tiny"}, head, **changes))
    z = torch.randn(5, 8)
    embeddings, scale, bias = Model.class_embeddings(SimpleNamespace(module=classifier))
    logits = scale * F.normalize(z, dim=-1) @ embeddings.T + bias
    torch.testing.assert_close(logits, classifier.logits(classifier.head_input(z)))
    assert embeddings.dtype == bias.dtype == torch.float32 and not embeddings.requires_grad
    assert embeddings.norm(dim=1).mean().item() == pytest.approx(1)
    assert (head == "linear") == bool(bias.any())


@pytest.mark.parametrize(
    ("head", "reason"), [("mlp", "the head is mlp, which has none"), ("linear", "features that are not L2-normalised")]
)
def test_other_heads_have_no_class_embeddings(head, reason):
    with pytest.raises(UserError, match=f"^class embeddings: .*{reason}.*; train with "):
        Model(parts(Tiny(), {"model": "tiny"}, head)).class_embeddings()


def test_every_example_is_run_here():
    run = {*re.findall(r"run_example\(\"([\w.]+)\"", Path(__file__).read_text(encoding="utf-8"))}
    assert run == {path.name for path in EXAMPLES.glob("*.py")} and len(run) == 3
