"""An encoder cut in two: above(below(x)) is z, bit for bit; what trains, what stays, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from xdm_ft.data._transforms import PreprocessingOverrides
from xdm_ft.encoders import Encoder
from xdm_ft.encoders._cut import Below, Cut, depth_from_top, describe_chain
from xdm_ft.encoders.open_clip import OpenClip
from xdm_ft.encoders.timm import Timm
from xdm_ft.errors import UserError


def timm_encoder(name: str, size: int, **kwargs: Any) -> Timm:
    torch.manual_seed(0)
    return Timm(model=name, kwargs=kwargs, preprocessing=PreprocessingOverrides(size=size))


def vit(**kwargs: Any) -> Timm:
    return timm_encoder("test_vit", 64, img_size=64, **kwargs)


def images(encoder: Encoder, count: int = 3) -> Tensor:
    size = encoder.preprocessing.size
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_every_cut(encoder: Encoder) -> None:
    x = images(encoder)
    z = encoder(x)
    assert encoder.block_names and not encoder.blocks_reason
    for blocks in range(1, len(encoder.block_names) + 1):
        cut = Cut(encoder, blocks)
        assert cut.name == encoder.block_names[-blocks]
        activations = cut.below(x)
        assert activations.shape == (3, *cut.shape) and activations.is_contiguous()
        assert torch.equal(cut.above(activations), z), cut.name
        assert not torch.equal(cut.above(activations.flip(0)), z)


CLIP_TEXT = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
CLIPS: dict[str, dict[str, Any]] = {
    "vit": {"vision_cfg": {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8}},
    "resnet": {"vision_cfg": {"image_size": 64, "layers": [1, 2, 1, 1], "width": 8, "patch_size": None}},
    "timm": {"vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"}},
}


def clip(folder: Path, kind: str) -> OpenClip:
    config, weights = folder / f"cut_{kind}.json", folder / f"cut_{kind}.safetensors"
    config.write_text(json.dumps({"embed_dim": 24, "text_cfg": CLIP_TEXT, **CLIPS[kind]}))
    open_clip.add_model_config(config)
    torch.manual_seed(0)
    model = open_clip.create_model(config.stem)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, weights)
    return OpenClip(model=str(config), weights=str(weights))


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext", "test_efficientnet"])
def test_above_after_below_is_the_whole(name: str) -> None:
    check_every_cut(vit() if name == "test_vit" else timm_encoder(name, 64))


@pytest.mark.parametrize("kind", CLIPS)
def test_clips_are_cut_in_their_image_side(kind: str, tmp_path: Path) -> None:
    encoder = clip(tmp_path, kind)
    check_every_cut(encoder)
    assert all(name.startswith("model.visual.") for name in encoder.block_names)


def test_what_lies_above_trains_and_the_rest_does_not() -> None:
    encoder = copy.deepcopy(vit())
    cut = Cut(encoder, 2)
    cut.freeze()
    activations = cut.below(images(encoder)).requires_grad_()
    cut.above(activations).square().sum().backward()
    assert activations.grad is not None and activations.grad.abs().sum() > 0
    above = cut.parameters_above()
    assert above and all(name.startswith(("model.blocks.4.", "model.blocks.5.", "model.norm.")) for name in above)
    for name, parameter in encoder.named_parameters():
        assert parameter.requires_grad == (name in above), name
        assert (parameter.grad is not None) == (name in above), name


def test_faults_of_the_recipe() -> None:
    with pytest.raises(
        UserError, match=r"trainable\.blocks: 7 is more than the 6 blocks of the encoder; set at most 6"
    ):
        Cut(vit(), 7)


def test_depth_and_description() -> None:
    encoder = vit()
    depths = {name: depth_from_top(encoder, name) for name, _ in encoder.named_parameters()}
    assert depths["model.norm.weight"] == 0
    assert depths["model.blocks.5.attn.qkv.weight"] == 1
    assert depths["model.blocks.0.norm1.bias"] == 6
    assert depths["model.pos_embed"] == depths["model.patch_embed.proj.weight"] == 7
    lines = describe_chain(encoder)
    assert len(lines) == 6
    last = sum(p.numel() for n, p in encoder.named_parameters() if n.startswith(("model.blocks.5.", "model.norm.")))
    assert lines[-1] == f"model.blocks.5: activation 17×64, {last:,} parameters from here on"


def test_below_is_an_encoder_of_activations() -> None:
    encoder = vit()
    cut = Cut(encoder, 2)
    below = copy.deepcopy(Below(cut))
    x = images(encoder)
    assert below.width == 17 * 64
    assert torch.equal(below(x), cut.below(x).flatten(1))
    assert below.cut.encoder is below.encoder and below.encoder is not encoder
    assert below.identity()["cut"] == "model.blocks.4"
