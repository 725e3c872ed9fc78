"""timm, open_clip and ONNX Runtime load a model directory, by the code of docs/deploying.md; heads as embeddings."""

from __future__ import annotations

import re
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
from xdm_ft.export.directory import write_directory
from xdm_ft.export.onnx import PACKAGES, write_onnx
from xdm_ft.export.parts import Classifier
from xdm_ft.export.predictor import Model
from xdm_ft.runtime.errors import UserError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploying.md"


def snippet(heading: str) -> str:
    """The Python code below a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    [code] = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return code


def run_snippet(heading: str, **names: object) -> dict[str, object]:
    space: dict[str, object] = dict(names)
    exec(compile(snippet(heading), f"{PAGE.name}: {heading}", "exec"), space)
    return space


@pytest.fixture
def images(tmp_path, monkeypatch):
    """The folder of the snippets, with their two images."""
    monkeypatch.chdir(tmp_path)
    for path, name in zip(photographs(tmp_path, 2), ("a.png", "b.png"), strict=True):
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


@pytest.mark.parametrize("network", ["test_vit", pytest.param("mobilenetv2_100", marks=pytest.mark.slow)])
def test_timm_loads_the_encoder_and_the_classifier(images, network):
    import timm

    model = saved_by_timm(network, {"head": "linear"}, temperature=2.0)
    made = run_snippet("timm")
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
    clip = run_snippet("open_clip")["clip"]
    with torch.no_grad():
        features = clip.encode_image(pixels_of(model, images))
    np.testing.assert_allclose(F.normalize(features, dim=-1).numpy(), model.encode(images), atol=1e-6)
    made = run_snippet("The head as class embeddings", clip=clip)
    np.testing.assert_allclose(made["clip_probabilities"].numpy(), model.predict_proba(images), atol=1e-5)


@pytest.mark.slow
@pytest.mark.needs(*PACKAGES)
def test_onnx_runtime_predicts_from_image_files(images):
    torch.manual_seed(0)
    Path("onnx_model").mkdir()
    model = parts(*small_models.timm("test_vit"), temperature=0.1)
    write_onnx(model, Path("onnx_model"), [], include_preprocessing=True)
    found = run_snippet("ONNX Runtime")["onnx_probabilities"]
    # the temperature makes rounding of the logits ten times as large
    np.testing.assert_allclose(found, Model(model, "cpu").predict_proba(images), atol=1e-5)


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("cosine", {}),
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
    torch.testing.assert_close(logits, classifier.logits(classifier.as_read(z)))
    assert embeddings.dtype == bias.dtype == torch.float32 and not embeddings.requires_grad
    assert embeddings.norm(dim=1).mean().item() == pytest.approx(1)
    assert (head == "linear") == bool(bias.any())


@pytest.mark.parametrize(
    ("head", "reason"), [("mlp", "the head is mlp, which has none"), ("linear", "features that are not L2-normalised")]
)
def test_other_heads_have_no_class_embeddings(head, reason):
    with pytest.raises(UserError, match=f"^class embeddings: .*{reason}.*; train with "):
        Model(parts(Tiny(), {"model": "tiny"}, head)).class_embeddings()


def test_every_snippet_of_the_page_is_run_here():
    code = re.findall(r"^```python$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    run = re.findall(r"run_snippet\(\"", Path(__file__).read_text(encoding="utf-8"))
    assert len(code) == len(run) >= 4
