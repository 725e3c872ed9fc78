"""Above a cut: what trains, what is read, and the thread that reads ahead."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from bank_problems import under
from loop_models import (
    BlockCNN,
    assert_close,
    blocks,
    cached,
    digit_annotations,
    digits,
    final_state,
    images_of,
    lora,
    make_job,
    predict,
    split,
    train,
    vit,
)
from torch import Tensor

from xdm_ft.algorithms.dsu import DSU
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixstyle import MixStyle, _MixStyleAt
from xdm_ft.algorithms.wise_ft import interpolate
from xdm_ft.core import Batch, Losses
from xdm_ft.cut import LastBlocks, LowRank
from xdm_ft.cut.lora import merge_updates
from xdm_ft.encoders import Encoder
from xdm_ft.features.cache import Features
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.bank.data import CachedData, batches
from xdm_ft.training.end_to_end.inputs import STEPS_AHEAD, CachedActivations, TrainingBatches
from xdm_ft.training.end_to_end.model import EncoderPart, EndToEnd, optimizer_of

Part = LastBlocks | LowRank
SGD = Training(batch_size=4, optimizer="sgd", encoder_lr=0.01)
VIT = {"width": 64, "steps": 3}


def train_part(
    job: Job, encoder: Any, accelerator: Any, trainable: Any, activations: Any = None, training: Any = SGD, **more: Any
) -> Trained:
    """Trains on cached activations, or on those that are computed from the images."""
    return train(job, encoder, training, accelerator, part=EncoderPart(trainable, activations), **more)


class Watched(EndToEnd):
    """The model that the loop trains: the last one made, and its state before."""

    last: Watched

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start = copy.deepcopy(self.encoder.state_dict())
        Watched.last = self


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr("xdm_ft.training.end_to_end.train.EndToEnd", Watched)
    return Watched


CASES: dict[str, tuple[Callable[[], Encoder], Part, Job, dict[str, Any]]] = {
    "cnn, sam": (BlockCNN, blocks(2), make_job(sharpness=SAM(rho=0.1), width=16), {}),
    "cnn, lora, sam": (BlockCNN, lora(dropout=0.3), make_job(sharpness=SAM(rho=0.1), width=16), {}),
    "vit, lora": (vit, lora(blocks=2), make_job(width=64), {"unfreeze_at": 2}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "cnn, lora" in n else ()) for n in CASES])
def test_only_what_may_change_changes(watched: type[Watched], accelerator: Accelerator, name: str) -> None:
    make, part, job, arguments = CASES[name]
    encoder = make()
    state = final_state(train_part(job, encoder, accelerator, part, **arguments))
    before, after, start = watched.last.start, watched.last.encoder.state_dict(), encoder.state_dict()
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    saved = {key.removeprefix("encoder.") for key in state if key.startswith("encoder.")}
    if isinstance(part, LastBlocks):
        assert changed == saved == {key for key in start if key.startswith(("stages.1.", "norm."))}
        return
    assert changed == {key for key in before if ".lora_A." in key or ".lora_B." in key} != set()
    assert saved and all(not torch.equal(state[f"encoder.{key}"], start[key]) for key in saved)
    layers = [encoder.get_submodule(key.removesuffix(".weight")) for key in saved]
    assert all(isinstance(layer, torch.nn.Linear) for layer in layers)


@pytest.mark.parametrize(
    "part", [pytest.param(blocks(1), marks=pytest.mark.slow), lora(blocks=2, alpha=8.0)], ids=["blocks", "lora"]
)
def test_merged_weights_and_wise_ft_s_between_start_and_end(
    watched: type[Watched], accelerator: Accelerator, part: Part
) -> None:
    """α = 0 is the start, bit for bit; a merged low-rank update is W + (alpha / rank) B A."""
    encoder, job, rows = vit(), make_job(**VIT), split().evaluation["test_val"]
    end, inner = final_state(train_part(job, encoder, accelerator, part)), watched.last.eval()

    def logits(state: dict[str, Tensor]) -> Tensor:
        return predict(job, encoder, state, digits(), rows, accelerator, 16, part=EncoderPart(part))

    before = EndToEnd(copy.deepcopy(encoder), job.make(job.setup), "frozen").weights()
    zero, half = (interpolate(before, end, alpha) for alpha in (0.0, 0.5))
    assert all(torch.equal(value, before[name]) for name, value in zero.items())
    for name in end.keys() - {"seed"}:
        torch.testing.assert_close(half[name], (before[name] + end[name]) / 2, rtol=0, atol=1e-7)
    with torch.no_grad():
        images = images_of(rows, encoder)
        at_start = job.make(job.setup).logits(encoder(images))
        at_end = inner.algorithm.logits(inner.encode(inner.cut.below(images)))
    torch.testing.assert_close(logits(zero), at_start, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits(end), at_end, rtol=0, atol=1e-5)
    assert (logits(half) - at_start).abs().max() > 1e-4
    if isinstance(part, LowRank):
        name = "model.blocks.2.mlp.fc1"
        a, b = (inner.encoder.get_parameter(f"{name}.lora_{letter}.default.weight") for letter in "AB")
        delta = end[f"encoder.{name}.weight"] - encoder.get_parameter(f"{name}.weight")
        torch.testing.assert_close(delta, 8.0 / 2 * b @ a, rtol=0, atol=1e-6)
        assert merge_updates(inner.encoder).keys() == encoder.state_dict().keys()


def test_mixstyle_works_in_containers_of_blocks_of_both_parts(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, forward = list[tuple[int, ...]](), _MixStyleAt.forward
    monkeypatch.setattr(
        _MixStyleAt,
        "forward",
        lambda self, x, batch, step: (shapes.append((step, *x.shape)), forward(self, x, batch, step))[1],
    )
    final_state(train_part(make_job(partial(MixStyle, p=1.0), 2, width=16), BlockCNN(), accelerator, blocks(3)))
    assert shapes == [(step, 12, *shape) for step in range(2) for shape in ((8, 8, 8), (16, 4, 4))]


def test_places_below_the_cut_are_refused(accelerator: Accelerator) -> None:
    with pytest.raises(UserError, match=r"after stages\.0, which lies below the cut; train more blocks, or set train"):
        train_part(make_job(MixStyle, width=16), BlockCNN(), accelerator, blocks(2))
    with pytest.raises(UserError, match=r"after stem\.0, which lies below the cut; set trainable: true$"):
        train_part(make_job(DSU, width=16), BlockCNN(), accelerator, blocks(4))


RATES = {
    "vit": {
        "encoder.model.norm.": 1.0, "encoder.model.blocks.2.": 0.5, "encoder.model.blocks.1.": 0.25,
        "encoder.model.blocks.0.": 0.125, "encoder.model.cls_token": 0.0625, "encoder.model.reg_token": 0.0625,
        "encoder.model.pos_embed": 0.0625, "encoder.model.patch_embed.": 0.0625, "algorithm.head.": 0.5,
    },
    "cnn": {
        "encoder.norm.": 1.0, "encoder.stages.1.1.": 0.5, "encoder.stages.1.0.": 0.25, "encoder.stages.0.1.": 0.125,
        "encoder.stages.0.0.": 0.0625, "encoder.stem.": 0.03125, "algorithm.head.": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, trainable, places",
    [("vit", True, 9), ("vit", lora(), 4), ("vit", lora(blocks=1), 2), ("cnn", True, 7), ("cnn", blocks(3), 5)],
)
def test_layer_decay(kind: str, trainable: Any, places: int) -> None:
    encoder = vit() if kind == "vit" else BlockCNN()
    inner = EndToEnd(encoder, make_job(width=encoder.width).new_algorithm(), "train", trainable)
    optimizer = optimizer_of(inner, Training(lr=0.5, encoder_lr=1.0, layer_decay=0.5))
    rate_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    used = set[str]()
    for name, parameter in trained.items():
        [place] = [place for place in RATES[kind] if name.startswith(place)]
        assert rate_of[id(parameter)] == RATES[kind][place], name
        used.add(place)
    assert places - 1 <= len(used) <= places and len(trained) == len(rate_of)  # not every ViT has register tokens
    assert any(".lora_A." in name for name in trained) == isinstance(trainable, LowRank)


@pytest.mark.parametrize("part", [pytest.param(blocks(1), marks=pytest.mark.slow), lora(blocks=1)])
def test_trained_parameters(accelerator: Accelerator, part: Any) -> None:
    encoder, head = vit(), 64 * 10 + 10
    last, layers = encoder.model.blocks[2], [(64, 192), (64, 64)]
    layers += [(64, last.mlp.fc1.out_features), (last.mlp.fc1.out_features, 64)]  # qkv, projection, MLP
    expected = sum(parameter.numel() for module in (last, encoder.model.norm) for parameter in module.parameters())
    if isinstance(part, LowRank):
        expected = sum(2 * (inputs + outputs) for inputs, outputs in layers)
    trained = train_part(make_job(steps=1, width=64), encoder, accelerator, part)
    assert trained.parameters == expected + head
    assert trained.peak_memory is None or trained.peak_memory >= 0


def test_updates_are_drawn_from_the_seed_of_the_model() -> None:
    make = lambda seed: EndToEnd(vit(), make_job(width=64).new_algorithm(), "train", lora(blocks=1), seed=seed)  # noqa: E731
    name = "model.blocks.2.attn.qkv.lora_A.default.weight"
    one, again, other = (make(seed).encoder.get_parameter(name) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [blocks(2), lora(blocks=2)], ids=["blocks", "lora"])
def test_a_gpu_trains_as_a_cpu(accelerator: Accelerator, tmp_path: Path, part: Part) -> None:
    encoder, job = vit(), make_job(steps=5, width=64, sharpness=SAM(rho=0.1))
    activations = cached(encoder, part, tmp_path).activations
    expected = final_state(train_part(job, encoder, accelerator, part, activations))
    AcceleratorState._reset_state(reset_partial_state=True)
    on_gpu = Accelerator(mixed_precision="no")
    assert on_gpu.device.type == "cuda"
    activations = cached(encoder, part, tmp_path).activations
    activations.device = on_gpu.device
    for read in (activations, None):
        assert_close(final_state(train_part(job, encoder, on_gpu, part, read)), expected, atol=1e-3)


# --- what is read


def random_activations(views: int, shape: tuple[int, ...] = (5, 3)) -> CachedActivations:
    rows, width = len(digits()), int(torch.tensor(shape).prod())
    table = torch.randn((1 + views) * rows, width, generator=torch.Generator().manual_seed(0))
    places = torch.arange((1 + views) * rows).view(1 + views, rows)
    return CachedActivations(Features([table[:1000], table[1000:]], places, streamed=True), shape)


@pytest.mark.parametrize("source", ["none", "batch", "all"])
def test_training_draws_the_views_that_a_bank_draws(accelerator: Accelerator, source: str) -> None:
    inputs, seen = random_activations(views=2), set[int]()
    make = ERM if source == "none" else partial(LISA, p_sel=0.5, partners=source)
    job = under(Training(batch_size=4, accumulation=2), make_job(make, steps=4, width=15))
    bank = list(batches([job], CachedData(inputs.features, digit_annotations())))
    loop = [step.parts for _, step in TrainingBatches(job, inputs, digit_annotations(), accelerator).begin()]
    assert len(bank) == len(loop) == 4
    for theirs, parts in zip(bank, loop, strict=True):
        for ours in parts:
            x = ours.x.flatten(1)
            assert torch.equal(ours.row, theirs.row[0, ours.position])
            assert torch.equal(x, theirs.x[0, ours.position])
            if source != "none":
                assert torch.equal(ours.partner.flatten(1), theirs.partner[0, ours.position])
            views = (inputs.features.of_views(ours.row, torch.full_like(ours.row, number)) for number in range(3))
            seen |= {number for number, view in enumerate(views) if (view == x).all(1).any()}
    assert seen == {1, 2}, "both augmented views, and never the plain one"


def test_evaluations_read_the_plain_view(accelerator: Accelerator) -> None:
    inputs, rows = random_activations(views=2), torch.tensor([3, 1797 - 1, 7])
    [first, second] = inputs.of_rows(rows.tolist(), 2)()
    assert torch.equal(torch.cat([first, second]).flatten(1), inputs.features[rows])
    assert [x.shape for x in (first, second)] == [(2, 5, 3), (1, 5, 3)]
    assert list(inputs.of_rows([], 2)()) == []


# --- the thread that reads ahead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("activations")]


class Numbers:
    """Features whose reading calls a function of the row."""

    def __init__(self, read: Callable[[int], Tensor]) -> None:
        self.of_views = lambda rows, views: read(int(rows))


def _ahead(read: Callable[[int], Tensor], count: int) -> Iterator[Tensor]:
    return CachedActivations(Numbers(read), ()).of_rows(range(count), 1)()  # type: ignore[arg-type]


def test_reads_ahead_in_order_and_stops_its_thread() -> None:
    begun: list[int] = []

    def read(number: int) -> Tensor:
        if number == 7:
            raise OSError("damaged")
        begun.append(number)
        return torch.tensor(number)

    read_ahead = _ahead(read, 10)
    assert next(read_ahead) == 0
    deadline = time.monotonic() + 60
    while len(begun) < 1 + STEPS_AHEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun == [0, 1, 2], "the next two are read while the first one is used"
    assert len(threads()) == 1
    read_ahead.close()
    assert not threads() and begun == [0, 1, 2]
    assert [int(x) for x in _ahead(read, 5)] == [0, 1, 2, 3, 4]
    assert list(_ahead(read, 0)) == []
    got = []
    with pytest.raises(OSError, match="damaged"):  # at its own step
        for x in _ahead(read, 10):
            got.append(int(x))
    assert got == [*range(7)] and not threads()


class Breaks(ERM):
    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        return losses._replace(total=losses.total * (float("nan") if step == 2 else 1))


@pytest.mark.parametrize("end", ["failure", "damage", pytest.param("stop", marks=pytest.mark.slow)])
def test_no_thread_outlives_a_training(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    activations = random_activations(views=0, shape=(16, 4, 4)).features
    job = make_job(Breaks if end == "failure" else ERM, steps=100, width=16)
    training = Training(batch_size=4, encoder_lr=1e-9, evaluate_every=1)
    run = partial(train_part, job, BlockCNN(), accelerator, blocks(1), activations, training)
    if end == "failure":
        assert "nan" in str(run().failure)
    elif end == "stop":
        monkeypatch.setattr("xdm_ft.training.end_to_end.gradients.stop_requested", lambda: True)
        with pytest.raises(Interrupted) as caught:
            run()
    else:
        gather, reads = Features._gather, list[str]()

        def damaged(self: Features, positions: Tensor, last: int) -> Tensor:
            reads.append(threading.current_thread().name)
            if len(reads) == 40:
                raise OSError("the disk is gone")
            return gather(self, positions, last)

        monkeypatch.setattr(Features, "_gather", damaged)
        with pytest.raises(OSError, match="the disk is gone") as caught:
            run()
        assert all(name.startswith("activations") for name in reads)
    assert not threads()
    if end in ("stop", "damage"):
        assert caught.tb is not None  # its frames are still referenced, so that nothing was closed by their end
