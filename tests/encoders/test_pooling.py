"""encoder.pooling of timm and open_clip, against formulas over single tokens; null is what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from xdm_ft.cut.cut import Cut
from xdm_ft.encoders.open_clip import OpenClip
from xdm_ft.encoders.timm import Timm
from xdm_ft.images.transforms import PreprocessingOverrides
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError

DEMO = {"model": "demo", "weights": "demo"}
POOLINGS = ("cls", "mean", "cls_mean")
RECIPE = """\
name: pooled
data: {name: pacs, root: data}
protocol: {name: leave_one_domain_out, selection: train_val, seeds: 1}
encoder: {name: open_clip, model: demo, weights: demo, normalize: true, pooling: POOLING}
methods: [METHODS]
training: {steps: 2}
"""


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def encoder_of(name: str, pooling: str | None, **kwargs: object) -> Timm:
    torch.manual_seed(0)
    size = PreprocessingOverrides(size=64)
    encoder = Timm(model=name, kwargs={"img_size": 64, **kwargs}, preprocessing=size, pooling=pooling)
    for parameter in encoder.parameters():  # class token and norms would be 0 and 1
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
    return encoder


def by_hand(tokens: Tensor, prefix: int, pooling: str, norm: torch.nn.Module) -> Tensor:
    rows = []
    for each in tokens:
        mean = norm(sum(each[prefix:]) / (len(each) - prefix))
        rows.append({"cls": norm(each[0]), "mean": mean, "cls_mean": torch.cat([norm(each[0]), mean])}[pooling])
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("name", "prefix", "kwargs"),
    [
        ("test_vit", 1, {}),
        ("test_vit3", 2, {"global_pool": "token", "class_token": True}),
        ("test_vit", 1, {"global_pool": "avg"}),  # timm then normalises after pooling
        ("vit_tiny_patch16_224", 5, {"reg_tokens": 4, "depth": 1}),
        ("beit_base_patch16_224", 1, {"depth": 1, "embed_dim": 24, "num_heads": 2}),
    ],
)
def test_timm(name: str, prefix: int, kwargs: dict[str, object], pooling: str, images: Tensor) -> None:
    encoder = encoder_of(name, pooling, **kwargs)
    tokens = encoder.model.forward_features(images)
    norm = getattr(encoder.model, "fc_norm", None) or torch.nn.Identity()
    torch.testing.assert_close(encoder(images), by_hand(tokens, prefix, pooling, norm), rtol=1e-4, atol=1e-5)
    assert encoder.width == tokens.shape[2] * (2 if pooling == "cls_mean" else 1)


@torch.no_grad()
def test_the_models_own_pooling_is_one_of_them(images: Tensor) -> None:
    for kwargs, same in (({"global_pool": "token"}, "cls"), ({"global_pool": "avg"}, "mean")):
        own = encoder_of("test_vit", None, **kwargs)
        assert torch.equal(own(images), own.model(images))
        torch.testing.assert_close(encoder_of("test_vit", same, **kwargs)(images), own(images))


@torch.no_grad()
@pytest.mark.parametrize("pooling", POOLINGS)
def test_open_clip(pooling: str, images: Tensor) -> None:
    """Before the projection: the class token, times the projection, is the projected feature."""
    plain, encoder = OpenClip(**DEMO), OpenClip(**DEMO, pooling=pooling)
    images, visual = images[..., : plain.preprocessing.size, : plain.preprocessing.size], encoder.model.visual
    seen: list[Tensor] = []
    hook = visual.ln_post.register_forward_hook(lambda module, given, tokens: seen.append(tokens))
    z = encoder(images)
    hook.remove()
    assert seen[0].ndim == 3
    torch.testing.assert_close(z, by_hand(seen[0], 1, pooling, torch.nn.Identity()), rtol=1e-4, atol=1e-5)
    if pooling == "cls":
        torch.testing.assert_close(z @ visual.proj, plain(images), rtol=1e-4, atol=1e-5)
    assert encoder.width == z.shape[1] and "outside the space of the texts" in encoder.text_reason
    assert Cut(encoder, 1).name == Cut(plain, 1).name


@torch.no_grad()
def test_open_clip_projected_is_its_own(images: Tensor) -> None:
    plain, encoder = OpenClip(**DEMO), OpenClip(**DEMO, pooling="projected")
    images = images[..., : plain.preprocessing.size, : plain.preprocessing.size]
    assert torch.equal(encoder(images), plain(images)) and not encoder.text_reason


@torch.no_grad()
def test_open_clip_with_an_image_side_of_timm(images: Tensor, tmp_path: Path) -> None:
    import open_clip
    from safetensors.torch import save_file

    text = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 64}
    config, path = tmp_path / "tower.json", tmp_path / "tower.safetensors"
    config.write_text(json.dumps({"embed_dim": 24, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(config)
    save_file(open_clip.create_model("tower").state_dict(), path)
    encoder = OpenClip(model=str(config), weights=str(path), pooling="cls_mean")
    tokens = encoder.model.visual.trunk.forward_features(images)
    torch.testing.assert_close(
        encoder(images), by_hand(tokens, 1, "cls_mean", torch.nn.Identity()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "pooling", "wording"),
    [
        ("test_resnet", "mean", "is no vision transformer and averages over space; leave it out"),
        ("test_vit", "projected", "has no projection; leave it out, or use cls, mean or cls_mean"),
        ("vit_base_patch16_siglip_224", "cls", "has no class token; leave it out, or use mean"),
    ],
)
def test_what_a_model_has_not_is_one_line(name: str, pooling: str, wording: str) -> None:
    kwargs = {"depth": 1, "embed_dim": 24, "num_heads": 2} if "siglip" in name else {}
    with pytest.raises(UserError, match=rf'^encoder\.pooling: {pooling}: "{name}" {wording}$'):
        Timm(model=name, pooling=pooling, kwargs=kwargs)


def test_it_is_part_of_the_identity_only_if_set() -> None:
    """The keys of features that are cached already stay valid."""
    plain = OpenClip(**DEMO).identity()
    assert "pooling" not in plain and "pooling" not in Timm(model="test_vit").identity()
    assert OpenClip(**DEMO, pooling="mean").identity() == {**plain, "pooling": "mean"}
    assert Timm(model="test_vit", pooling="cls").identity() == {**Timm(model="test_vit").identity(), "pooling": "cls"}


@pytest.mark.parametrize("methods", ["zero_shot", "{name: erm, head_init: zero_shot}", "wise_ft"])
def test_class_embeddings_need_the_projected_feature(methods: str, tmp_path: Path) -> None:
    """Before any data is read."""
    path = tmp_path / "pooled.yaml"
    path.write_text(RECIPE.replace("METHODS", methods).replace("POOLING", "cls"))
    with pytest.raises(UserError, match=r"needs class embeddings, but encoder\.pooling: cls gives features outside"):
        load(str(path), [])
    for pooling in ("projected", "null"):
        path.write_text(RECIPE.replace("METHODS", methods).replace("POOLING", pooling))
        load(str(path), [])
