"""What lies above a cut trains as it would in the whole model, and nothing else changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cut_models import BlockCNN, blocks, cached, lora, train_part, vit
from cut_short import Cut as Checkpoint
from cut_short import Killed, assert_same
from loop_models import SmallCNN, WithDomainHead, digits, final_state, make_job, one_process, rows_of, split, train
from torch import Tensor

from xdm_ft.algorithms.dsu import DSU
from xdm_ft.algorithms.mixstyle import MixStyle, _MixStyleAt
from xdm_ft.algorithms.wise_ft import interpolate
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.averaging.swad import SWAD
from xdm_ft.cut.lora import merged_state
from xdm_ft.cut.trainable import LastBlocks, LowRank
from xdm_ft.encoders import Encoder
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Batch
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Training
from xdm_ft.training.end_to_end.gradients import StepGradients
from xdm_ft.training.end_to_end.model import EncoderPart, EndToEnd, optimizer_of
from xdm_ft.training.end_to_end.train import predict

SGD = Training(batch_size=4, optimizer="sgd", encoder_lr=0.01)
Part = LastBlocks | LowRank
ENCODERS: dict[str, Callable[[], Encoder]] = {"vit": vit, "cnn": BlockCNN}
WIDTHS = {"vit": 64, "cnn": 16}
# what lies above the cut, by the names of the models
ABOVE = {
    ("vit", 1): ("model.blocks.2.", "model.norm."),
    ("vit", 2): ("model.blocks.1.", "model.blocks.2.", "model.norm."),
    ("vit", 3): ("model.blocks.", "model.norm."),
    ("cnn", 1): ("stages.1.1.", "norm."),
    ("cnn", 2): ("stages.1.", "norm."),
    ("cnn", 3): ("stages.0.1.", "stages.1.", "norm."),
    ("cnn", 4): ("stages.", "norm."),
}


def in_brief(cases: Mapping[Any, object], *quick: Any) -> list[Any]:
    """All cases as parameters; those that are not `quick` run in the full check."""
    assert {*quick} <= cases.keys()
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in cases
    ]


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


class Watched(EndToEnd):
    """The model that the loop trains: the last one made, and its state before."""

    last: Watched

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start = copy.deepcopy(self.encoder.state_dict())
        Watched.last = self

    @classmethod
    def changed(cls) -> set[str]:
        """Names in the encoder's state that differ from the start."""
        state = cls.last.encoder.state_dict()
        assert state.keys() == cls.last.start.keys()
        return {name for name, value in state.items() if not torch.equal(value, cls.last.start[name])}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr("xdm_ft.training.end_to_end.train.EndToEnd", Watched)
    return Watched


def images_of(encoder: Encoder, rows: Tensor) -> Tensor:
    images = ImageRows(digits(), evaluation_transform(encoder.preprocessing))
    return torch.stack([images[int(row)][0] for row in rows])


