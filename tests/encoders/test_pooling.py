"""encoder.pooling, against formulas over single tokens; null is the model's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import Family, images, tiny_clip
from torch import Tensor, nn

from xdm_ft.cut.cut import Cut
from xdm_ft.encoders.open_clip import OpenClip
from xdm_ft.encoders.timm import Timm
from xdm_ft.images.transforms import PreprocessingOverrides
from xdm_ft.runtime.errors import UserError

POOLINGS = ("cls", "mean", "cls_mean")
TRUNK = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 64}


def timm_encoder(name: str, pooling: str | None, **kwargs: object) -> Timm:
    torch.manual_seed(0)
    size = PreprocessingOverrides(size=64)
    encoder = Timm(model=name, kwargs={"img_size": 64, **kwargs}, preprocessing=size, pooling=pooling)
    for parameter in encoder.parameters():  # class token and norms would be 0 and 1
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
    return encoder


def by_hand(tokens: Tensor, prefix: int, pooling: str, norm: Callable[[Tensor], Tensor] = lambda z: z) -> Tensor:
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
        ("test_vit", 1, {"global_pool": "avg"}),  # timm then normalises after pooling
        ("vit_tiny_patch16_224", 5, {"reg_tokens": 4, "depth": 1}),
        ("beit_base_patch16_224", 1, {"depth": 1, "embed_dim": 24, "num_heads": 2}),
    ],
)
def test_timm(name: str, prefix: int, kwargs: dict[str, object], pooling: str) -> None:
    encoder, x = timm_encoder(name, pooling, **kwargs), images(64)
    tokens = encoder.model.forward_features(x)
    norm = getattr(encoder.model, "fc_norm", None) or nn.Identity()
    torch.testing.assert_close(encoder(x), by_hand(tokens, prefix, pooling, norm), rtol=1e-4, atol=1e-5)
    assert encoder.width == tokens.shape[2] * (2 if pooling == "cls_mean" else 1)
    own = timm_encoder(name, None, **kwargs)
    assert torch.equal(own(x), own.model(x)) and encoder.identity() == {**own.identity(), "pooling": pooling}
    if name == "test_vit" and pooling == ("mean" if kwargs else "cls"):
        torch.testing.assert_close(encoder(x), own(x))


@torch.no_grad()
@pytest.mark.parametrize("pooling", [*POOLINGS, "projected"])
def test_open_clip(pooling: str) -> None:
    """Before the projection: the class token, times the projection, is the projected feature."""
    demo = {"model": "demo", "weights": "demo"}
    plain, encoder, x, seen = OpenClip(**demo), OpenClip(**demo, pooling=pooling), images(), list[Tensor]()
    encoder.model.visual.ln_post.register_forward_hook(lambda module, given, tokens: seen.append(tokens))
    z = encoder(x)
    assert encoder.width == z.shape[1]
    assert encoder.identity() == {**plain.identity(), "pooling": pooling}
    if pooling == "projected":
        assert torch.equal(z, plain(x)) and not encoder.text_reason
        return
    torch.testing.assert_close(z, by_hand(seen[0], 1, pooling), rtol=1e-4, atol=1e-5)
    if pooling == "cls":
        torch.testing.assert_close(z @ encoder.model.visual.proj, plain(x), rtol=1e-4, atol=1e-5)
    assert "do not match the text embeddings" in encoder.text_reason
    assert Cut(encoder, 1).name == Cut(plain, 1).name


@torch.no_grad()
def test_open_clip_with_an_image_side_of_timm(tmp_path: Path) -> None:
    encoder = tiny_clip(tmp_path, "tower", vision_cfg=TRUNK).encoder(pooling="cls_mean")
    tokens = encoder.model.visual.trunk.forward_features(images(64))
    torch.testing.assert_close(encoder(images(64)), by_hand(tokens, 1, "cls_mean"), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "prefix"), [("vit", 1), ("dinov2", 4), ("clip", 1), ("siglip", 0)])
@pytest.mark.parametrize("pooling", [*POOLINGS, "projected"])
def test_transformers(families: dict[str, Family], kind: str, prefix: int, pooling: str) -> None:
    """Which tokens are patches, and that CLIP's are normalised before they are averaged."""
    family = families[kind]
    if pooling in ({"siglip": ("cls", "cls_mean"), "clip": ()}.get(kind, ("projected",))):
        with pytest.raises(UserError, match=rf"^encoder\.pooling: {pooling}: .* has no .*; leave it out, or use"):
            family.encoder(pooling=pooling)
        return
    encoder = family.encoder(pooling=pooling)
    if pooling == "projected":
        assert torch.equal(encoder(images()), family.features(images())) and not encoder.text_reason
        return
    vision = family.model.vision_model if family.has_text else family.model
    tokens = vision(pixel_values=images()).last_hidden_state
    assert tokens.shape[1] == prefix + 16
    tokens = vision.post_layernorm(tokens) if kind == "clip" else tokens
    torch.testing.assert_close(encoder(images()), by_hand(tokens, prefix, pooling), rtol=1e-4, atol=1e-5)
    assert encoder.width == encoder(images()).shape[1] and encoder.text_reason


@pytest.mark.parametrize(
    ("name", "pooling", "wording"),
    [
        ("test_resnet", "mean", "is not a vision transformer and averages over space; leave it out"),
        ("test_vit", "projected", "has no projection; leave it out, or use cls, mean or cls_mean"),
        ("vit_base_patch16_siglip_224", "cls", "has no class token; leave it out, or use mean"),
    ],
)
def test_what_a_model_of_timm_has_not_is_one_line(name: str, pooling: str, wording: str) -> None:
    kwargs = {"depth": 1, "embed_dim": 24, "num_heads": 2} if "siglip" in name else {}
    with pytest.raises(UserError, match=rf'^encoder\.pooling: {pooling}: "{name}" {wording}$'):
        Timm(model=name, pooling=pooling, kwargs=kwargs)
