"""What is open_clip's alone: configs of the recipe, and the activation that weights were trained with."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import TINY, Family, images, tiny_clip

from xdm_ft.encoders.open_clip import OpenClip, resolve
from xdm_ft.runtime.errors import UserError


@pytest.fixture
def tiny(families: dict[str, Family]) -> Family:
    return families["open_clip"]


@pytest.mark.parametrize(
    ("content", "wording"),
    [
        (None, "the config file .* does not exist"),
        ("{", "is not valid JSON"),
        ('{"embed_dim": 8}', "lacks text_cfg, vision_cfg"),
        ("[1]", "lacks embed_dim"),
        ('{"model_cfg": {}}', "write model: local-dir:"),
    ],
)
def test_faulty_config(tiny: Family, tmp_path: Path, content: str | None, wording: str) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=wording):
        tiny.encoder(model=str(path))


def test_own_configs_and_those_of_the_library(tiny: Family, tmp_path: Path) -> None:
    path = tmp_path / "ViT-B-32.json"
    path.write_text(json.dumps(TINY))
    with pytest.raises(UserError, match='would replace open_clip\'s own "ViT-B-32"; rename'):
        tiny.encoder(model=str(path))
    assert open_clip.get_model_config("ViT-B-32")["embed_dim"] == 512
    other = tiny_clip(tmp_path, "tiny_clip", embed_dim=8)  # same stem as `tiny`, registered later
    assert (tiny.encoder().width, other.encoder().width) == (24, 8)
    assert tiny.encoder().identity() != other.encoder().identity()


def test_every_known_pair_of_model_and_weights_passes_or_gets_the_name_of_the_right_model() -> None:
    pairs = open_clip.list_pretrained()
    assert len(pairs) > 100
    for model, tag in pairs:
        with pytest.raises(UserError) as raised:  # tests are offline
            OpenClip(model=model, weights=tag)
        wrong_activation = open_clip.get_pretrained_cfg(model, tag).get("quick_gelu") and "quickgelu" not in model
        expected = f"write encoder.model: {model}-quickgelu" if wrong_activation else "did not download"
        assert expected in str(raised.value), (model, tag)


@torch.no_grad()
def test_quickgelu_files_are_recognised_by_name(tiny: Family, tmp_path: Path) -> None:
    cache = tmp_path / "models--timm--vit_base_patch16_clip_224.openai/snapshots/0"
    (tmp_path / "OpenAI").mkdir()
    cache.mkdir(parents=True)
    paths = (tmp_path / "my-openai-b16.safetensors", tmp_path / "OpenAI/b16.safetensors", cache / "model.safetensors")
    for path in paths:
        save_file(tiny.state, path)
        with pytest.raises(UserError, match=r"trained with QuickGELU.*quick_gelu: true"):
            tiny.encoder(weights=str(path))
        with pytest.raises(UserError, match=r"write encoder.model: ViT-B-16-quickgelu"):
            OpenClip(model="ViT-B-16", weights=str(path))
    plain = tiny.encoder(weights=str(paths[0]), kwargs={"quick_gelu": False})(images())
    assert torch.equal(plain, tiny.encoder()(images()))
    quick = tiny.encoder(weights=str(paths[0]), kwargs={"quick_gelu": True})(images())
    assert not torch.allclose(quick, plain, atol=1e-4)
    path = tmp_path / "ViT-B-16.laion2b_s34b_b88k.safetensors"
    save_file(tiny.state, path)
    with pytest.raises(UserError, match=r"write encoder.model: ViT-B-16, or"):
        OpenClip(model="ViT-B-16-quickgelu", weights=str(path))


def test_files_whose_activation_is_not_known(tiny: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "best.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        resolve("RN50", str(path), {})
        assert "the activation function" in caplog.text and "unknown" in caplog.text and "RN50-quickgelu" in caplog.text
        caplog.clear()
        tiny.encoder()  # this model does not exist with both activations
    assert caplog.text == ""


def test_what_is_known_of_tags() -> None:
    siglip = resolve("ViT-B-16-SigLIP", "own.safetensors", {}).preprocess
    assert siglip["mean"] == (0.5, 0.5, 0.5) and siglip["resize_mode"] == "squash", "that of all its tags"
    assert resolve("ViT-B-16", "own-laion2b_s34b_b88k.safetensors", {}).preprocess["resize_mode"] == "shortest"
    assert resolve("ViT-B-32", "laion2b_s34b_b79k", {}).pretraining == (
        "weights ViT-B-32 laion2b_s34b_b79k, pre-trained on LAION-2B: unseen in fine-tuning, "
        "possibly seen in pre-training"
    )