def trained_by_hand(job: Job, encoder: Encoder, training: Training, above: tuple[str, ...]) -> dict[str, Tensor]:
    """ERM and SGD on the whole model; what does not lie above has no gradient and stays in eval mode."""
    encoder, algorithm = copy.deepcopy(encoder), job.make(job.setup)
    encoder.to(memory_format=torch.channels_last)  # convolutions of another layout round differently
    head = algorithm.head
    for name, module in encoder.named_modules():
        module.training = f"{name}.".startswith(above)
    own = {name: p for name, p in encoder.named_parameters() if name.startswith(above)}
    encoder.requires_grad_(False)
    for parameter in own.values():
        parameter.requires_grad_(True)
    groups = [{"params": [*own.values()], "lr": training.encoder_lr}, {"params": [*head.parameters()]}]
    optimizer = torch.optim.SGD(
        groups, lr=job.training.lr, momentum=training.momentum, weight_decay=job.training.weight_decay
    )
    for step in range(job.setup.steps):
        rows = rows_of(job, training, step)
        loss = F.cross_entropy(head(encoder(images_of(encoder, rows))), torch.from_numpy(digits().labels)[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items() if name.startswith(above)}
    return state | algorithm.state_dict()


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("kind, number", in_brief(ABOVE, ("vit", 2), ("cnn", 3)))
def test_equals_a_loop_over_the_whole_model(accelerator: Accelerator, kind: str, number: int) -> None:
    encoder, job = ENCODERS[kind](), make_job(steps=3, width=WIDTHS[kind])
    got = final_state(train_part(job, encoder, SGD, accelerator, blocks(number)))
    expected = trained_by_hand(job, encoder, SGD, ABOVE[kind, number])
    assert_close(got, expected, atol=1e-6)
    start = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    changed = {name for name in got if name in start and not torch.equal(got[name], start[name])}
    assert changed == {name for name in got if name in start}, "else weights that never train would agree too"


METHODS: dict[str, Job] = {
    "sam": make_job(WithDomainHead, sharpness=SAM(rho=0.1), width=16),
    "sagm": make_job(sharpness=SAGM(), width=16),
    "xdomainmix, sam": make_job(
        partial(XDomainMix, warmup_steps=1, quantile_steps=1), sharpness=SAM(rho=0.1), width=16
    ),
    "mixstyle": make_job(partial(MixStyle, p=1.0), width=16),
}  # fmt: skip


@pytest.mark.parametrize("method", in_brief(METHODS, "mixstyle"))
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equals_the_whole_model_whose_lower_part_is_frozen_by_hand(
    accelerator: Accelerator, method: str, accumulation: int
) -> None:
    """Batch norm is frozen: in the whole model, that below would be trained too."""
    if method == "mixstyle" and accumulation > 1:
        pytest.skip("refused with the recipe")
    training, job = SGD.model_copy(update={"accumulation": accumulation}), METHODS[method]
    got = final_state(train_part(job, BlockCNN(), training, accelerator, blocks(3), batch_norm="frozen"))
    encoder = BlockCNN()
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(name.startswith(ABOVE["cnn", 3]))
    whole = final_state(train(job, encoder, training, accelerator, batch_norm="frozen"))
    assert_close(got, {name: whole[name] for name in got}, atol=1e-6)
    assert not torch.equal(got["encoder.norm.weight"], encoder.norm.weight)


# (encoder, what trains, job, changes of the training, arguments of the loop)
Case = tuple[str, Part, Job, dict[str, Any], dict[str, Any]]
CNN, VIT = {"width": 16, "steps": 4}, {"width": 64, "steps": 4}
ANY_VALLEY = SWAD(n_converge=1, tolerance_ratio=100.0)
CASES: dict[str, Case] = {
    "cnn, sam, batch norm": ("cnn", blocks(2), make_job(sharpness=SAM(rho=0.1), **CNN), {}, {}),
    "cnn, batch norm frozen": ("cnn", blocks(2), make_job(**CNN), {}, {"batch_norm": "frozen"}),
    "cnn, swad": ("cnn", blocks(2), dataclasses.replace(make_job(**CNN), averaging=ANY_VALLEY),
                  {"evaluate_every": 1}, {}),
    "cnn, unfreezing, accumulation": ("cnn", blocks(3), make_job(**CNN), {"accumulation": 2}, {"unfreeze_at": 2}),
    "cnn, lora, sam": ("cnn", lora(dropout=0.3), make_job(sharpness=SAM(rho=0.1), **CNN), {}, {}),
    "vit, sagm": ("vit", blocks(1), make_job(sharpness=SAGM(), **VIT), {"clip_norm": 0.5}, {}),
    "vit, lora, unfreezing": ("vit", lora(blocks=2), make_job(**VIT), {"optimizer": "adamw"}, {"unfreeze_at": 2}),
    "vit, lora, swad": ("vit", lora(blocks=1, targets=("attn",)),
                        dataclasses.replace(make_job(**VIT), averaging=ANY_VALLEY), {"evaluate_every": 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", in_brief(CASES, "cnn, sam, batch norm", "vit, lora, unfreezing"))
def test_only_what_may_change_changes(watched: type[Watched], tmp_path: Path, name: str, precision: str) -> None:
    kind, part, job, changes, arguments = CASES[name]
    encoder, training = ENCODERS[kind](), SGD.model_copy(update=changes)
    start = {key: value.clone() for key, value in encoder.state_dict().items()}
    with one_process(precision) as accelerator:
        activations = cached(encoder, part, tmp_path) if precision == "bf16" else None
        trained = train_part(job, encoder, training, accelerator, part, activations, **arguments)
    assert trained.failure is None
    assert all(torch.equal(value, start[key]) for key, value in encoder.state_dict().items()), "a copy trains"
    changed, state = watched.changed(), trained.selected["train_val"].state
    if isinstance(part, LowRank):
        assert changed and all(".lora_A." in one or ".lora_B." in one for one in changed)
        assert changed == {one for one in watched.last.start if ".lora_" in one}
        linear = {one for one in start if one.endswith(".weight") and _is_linear(encoder, one)}
        touched = {one.removeprefix("encoder.") for one in state if one.startswith("encoder.")}
        assert touched and touched <= linear
        assert all(not torch.equal(state[f"encoder.{one}"], start[one]) for one in touched)
        return
    above = ABOVE[kind, part.blocks]
    statistics = {one for one in start if "running" in one or "tracked" in one}
    may = {one for one in start if one.startswith(above)}
    assert changed <= may
    moves = arguments.get("batch_norm") != "frozen"
    assert changed == (may if moves else may - statistics)
    assert {one for one in state if one.startswith("encoder.")} == {f"encoder.{one}" for one in may}


def _is_linear(encoder: Encoder, weight: str) -> bool:
    return isinstance(encoder.get_submodule(weight.removesuffix(".weight")), torch.nn.Linear)


@pytest.mark.parametrize(
    "part", [pytest.param(blocks(1), marks=pytest.mark.slow), lora(blocks=2)], ids=["blocks", "lora"]
)
def test_wise_ft_interpolates_what_has_trained(accelerator: Accelerator, part: Part) -> None:
    """α = 0 is the start, bit for bit; α = ½ of a merged low-rank update is W + ½ (alpha / rank) B A."""
    encoder, job = vit(), make_job(steps=3, width=64)
    trained = train_part(job, encoder, SGD, accelerator, part)
    end = final_state(trained)
    before = EndToEnd(copy.deepcopy(encoder), job.make(job.setup), "frozen").weights()
    zero, half = (interpolate(before, end, alpha) for alpha in (0.0, 0.5))
    assert all(torch.equal(value, before[name]) for name, value in zero.items())
    rows = split().evaluation["test_val"]
    arguments = (digits(), rows, accelerator, 16)
    logits = predict(job, encoder, zero, *arguments, part=EncoderPart(part))
    with torch.no_grad():
        expected = job.make(job.setup).logits(encoder(images_of(encoder, rows)))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    assert (predict(job, encoder, half, *arguments, part=EncoderPart(part)) - expected).abs().max() > 1e-4
    for name in end.keys() - {"seed"}:
        torch.testing.assert_close(half[name], (before[name] + end[name]) / 2, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_merged_weights_compute_what_the_updates_do(watched: type[Watched], accelerator: Accelerator) -> None:
    encoder, job, part = vit(), make_job(steps=3, width=64), lora(blocks=2, alpha=8.0)
    end = final_state(train_part(job, encoder, SGD, accelerator, part))
    rows, inner = split().evaluation["test_val"], watched.last.eval()
    with torch.no_grad():
        expected = inner.algorithm.logits(inner.encode(inner.cut.below(images_of(encoder, rows))))
    got = predict(job, encoder, end, digits(), rows, accelerator, 16, part=EncoderPart(part))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    name = "model.blocks.2.mlp.fc1"
    a, b = (inner.encoder.get_parameter(f"{name}.lora_{one}.default.weight") for one in "AB")
    delta = end[f"encoder.{name}.weight"] - encoder.get_parameter(f"{name}.weight")
    torch.testing.assert_close(delta, 8.0 / 2 * b @ a, rtol=0, atol=1e-6)
    assert merged_state(inner.encoder).keys() == encoder.state_dict().keys()


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_dropout_of_updates_repeats_in_the_second_pass(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """At a zero offset both passes have the same features, bit for bit."""
    seen: list[Tensor] = []

    def encoded(self: StepGradients, *args: Any) -> Tensor:
        seen.append(own(self, *args))
        return seen[-1]

    own = StepGradients._encode
    monkeypatch.setattr(StepGradients, "_encode", encoded)
    training = SGD.model_copy(update={"accumulation": accumulation})
    job = make_job(steps=3, width=64, sharpness=SAM(rho=1e-30))
    train_part(job, vit(), training, accelerator, lora(dropout=0.5, blocks=1))
    assert len(seen) == 3 * 2 * accumulation
    passes = torch.stack([z.detach() for z in seen]).unflatten(0, (3, 2, accumulation))
    assert torch.equal(passes[:, 0], passes[:, 1])

    seen.clear()  # the draws matter, and differ between steps: with another draw features differ
    inner = EndToEnd(vit(), job.make(job.setup), "train", lora(dropout=0.5, blocks=1)).train()
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
        x = inner.cut.below(images_of(inner.encoder, torch.arange(4)))
        assert not torch.equal(inner.encode(x), inner.encode(x))


def test_mixstyle_works_in_containers_of_blocks_of_both_parts(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []

    def mixed(self: _MixStyleAt, x: Tensor, batch: Batch, step: int) -> Tensor:
        shapes.append((step, *x.shape))
        return own(self, x, batch, step)

    own = _MixStyleAt.forward
    monkeypatch.setattr(_MixStyleAt, "forward", mixed)
    job = make_job(partial(MixStyle, p=1.0), steps=2, width=16)
    final_state(train_part(job, BlockCNN(), SGD, accelerator, blocks(3)))
    assert shapes == [(step, 12, *shape) for step in range(2) for shape in ((8, 8, 8), (16, 4, 4))]


def test_places_below_the_cut_are_refused(accelerator: Accelerator) -> None:
    with pytest.raises(UserError, match=r"after stages\.0, which lies below the cut; train more blocks, or set train"):
        train_part(make_job(MixStyle, width=16), BlockCNN(), SGD, accelerator, blocks(2))
    with pytest.raises(UserError, match=r"after stem\.0, which lies below the cut; set trainable: true$"):
        train_part(make_job(DSU, width=16), BlockCNN(), SGD, accelerator, blocks(4))


def rates(encoder: Encoder, trainable: Any) -> dict[str, float]:
    job = make_job(width=encoder.width)
    inner = EndToEnd(encoder, job.make(job.setup), "train", trainable)
    optimizer = optimizer_of(inner, Training(lr=0.5, encoder_lr=1.0, layer_decay=0.5))
    by_parameter = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: by_parameter[id(p)] for name, p in inner.named_parameters() if p.requires_grad}
    assert len(named) == len(by_parameter)
    return named


VIT_RATES = {
    "encoder.model.norm.": 1.0, "encoder.model.blocks.2.": 0.5, "encoder.model.blocks.1.": 0.25,
    "encoder.model.blocks.0.": 0.125, "encoder.model.cls_token": 0.0625, "encoder.model.reg_token": 0.0625,
    "encoder.model.pos_embed": 0.0625, "encoder.model.patch_embed.": 0.0625, "algorithm.head.": 0.5,
}  # fmt: skip
CNN_RATES = {
    "encoder.norm.": 1.0, "encoder.stages.1.1.": 0.5, "encoder.stages.1.0.": 0.25, "encoder.stages.0.1.": 0.125,
    "encoder.stages.0.0.": 0.0625, "encoder.stem.": 0.03125, "algorithm.head.": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, trainable, places",
    [("vit", True, 9), ("vit", blocks(2), 4), ("vit", lora(), 4), ("vit", lora(blocks=1), 2),
     ("cnn", True, 7), ("cnn", blocks(3), 5), ("cnn", lora(blocks=2), 3)],
)  # fmt: skip
def test_layer_decay(kind: str, trainable: Any, places: int) -> None:
    expected, used = VIT_RATES if kind == "vit" else CNN_RATES, set[str]()
    found = rates(ENCODERS[kind](), trainable)
    for name, rate in found.items():
        (place,) = [place for place in expected if name.startswith(place)]
        assert rate == expected[place], name
        used.add(place)
    assert len(used) <= places and any(".lora_A." in name for name in found) == isinstance(trainable, LowRank)
    assert len(used) >= places - 1  # not every ViT has register tokens


def test_layer_decay_needs_blocks(accelerator: Accelerator) -> None:
    training = SGD.model_copy(update={"layer_decay": 0.5})
    with pytest.raises(UserError, match=r"training\.layer_decay: .* not known \(no modules .*\); set it to 1"):
        train(make_job(), SmallCNN(), training, accelerator)


@pytest.mark.parametrize(
    "part, expected",
    [
        # a block: two norms, qkv, projection, two layers of an MLP of twice the width
        pytest.param(blocks(1), "block + norm", marks=pytest.mark.slow),
        pytest.param(True, "all", marks=pytest.mark.slow),
        (lora(rank=2, blocks=1), "lora"),
    ],
)
def test_trained_parameters(accelerator: Accelerator, part: Any, expected: str) -> None:
    encoder = vit()
    head = 64 * 10 + 10
    mlp = encoder.model.blocks[2].mlp.fc1.out_features
    layers = [(64, 192), (64, 64), (64, mlp), (mlp, 64)]  # qkv, proj, fc1, fc2
    norms = sum(p.numel() for name, p in encoder.named_parameters() if "blocks.2.norm" in name or "2.ls" in name)
    extra = sum(p.numel() for name, p in encoder.named_parameters() if ".blocks.2.attn." in name and "norm" in name)
    counts = {
        "block + norm": sum(a * b + b for a, b in layers) + norms + extra + 2 * 64,
        "all": sum(p.numel() for p in encoder.parameters()),
        "lora": sum(2 * (a + b) for a, b in layers),
    }
    trained = train_part(make_job(steps=1, width=64), encoder, SGD, accelerator, part)
    assert trained.parameters == counts[expected] + head
    assert trained.peak_memory is None or trained.peak_memory >= 0


RESUMED: dict[str, Case] = {
    "vit, sam, adam": ("vit", blocks(1), make_job(WithDomainHead, sharpness=SAM(rho=0.1), **VIT),
                       {"optimizer": "adam", "evaluate_every": 2}, {}),
    "vit, lora, dropout, swad": (
        "vit", lora(dropout=0.3), dataclasses.replace(make_job(**VIT), averaging=ANY_VALLEY),
        {"optimizer": "adam", "evaluate_every": 1, "layer_decay": 0.7}, {},
    ),
    "cnn, batch norm, unfreezing": ("cnn", blocks(3), make_job(**CNN), {"evaluate_every": 2}, {"unfreeze_at": 2}),
}  # fmt: skip


@pytest.mark.parametrize("reads", ["images", pytest.param("cache", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", in_brief(RESUMED, "vit, lora, dropout, swad"))
def test_killed_in_the_middle_and_resumed(accelerator: Accelerator, tmp_path: Path, name: str, reads: str) -> None:
    kind, part, job, changes, arguments = RESUMED[name]
    encoder, training = ENCODERS[kind](), SGD.model_copy(update=changes)
    activations = cached(encoder, part, tmp_path / "cache") if reads == "cache" else None
    run = partial(train_part, job, encoder, training, accelerator, part, activations, **arguments)
    expected = run()
    with pytest.raises(Killed):
        run(checkpoint=Checkpoint(tmp_path / "c", 3))
    torch.rand(3)
    assert_same(run(checkpoint=Checkpoint(tmp_path / "c")), expected)


@pytest.mark.slow
def test_a_checkpoint_of_another_lower_part_is_not_used(accelerator: Accelerator, tmp_path: Path) -> None:
    encoder, job = BlockCNN(), make_job(**CNN)
    with pytest.raises(Killed):
        train_part(job, encoder, SGD, accelerator, blocks(1), checkpoint=Checkpoint(tmp_path / "c", 2))
    with torch.no_grad():
        encoder.stem[0].weight.mul_(1.1)
    again = train_part(job, encoder, SGD, accelerator, blocks(1), checkpoint=Checkpoint(tmp_path / "c"))
    [reason] = again.restarts
    assert "weights" in reason


def test_updates_are_drawn_from_the_seed_of_the_model() -> None:
    """And not from torch's generator."""
    job = make_job(width=64)

    def a(seed: int) -> Tensor:
        torch.rand(3)
        inner = EndToEnd(vit(), job.make(job.setup), "train", lora(blocks=1), seed=seed)
        return inner.encoder.get_parameter("model.blocks.2.attn.qkv.lora_A.default.weight")

    assert torch.equal(a(1), a(1)) and not torch.equal(a(1), a(2))


@pytest.mark.gpu
@pytest.mark.parametrize("part", [blocks(2), lora(blocks=2)], ids=["blocks", "lora"])
def test_a_gpu_trains_as_a_cpu(accelerator: Accelerator, tmp_path: Path, part: Part) -> None:
    encoder, job = vit(), make_job(steps=5, width=64, sharpness=SAM(rho=0.1))
    expected = final_state(train_part(job, encoder, SGD, accelerator, part, cached(encoder, part, tmp_path)))
    AcceleratorState._reset_state(reset_partial_state=True)
    on_gpu = Accelerator(mixed_precision="no")
    assert on_gpu.device.type == "cuda"
    activations = cached(encoder, part, tmp_path)
    activations.device = on_gpu.device
    for read in (activations, None):
        assert_close(final_state(train_part(job, encoder, SGD, on_gpu, part, read)), expected, atol=1e-3)
