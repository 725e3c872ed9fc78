"""An encoder cut in two: above(below(x)) is z, bit for bit; what trains, what stays, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TEXT, tiny_clip
from torch import Tensor, nn

from xdm_ft.cut.cut import Below, Cut, depth_from_top, describe_chain
from xdm_ft.encoders import Encoder, LibraryEncoder, Portable
from xdm_ft.encoders.timm import Timm
from xdm_ft.features.extract import frozen_copy
from xdm_ft.features.key import key_of, key_parts
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides
from xdm_ft.runtime.errors import UserError


def timm_encoder(name: str, size: int, **kwargs: Any) -> Timm:
    torch.manual_seed(0)
    return Timm(model=name, kwargs=kwargs, preprocessing=PreprocessingOverrides(size=size))


def vit(**kwargs: Any) -> Timm:
    return timm_encoder("test_vit", 64, img_size=64, **kwargs)


def images(encoder: Encoder, count: int = 3) -> Tensor:
    size = encoder.preprocessing.size
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def check_cuts(encoder: Encoder, every: int = 1) -> None:
    """At each cut (or each `every`-th): above(below(x)) is z, and exactly the parameters above have a gradient."""
    x = images(encoder)
    with torch.no_grad():
        z = encoder(x)
    names = encoder.block_names
    assert names and not encoder.blocks_reason
    parameters = {name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    weight = torch.rand(z.shape, generator=torch.Generator().manual_seed(2))  # a norm's plain sum is constant
    counts = []
    for blocks in {*range(1, len(names) + 1, every), len(names)}:
        cut = Cut(encoder, blocks)
        assert cut.name == names[-blocks]
        activations = cut.below(x)
        assert activations.shape == (3, *cut.shape) and activations.is_contiguous()
        given = activations.clone()
        with torch.no_grad():
            assert torch.equal(cut.above(given), z), cut.name
        assert torch.equal(given, activations), "above changes its input"
        found = cut.above(activations.requires_grad_())
        gradients = torch.autograd.grad((found * weight).sum(), [activations, *parameters.values()], allow_unused=True)
        assert gradients[0] is not None and all(image.any() for image in gradients[0])
        used = {name for name, gradient in zip(parameters, gradients[1:], strict=True) if gradient is not None}
        above = {name for name, _ in encoder.named_parameters() if cut.is_above(name)}
        assert above <= used
        assert all(used_below(cut, parameters[name]) for name in used - above), cut.name
        counts.append((blocks, len(above)))
    counts.sort()
    assert [count for _, count in counts] == sorted({count for _, count in counts}), "each block has parameters"


def used_below(cut: Cut, parameter: nn.Parameter) -> bool:
    """Whether activations depend on the parameter: changing it changes them."""
    before, value = cut.below(images(cut.encoder)), parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(torch.rand_like(parameter))
        after = cut.below(images(cut.encoder))
        parameter.copy_(value)
    return not torch.equal(before, after)


VISION: dict[str, dict[str, Any]] = {
    "vit": {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8},
    "resnet": {"image_size": 64, "layers": [1, 2, 1, 1], "width": 8, "patch_size": None},
    "timm": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"},
    "coca": {
        "image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8,
        "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True,
    },
}  # fmt: skip
COCA = {
    "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
    "multimodal_cfg": {**TEXT, "mlp_ratio": 2, "dim_head": 8, "n_queries": 8, "attn_pooler_heads": 2},
    "custom_text": True,
}


def clip(folder: Path, kind: str) -> LibraryEncoder:
    more = COCA if kind == "coca" else {}
    return tiny_clip(folder, f"cut_{kind}", vision_cfg=VISION[kind], **more).encoder()


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *((name, {}) for name in ("test_resnet", "test_convnext", "test_efficientnet", "test_mambaout")),
        *(
            ("test_vit", kwargs)
            for kwargs in ({}, {"global_pool": "avg"}, {"drop_path_rate": 0.2, "patch_drop_rate": 0.5})
        ),
    ],
)
def test_above_after_below_is_the_whole(name: str, kwargs: dict[str, Any]) -> None:
    encoder = vit(**kwargs) if name == "test_vit" else timm_encoder(name, 64)
    check_cuts(encoder, every=2)
    if name == "test_vit":
        assert encoder.block_names == tuple(f"model.blocks.{number}" for number in range(6))


REAL: dict[str, tuple[int, int, dict[str, Any]]] = {  # side, blocks
    "vit_tiny_patch16_224": (64, 12, {"img_size": 64}),
    "swin_tiny_patch4_window7_224": (64, 12, {"img_size": 64, "window_size": 4}),
    "beit_base_patch16_224": (64, 3, {"img_size": 64, "depth": 3, "use_shared_rel_pos_bias": True}),
    "resnet18": (64, 8, {}),
    "densenet121": (64, 7, {}),
    "poolformer_s12": (64, 4, {}),  # timm groups no layers of it: its stages are the blocks
}
MORE: dict[str, tuple[int, int, dict[str, Any]]] = {
    "vit_small_patch16_dinov3": (64, 12, {"img_size": 64}),
    "eva02_tiny_patch14_224": (56, 12, {"img_size": 56}),
    "deit_tiny_distilled_patch16_224": (64, 12, {"img_size": 64}),
    "cait_xxs24_224": (64, 24, {"img_size": 64}),
    "xcit_nano_12_p16_224": (64, 14, {"img_size": 64}),
    "mixer_s32_224": (64, 8, {"img_size": 64}),
    "convnext_atto": (64, 12, {}),
    "mobilenetv3_small_050": (64, 11, {}),
    "efficientnet_b0": (64, 16, {}),
    "regnety_002": (64, 13, {}),
    "vgg11": (64, 7, {"mlp_ratio": 0.01}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in REAL else pytest.mark.soak) for n in (*REAL, *MORE)]
)
def test_real_architectures(name: str) -> None:
    size, count, kwargs = (REAL | MORE)[name]
    encoder = timm_encoder(name, size, **kwargs)
    assert len(encoder.block_names) == count
    if name == "densenet121":
        first = ("model.features.denseblock1", "model.features.transition1", "model.features.denseblock2")
        assert encoder.block_names[:3] == first
    check_cuts(encoder, every=max(1, count // 2))


@pytest.mark.parametrize("kind", VISION)
def test_clips_are_cut_in_their_image_side(kind: str, tmp_path: Path) -> None:
    encoder = clip(tmp_path, kind)
    check_cuts(encoder, every=2)
    assert all(name.startswith("model.visual.") for name in encoder.block_names)
    assert len(encoder.block_names) == {"vit": 3, "resnet": 5, "timm": 6, "coca": 3}[kind]


def test_transformers_that_compute_on_tokens_first(tmp_path: Path) -> None:
    encoder = clip(tmp_path, "vit")
    encoder.model.visual.transformer.batch_first = False
    for block in encoder.model.visual.transformer.resblocks:
        block.attn.batch_first = False
    check_cuts(encoder)
    assert {block.batch_axis for block in encoder.chain.blocks} == {1}
    assert Cut(encoder, 1).shape == (17, 32)


def test_below_is_frozen_and_above_trains() -> None:
    encoder = vit()
    cut = Cut(encoder, 2)
    cut.freeze()
    above = {name for name, _ in encoder.named_parameters() if cut.is_above(name)}
    assert above and all(name.startswith(("model.blocks.4.", "model.blocks.5.", "model.norm.")) for name in above)
    cut.above(cut.below(images(encoder))).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.requires_grad == (name in above) == (parameter.grad is not None), name


def test_what_runs_between_blocks_lies_below_the_later_one() -> None:
    encoder = timm_encoder("test_convnext", 64)
    between = "model.stages.3.downsample.1.weight"
    before, inside = (encoder.block_names.index(f"model.stages.{name}") for name in ("3.blocks.0", "2.blocks.0"))
    count = len(encoder.block_names)
    assert not Cut(encoder, count - before).is_above(between)
    assert Cut(encoder, count - inside).is_above(between)
    assert depth_from_top(encoder, between) == count - before, "the learning rate of the later block, as in timm"


def state_of(encoder: Encoder) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in encoder.state_dict().items()}


def test_no_random_number_is_drawn_below() -> None:
    """And dropout of the whole model follows the part above."""
    encoder = vit(drop_path_rate=0.5, patch_drop_rate=0.5, pos_drop_rate=0.5, proj_drop_rate=0.5)
    cut = Cut(encoder, 1)
    cut.train_above()
    x = images(encoder)
    state = torch.get_rng_state()
    activations = cut.below(x)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    z = cut.above(activations)
    torch.manual_seed(5)
    alone = encoder.model.norm(encoder.model.blocks[5](activations))[:, 0]  # test_vit pools its class token
    assert torch.equal(z, alone), "dropout above, with the numbers that it would draw alone"
    assert not torch.equal(z, cut.above(activations))
    training = {name for name, module in encoder.named_modules() if module.training}
    assert {"", "model", "model.blocks.5", "model.blocks.5.mlp.drop1", "model.norm"} <= training
    assert not {name for name in training if name.startswith(("model.patch_embed", "model.blocks.4"))}


@pytest.mark.parametrize("name", ["test_vit", "test_convnext"])
def test_lower_precision_and_channels_last(name: str) -> None:
    encoder = vit() if name == "test_vit" else timm_encoder(name, 64)
    x = images(encoder)
    with torch.no_grad():
        z = encoder(x)
        with torch.autocast("cpu", torch.bfloat16):
            cut = Cut(encoder, 2)
            autocast = cut.above(cut.below(x).float())
        low = frozen_copy(Below(cut), "bf16", torch.device("cpu"))
        assert isinstance(low, Below)
        activations = low(x)
        assert activations.dtype == torch.float32 and activations.shape == (3, low.width)
        in_bf16 = low.cut.above(activations.unflatten(1, cut.shape))
        in_float32 = cut.above(activations.unflatten(1, cut.shape))
    for found in (autocast, in_bf16, in_float32):
        assert found.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(found, z).min() > 0.99
    assert torch.equal(cut.above(cut.below(x)), z), "the encoder that was cut has not changed"


def test_hooks_above_see_activations_of_images() -> None:
    encoder = timm_encoder("test_resnet", 64)
    cut = Cut(encoder, 2)
    seen = {}
    for name, module in encoder.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: len(output)}))
    cut.above(cut.below(images(encoder)))
    seen.clear()
    cut.above(torch.zeros(5, *cut.shape))
    assert seen and {name for name, count in seen.items() if count == 5} == {
        name for name in seen if cut.lies_above(name)
    }
    assert cut.lies_above("model.layer3") and cut.lies_above("model.layer4.0") and not cut.lies_above("model.layer2")
    assert not cut.lies_above("model.maxpool")


def test_looking_for_blocks_changes_nothing() -> None:
    encoder = timm_encoder("test_resnet", 64)
    encoder.train()
    encoder.model.conv1.requires_grad_(False)
    modes = [module.training for module in encoder.modules()]
    trains = [parameter.requires_grad for parameter in encoder.parameters()]
    before, generator = state_of(encoder), torch.get_rng_state()
    Cut(encoder, 1)
    assert [module.training for module in encoder.modules()] == modes
    assert [parameter.requires_grad for parameter in encoder.parameters()] == trains
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in encoder.modules())
    assert not any("forward" in module.__dict__ for module in encoder.modules())


class Linears(Encoder):
    """Two linear blocks, joined by `join(images, first, second)`."""

    width, normalize, pretraining, stage_names = 12, False, "none", ()
    preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=2)

    def __init__(self, join: Callable[[Tensor, nn.Module, nn.Module], Tensor], *blocks: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.join, self.blocks = join, blocks

    def forward(self, images: Tensor) -> Tensor:
        return self.join(images.flatten(1), self.first, self.second)

    def identity(self) -> dict[str, object]:
        return {"component": "linears"}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())

    def block_candidates(self) -> list[list[str]]:
        return [list(self.blocks)] if self.blocks else []


def in_turn(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return second(first(x))


def around_second(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    y = first(x)
    return second(y) + y


def twice_as_many(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return second(first(x).repeat(2, 1))[: len(x)]


@pytest.mark.parametrize(
    ("join", "blocks", "reason"),
    [
        (in_turn, (), "no modules of it are known as blocks"),
        (around_second, ("first", "second"), "the output of its module first is used beyond the next block"),
        (lambda x, first, second: second(first(first(x))), ("first", "second"), "its module first is called more than"),
        (lambda x, first, second: first(x), ("first", "second"), "its module second is not called"),
        (twice_as_many, ("second",), r"its module second takes \[4, 12\] for two images"),
    ],
)
def test_models_that_are_no_chain_are_refused(join: Any, blocks: tuple[str, ...], reason: str) -> None:
    check_cuts(Linears(in_turn, "first", "second"))
    encoder = Linears(join, *blocks)
    assert encoder.block_names == ()
    remedy = "set trainable: true or false, or use another model"
    with pytest.raises(UserError, match=rf"trainable: the encoder cannot be cut \({reason}.*\); {remedy}"):
        Cut(encoder, 1)
    with pytest.raises(UserError, match=rf"training\.layer_decay: .* not known \({reason}.*\); set it to 1"):
        depth_from_top(encoder, "first.weight")
    assert describe_chain(encoder) == [encoder.blocks_reason]


def test_what_both_parts_use_lies_below() -> None:
    encoder = Linears(lambda x, first, second: second(first(x + second.bias)), "first", "second")
    encoder.shared = encoder.second.bias = nn.Parameter(torch.rand(12))
    assert not Cut(encoder, 1).is_above("shared") and depth_from_top(encoder, "shared") == 3


def overwriting() -> Encoder:
    encoder = Linears(in_turn, "first", "second")
    encoder.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 12))
    return encoder


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        (Linears(lambda x, first, second: second(first(x)) + x, "first", "second"), "features also depend on other"),
        (overwriting(), "it overwrites its activation"),
    ],
)
def test_cuts_that_would_change_features_are_refused(encoder: Encoder, reason: str) -> None:
    remedy = r"cut it elsewhere \(blocks\), or set trainable: true or false"
    with pytest.raises(UserError, match=rf"trainable: the encoder cannot be cut before second: {reason}.*; {remedy}"):
        Cut(encoder, 1)
    line = r"trainable: blocks: 3 is more than the 2 blocks of the encoder; set at most 2, or trainable: true"
    with pytest.raises(UserError, match=line):
        Cut(Linears(in_turn, "first", "second"), 3)


def test_layers_for_learning_rate_decay(tmp_path: Path) -> None:
    encoder = vit()
    depths = {name: depth_from_top(encoder, name) for name, _ in encoder.named_parameters()}
    assert depths["model.norm.weight"] == 0
    assert {depths[name] for name in depths if name.startswith("model.blocks.5.")} == {1}
    assert depths["model.blocks.0.norm1.bias"] == 6
    assert depths["model.pos_embed"] == depths["model.patch_embed.proj.weight"] == 7
    projected = clip(tmp_path, "vit")
    assert depth_from_top(projected, "model.visual.proj") == 0
    assert depth_from_top(projected, "model.visual.transformer.resblocks.2.ln_1.weight") == 1
    assert depth_from_top(projected, "model.visual.class_embedding") == 4
    lines = describe_chain(encoder)
    last = sum(p.numel() for n, p in encoder.named_parameters() if depths[n] < 2)
    assert lines[-1] == f"model.blocks.5: activation 17×64, {last:,} parameters from here on" and len(lines) == 6


def test_the_key_names_the_cut() -> None:
    encoder = vit()
    encoders = [encoder, *(Below(Cut(encoder, blocks)) for blocks in (1, 2, 6))]
    keys = {key_of(key_parts(each, "pillow", "fp32", torch.device("cpu"))) for each in encoders}
    assert len(keys) == 4
    assert Below(Cut(encoder, 2)).identity()["cut"] == "model.blocks.4"
    copied = copy.deepcopy(encoders[1])
    assert isinstance(copied, Below)
    assert copied.cut.encoder is copied.encoder and copied.encoder is not encoder
