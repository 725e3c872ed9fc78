"""Low-rank updates: their formula, what trains, what is merged, which layers have them, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import images, tiny_clip
from torch import Tensor, nn

from xdm_ft.cut import Lora
from xdm_ft.cut.cut import Cut
from xdm_ft.cut.lora import SplitAttention, add_lora, merge_updates, touched_names
from xdm_ft.encoders import Encoder, LibraryEncoder
from xdm_ft.encoders.timm import Timm
from xdm_ft.runtime.errors import UserError

CLIP_BLOCKS = tuple(f"model.visual.transformer.resblocks.{i}" for i in range(2))
VIT_BLOCKS = tuple(f"model.blocks.{i}" for i in range(2))
Case = tuple[Encoder, tuple[str, ...]]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> LibraryEncoder:
    return tiny_clip(tmp_path_factory.mktemp("clip"), "lora_clip").encoder()


def vit() -> Timm:
    torch.manual_seed(0)
    return Timm(model="test_vit", kwargs={"img_size": 32, "depth": 2})


@pytest.fixture(params=["timm", "open_clip"])
def case(request: pytest.FixtureRequest, clip: LibraryEncoder) -> Case:
    """An encoder without updates, and the names of its blocks."""
    return (vit(), VIT_BLOCKS) if request.param == "timm" else (copy.deepcopy(clip), CLIP_BLOCKS)


def updates(encoder: Encoder) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in encoder.named_parameters() if ".lora_" in name}


def fill(encoder: Encoder, std: float = 0.2) -> None:
    """Gives every B random values, as if the updates had been trained."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in updates(encoder).items():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=std, generator=generator)


def snapshot(encoder: Encoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in encoder.state_dict().items()}


def test_at_the_start_features_are_the_same_and_only_updates_train(case: Case) -> None:
    encoder, blocks = case
    with torch.no_grad():
        before = encoder(images(count=4))
        add_lora(encoder, blocks, Lora(rank=2), seed=0)
        torch.testing.assert_close(encoder(images(count=4)), before, rtol=1e-5, atol=1e-6)
    trainable = {name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert trainable.keys() == updates(encoder).keys()
    # rank · (inputs + outputs) of each layer, of the width w: qkv w + 3w; out w + w; both layers of an MLP of width m
    w, m = (64, 192) if isinstance(encoder, Timm) else (32, 128)
    expected = len(blocks) * 2 * ((w + 3 * w) + (w + w) + (w + m) + (m + w))
    assert sum(parameter.numel() for parameter in trainable.values()) == expected
    assert not any(module.training for module in encoder.modules())


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (3.0, 1.5)])
def test_formula_against_loops(case: Case, alpha: float | None, scale: float) -> None:
    encoder, blocks = case
    plain = snapshot(encoder)
    name = next(n for n in plain if n.startswith(blocks[-1]) and n.endswith(("attn.qkv.weight", "attn.in_proj_weight")))
    add_lora(encoder, blocks[-1:], Lora(rank=2, alpha=alpha), seed=0)
    fill(encoder)
    layer = name.replace("in_proj_weight", "in_proj.weight").removesuffix(".weight")
    a = encoder.get_parameter(f"{layer}.lora_A.default.weight").tolist()  # [rank,inputs]
    b = encoder.get_parameter(f"{layer}.lora_B.default.weight").tolist()  # [outputs,rank]
    w, merged = plain[name].tolist(), merge_updates(encoder)[name].tolist()
    for i in range(0, len(b), 7):
        for j in range(len(a[0])):
            expected = w[i][j] + scale * sum(b[i][r] * a[r][j] for r in range(2))
            assert merged[i][j] == pytest.approx(expected, abs=1e-6)


def test_merged_weights_in_a_plain_encoder_give_the_same_features(case: Case) -> None:
    encoder, blocks = case
    plain, state = copy.deepcopy(encoder), snapshot(encoder)
    add_lora(encoder, blocks, Lora(rank=2), seed=0)
    fill(encoder)
    unmerged = snapshot(encoder)
    merged = merge_updates(encoder)
    assert {n: t.shape for n, t in merged.items()} == {n: t.shape for n, t in state.items()}
    assert {n for n in state if not torch.equal(merged[n], state[n])} == touched_names(encoder)
    assert len(touched_names(encoder)) == 4 * len(blocks)
    assert all(torch.equal(tensor, unmerged[name]) for name, tensor in encoder.state_dict().items())
    with torch.no_grad():
        start, trained = plain(images(count=4)), encoder(images(count=4))
        plain.load_state_dict(merged)
        assert (trained - start).abs().max() > 1e-2
        torch.testing.assert_close(plain(images(count=4)), trained, rtol=0, atol=1e-5)


