"""Real images and weights: an exported model predicts in a new process what its run has recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import choice_of, recorded, run
from PIL import Image
from safetensors.torch import load_file

from xdm_ft.cli.export import export_model
from xdm_ft.export.onnx import PACKAGES
from xdm_ft.export.predictor import load

SHARED = Path(__file__).resolve().parents[2] / "../shared/assets"
WEIGHTS = SHARED / "weights/mobilenetv2_100.keras_in1k_int8deq.fp16.safetensors"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs(*PACKAGES),
    pytest.mark.skipif(not (SHARED / "pacs").is_dir(), reason="no PACS images in ../shared/assets/pacs"),
]
IMAGES = 3  # of each class and domain
PREDICT = "import sys, numpy, xdm_ft; numpy.save('found.npy', xdm_ft.load(sys.argv[1], encoder_weights=sys.argv[2] or None).predict_proba(sys.argv[3:]))"  # noqa: E501


@pytest.fixture
def results(request: pytest.FixtureRequest, in_folder: Path) -> dict[str, Any]:
    """results.json of a run with photo held out; the test's parameter is its overrides."""
    for domain in ("photo", "sketch", "cartoon"):
        for name in sorted(path.name for path in (SHARED / "pacs" / domain).iterdir()):
            target = in_folder / "data" / domain / name
            target.mkdir(parents=True)
            for image in sorted((SHARED / "pacs" / domain / name).iterdir())[:IMAGES]:
                shutil.copy(image, target)
    preprocessing = "{mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5], size: 224, crop: 1.0}"
    encoder = f"{{name: timm, model: mobilenetv2_100, weights: '{WEIGHTS.resolve()}', preprocessing: {preprocessing}, "
    encoder += "kwargs: {bn_eps: 1e-3, pad_type: same}}"
    return run("data={name: folder, root: data}", f"encoder={encoder}", *request.param)


def held_out() -> list[str]:
    images = load_file("output/small/test_images/photo.safetensors")
    return [f"data/{name}" for name in bytes(images["names"].tolist()).decode().split("\n")]


def check(record: dict[str, Any], with_encoder: bool, atol: float = 1e-6) -> None:
    paths, target = held_out(), f"with-{with_encoder}"
    export_model("output/small", target, choice_of(record), with_encoder=with_encoder, onnx=with_encoder, no_site=True)
    weights = str(WEIGHTS) if load_needs_weights(target) else ""
    subprocess.run([sys.executable, "-c", PREDICT, target, weights, *paths], check=True)
    found, expected = np.load("found.npy"), recorded(record)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    assert len(paths) == 7 * IMAGES and (found.argmax(1) == expected.argmax(1)).all()
    if with_encoder:
        model = load(target, precision="fp32")
        pixels = torch.stack([model.transform(Image.open(path).convert("RGB")) for path in paths]).numpy()
        import onnxruntime

        session = onnxruntime.InferenceSession(f"{target}/model.onnx", providers=["CPUExecutionProvider"])
        [probabilities] = session.run(["probabilities"], {"pixels": pixels})
        np.testing.assert_allclose(probabilities, model.predict_proba(paths), rtol=0, atol=1e-4)


def load_needs_weights(target: str) -> bool:
    encoder = json.loads(Path(target, "config.json").read_text())["encoder"]
    return encoder["file"] is None


@pytest.mark.parametrize(
    "results",
    [
        ("methods=[xdomainmix+sam]", "training.batch_size=7"),
        pytest.param(("methods=[erm, xdomainmix+sam]", "training.batch_size=7"), marks=pytest.mark.soak),
    ],
    indirect=True,
)
def test_heads_on_a_frozen_encoder(results: dict[str, Any]) -> None:
    for record in results["runs"]:
        for with_encoder in (False, True):
            check(record, with_encoder)
            shutil.rmtree(f"with-{with_encoder}")


@pytest.mark.soak
@pytest.mark.parametrize("results", [("methods=[erm]", "features.precision=bf16")], indirect=True)
def test_bf16(results: dict[str, Any]) -> None:
    check(results["runs"][0], with_encoder=True, atol=1e-2)
    whole = load("with-True", precision="fp32").predict_proba(held_out())
    # MobileNetV2's features are rough in bf16
    np.testing.assert_allclose(whole, recorded(results["runs"][0]), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    "results", [("methods=[erm]", "encoder.trainable=true", "training.steps=2", "training.lr=1e-4")], indirect=True
)
def test_a_model_trained_end_to_end(results: dict[str, Any]) -> None:
    check(results["runs"][0], with_encoder=True)