def test_gradients_reach_every_update(case: Case) -> None:
    encoder, blocks = case
    add_lora(encoder, blocks, Lora(rank=2), seed=0)

    def gradients() -> dict[str, Tensor]:
        encoder.zero_grad()
        encoder(images(count=4)).square().sum().backward()
        found = {name: parameter.grad for name, parameter in updates(encoder).items()}
        assert None not in found.values()  # a process would wait for it
        return found  # type: ignore[return-value]

    for name, gradient in gradients().items():
        assert bool(gradient.count_nonzero()) == (".lora_B." in name), name  # A's is 0 while B is 0
    fill(encoder)
    packed = 0
    for name, gradient in gradients().items():
        assert gradient.count_nonzero(), name
        if name.endswith(("qkv.lora_B.default.weight", "in_proj.lora_B.default.weight")):
            packed += 1
            assert all(third.count_nonzero() for third in gradient.chunk(3)), name  # queries, keys, values
    assert packed == len(blocks)


def test_the_start_depends_on_the_seed_alone(clip: LibraryEncoder) -> None:
    def drawn(seed: int, earlier: int) -> dict[str, nn.Parameter]:
        encoder = copy.deepcopy(clip)
        torch.manual_seed(earlier)
        state = torch.get_rng_state()
        add_lora(encoder, CLIP_BLOCKS, Lora(rank=2, dropout=0.1), seed)
        assert torch.equal(torch.get_rng_state(), state)
        return updates(encoder)

    first, again, other = drawn(5, earlier=0), drawn(5, earlier=1), drawn(6, earlier=0)
    assert len(first) == 16
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], other[name]) == (".lora_B." in name)
    starts = [tensor for name, tensor in first.items() if ".lora_A." in name and tensor.shape == (2, 32)]
    assert len(starts) == 6
    assert not any(torch.equal(starts[0], tensor) for tensor in starts[1:])


@pytest.mark.parametrize("targets", ["attn", "mlp"])
def test_dropout_follows_the_generator_in_training_only(case: Case, targets: str) -> None:
    encoder, blocks = case
    add_lora(encoder, blocks, Lora(rank=2, dropout=0.5, targets=(targets,)), seed=0)
    fill(encoder)

    @torch.no_grad()
    def z(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return encoder(images(count=4))

    assert torch.equal(z(0), z(1))
    encoder.train()
    assert torch.equal(z(0), z(0))
    assert not torch.equal(z(0), z(1))


@torch.no_grad()
def test_copies_and_lower_precision(case: Case) -> None:
    encoder, blocks = case
    add_lora(encoder, blocks, Lora(rank=2), seed=0)
    fill(encoder)
    z, start, twin = encoder(images(count=4)), snapshot(encoder), copy.deepcopy(encoder)
    assert torch.equal(twin(images(count=4)), z)
    fill(twin, 0.5)
    assert not torch.equal(twin(images(count=4)), z)
    twin.load_state_dict(start)  # a checkpoint holds the updates
    assert torch.equal(twin(images(count=4)), z)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = twin(images(count=4))
    low = twin.to(torch.bfloat16)(images(count=4))
    for rounded in (mixed, low):
        assert not torch.equal(rounded, z)
        assert nn.functional.cosine_similarity(rounded.float(), z).min() > 0.99
    merged = merge_updates(twin)
    assert {merged[name].dtype for name in touched_names(twin)} == {torch.bfloat16}
    assert all(torch.equal(tensor, start[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("targets", "of_timm", "of_clip"),
    [
        (("attn",), ["attn.qkv", "attn.proj"], ["attn.in_proj_", "attn.out_proj"]),
        (("mlp.fc1", "mlp.c_fc"), ["mlp.fc1"], ["mlp.c_fc"]),
        (("proj", "out_proj"), ["attn.proj"], ["attn.out_proj"]),
    ],
)
def test_targets_in_the_last_block(
    clip: LibraryEncoder, targets: tuple[str, ...], of_timm: list[str], of_clip: list[str]
) -> None:
    for encoder, block, names, own in (
        (vit(), VIT_BLOCKS[-1], of_timm, targets[0]),
        (copy.deepcopy(clip), CLIP_BLOCKS[-1], of_clip, targets[-1]),
    ):
        add_lora(encoder, [block], Lora(rank=2, targets=(own,)), seed=0)
        expected = {f"{block}.{name}weight" if name.endswith("_") else f"{block}.{name}.weight" for name in names}
        assert touched_names(encoder) == expected
        assert len(updates(encoder)) == 2 * len(names)


FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[int], str], int]] = {
    "beit": ("beit_base_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 2}, "model.blocks.{}".format, 4),
    "swin_v2": (  # two more layers compute its position bias
        "swinv2_tiny_window8_256", {"depths": (1, 1), "num_heads": (2, 2), "embed_dim": 16},
        "model.layers.{}.blocks.0".format, 6,
    ),
    "convnext": ("test_convnext", {"depths": (1, 1, 1, 1)}, lambda i: f"model.stages.{i + 2}.blocks.0", 2),
}  # fmt: skip


@pytest.mark.parametrize(
    "family", ["beit", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "beit")]
)
@torch.no_grad()
def test_other_families(family: str) -> None:
    model, kwargs, block, layers = FAMILIES[family]
    side = 32 if family == "convnext" else 64
    kwargs = kwargs if family == "convnext" else {**kwargs, "img_size": side}
    torch.manual_seed(0)
    encoder = Timm(model=model, kwargs=kwargs)
    plain = copy.deepcopy(encoder)
    for parameter in plain.parameters():  # scales of layers that start near 0 would hide an update
        if parameter.ndim == 1 and parameter.abs().max() < 1e-3:
            parameter.fill_(0.5)
    encoder.load_state_dict(plain.state_dict())
    add_lora(encoder, [block(0), block(1)], Lora(rank=2), seed=0)
    torch.testing.assert_close(encoder(images(side, 4)), plain(images(side, 4)), rtol=1e-5, atol=1e-5)
    fill(encoder)
    z = encoder(images(side, 4))
    assert (z - plain(images(side, 4))).abs().max() > 1e-2
    assert len(touched_names(encoder)) == 2 * layers
    plain.load_state_dict(merge_updates(encoder))
    torch.testing.assert_close(plain(images(side, 4)), z, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_split_attention_is_torch_attention(bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(24, 3, bias=bias, batch_first=True)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    split, x = SplitAttention(copy.deepcopy(whole)), torch.randn(2, 5, 24)
    expected, mixed = (attention(x, x, x, need_weights=False)[0] for attention in (whole, split))
    torch.testing.assert_close(mixed, expected)
    (expected.square().sum() + mixed.square().sum()).backward()
    torch.testing.assert_close(split.in_proj.weight.grad, whole.in_proj_weight.grad)
    torch.testing.assert_close(split.out_proj.weight.grad, whole.out_proj.weight.grad)


def refused(encoder: Encoder, blocks: tuple[str, ...], **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        add_lora(encoder, blocks, Lora(**keys), seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Reader(nn.Module):
    """Uses the weight of `read` without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(nn.functional.linear(x, self.read.weight))


class Reading(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.preprocessing = vit().preprocessing
        self.blocks = nn.Sequential(Reader(), Reader())
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(images.mean((1, 2))[:, :8])

    def identity(self) -> dict[str, object]:
        raise AssertionError("not used")

    def portable(self) -> Any:
        raise AssertionError("not used")


def test_faults_are_one_line(clip: LibraryEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(vit(), VIT_BLOCKS, targets="k_proj") == (
        'trainable.lora.targets: no linear layer of a block is named "k_proj"; '
        "known: attn.qkv, attn.proj, mlp.fc1, mlp.fc2"
    )
    line = refused(copy.deepcopy(clip), CLIP_BLOCKS, targets=["attn", "fc"])
    assert line.endswith('named "fc"; known: attn.in_proj, attn.out_proj, mlp.c_fc, mlp.c_proj')
    line = refused(Timm(model="test_resnet"), ("model.layer3.0", "model.layer4.0"))
    assert line.startswith("trainable.lora: the blocks of this encoder have no linear layers")
    assert "trainable: {blocks: 1}" in line
    assert refused(Reading(), ()).startswith("trainable.lora: the encoder cannot be cut")

    blocks = ("blocks.0", "blocks.1")
    line = refused(Reading(), blocks)
    assert line.startswith("trainable.lora.targets: this model reads the weights of read without calling")
    assert line.endswith("set targets: [called]")
    assert refused(Reading(), blocks, targets="read").endswith("use trainable: {blocks: k}")
    add_lora(Reading(), blocks, Lora(targets=("called",)), seed=0)

    monkeypatch.setattr("xdm_ft.cut.lora.find_spec", lambda name: None)
    line = 'trainable.lora: needs peft, which is not installed; pip install "xdm_ft[lora]"'
    assert refused(vit(), VIT_BLOCKS) == line


@pytest.mark.parametrize("cut_first", [True, False])
@torch.no_grad()
def test_updates_above_a_cut(case: Case, cut_first: bool) -> None:
    encoder, blocks = case
    assert encoder.block_names == blocks
    cut = Cut(encoder, 1) if cut_first else None
    add_lora(encoder, blocks[-1:], Lora(rank=2, dropout=0.5), seed=0)
    cut = cut or Cut(encoder, 1)
    fill(encoder)
    assert torch.equal(cut.above(cut.below(images(count=4))), encoder(images(count=4)))
    own = updates(encoder).keys()
    trained = {name for name, parameter in cut.encoder.named_parameters() if parameter.requires_grad}
    assert own == {name for name in trained if cut.is_above(name)}
    assert len(own) == 8
    assert all(cut.is_above(name) for name in touched_names(encoder))
    cut.train_above()
    dropouts = [m.training for m in encoder.modules() if isinstance(m, nn.Dropout) and m.p == 0.5]
    assert dropouts == 4 * [True]
