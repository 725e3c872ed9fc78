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
    SmallCNN,
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
from test_resumed_training import Cut as Checkpoint
from test_resumed_training import Killed
from torch import Tensor

from xdm_ft.algorithms.dsu import DSU
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixstyle import MixStyle, _MixStyleAt
from xdm_ft.algorithms.wise_ft import interpolate
from xdm_ft.cut.lora import merged_state
from xdm_ft.cut.trainable import LastBlocks, LowRank
from xdm_ft.encoders import Encoder
from xdm_ft.features.cache import Features
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.bank.data import CachedData, batches
from xdm_ft.training.end_to_end.inputs import STEPS_AHEAD, CachedActivations, TrainingBatches
from xdm_ft.training.end_to_end.model import EncoderPart, EndToEnd, optimizer_of


def train_part(
    job: Job, encoder: Any, training: Training, accelerator: Any, trainable: Any, activations: Any = None, **more: Any
) -> Trained:
    """Trains on cached activations, or on those that are computed from the images."""
    return train(job, encoder, training, accelerator, part=EncoderPart(trainable, activations), **more)


SGD = Training(batch_size=4, optimizer="sgd", encoder_lr=0.01)
Part = LastBlocks | LowRank
ENCODERS: dict[str, Callable[[], Encoder]] = {"vit": vit, "cnn": BlockCNN}
# what lies above the cut, by the names of the models
ABOVE = {("cnn", 2): ("stages.1.", "norm.")}


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


CNN, VIT = {"width": 16, "steps": 4}, {"width": 64, "steps": 4}
# encoder, what trains, job, changes of the training, arguments of the loop
CASES: dict[str, tuple[str, Part, Job, dict[str, Any], dict[str, Any]]] = {
    "cnn, sam, batch norm": ("cnn", blocks(2), make_job(sharpness=SAM(rho=0.1), **CNN), {}, {}),
    "cnn, batch norm frozen": ("cnn", blocks(2), make_job(**CNN), {}, {"batch_norm": "frozen"}),
    "cnn, lora, sam": ("cnn", lora(dropout=0.3), make_job(sharpness=SAM(rho=0.1), **CNN), {}, {}),
    "vit, lora, unfreezing": ("vit", lora(blocks=2), make_job(**VIT), {"optimizer": "adamw"}, {"unfreeze_at": 2}),
}
QUICK = "cnn, sam, batch norm", "vit, lora, unfreezing"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_only_what_may_change_changes(watched: type[Watched], accelerator: Accelerator, name: str) -> None:
    kind, part, job, changes, arguments = CASES[name]
    encoder = ENCODERS[kind]()
    start = {key: value.clone() for key, value in encoder.state_dict().items()}
    trained = train_part(job, encoder, SGD.model_copy(update=changes), accelerator, part, **arguments)
    assert trained.failure is None
    assert all(torch.equal(value, start[key]) for key, value in encoder.state_dict().items()), "a copy trains"
    changed, state = watched.changed(), trained.selected["train_val"].state
    in_state = {one.removeprefix("encoder.") for one in state if one.startswith("encoder.")}
    if isinstance(part, LowRank):
        assert changed == {one for one in watched.last.start if ".lora_A." in one or ".lora_B." in one} != set()
        assert in_state and all(one.endswith(".weight") and _is_linear(encoder, one) for one in in_state)
        assert all(not torch.equal(state[f"encoder.{one}"], start[one]) for one in in_state)
        return
    may = {one for one in start if one.startswith(ABOVE[kind, part.blocks])}
    statistics = {one for one in start if "running" in one or "tracked" in one}
    assert changed == (may - statistics if arguments.get("batch_norm") == "frozen" else may) and in_state == may


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
        expected = job.make(job.setup).logits(encoder(images_of(rows, encoder)))
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
        expected = inner.algorithm.logits(inner.encode(inner.cut.below(images_of(rows, encoder))))
    got = predict(job, encoder, end, digits(), rows, accelerator, 16, part=EncoderPart(part))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    name = "model.blocks.2.mlp.fc1"
    a, b = (inner.encoder.get_parameter(f"{name}.lora_{one}.default.weight") for one in "AB")
    delta = end[f"encoder.{name}.weight"] - encoder.get_parameter(f"{name}.weight")
    torch.testing.assert_close(delta, 8.0 / 2 * b @ a, rtol=0, atol=1e-6)
    assert merged_state(inner.encoder).keys() == encoder.state_dict().keys()


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
    expected = final_state(
        train_part(job, encoder, SGD, accelerator, part, cached(encoder, part, tmp_path).activations)
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    on_gpu = Accelerator(mixed_precision="no")
    assert on_gpu.device.type == "cuda"
    activations = cached(encoder, part, tmp_path).activations
    activations.device = on_gpu.device
    for read in (activations, None):
        assert_close(final_state(train_part(job, encoder, SGD, on_gpu, part, read)), expected, atol=1e-3)


ADAM = Training(batch_size=4, encoder_lr=0.001)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("activations")]


def random_activations(views: int, shape: tuple[int, ...] = (5, 3)) -> CachedActivations:
    rows, width = len(digits()), int(torch.tensor(shape).prod())
    table = torch.randn((1 + views) * rows, width, generator=torch.Generator().manual_seed(0))
    places = torch.arange((1 + views) * rows).view(1 + views, rows)
    return CachedActivations(Features([table[:1000], table[1000:]], places, streamed=True), shape)


@pytest.mark.parametrize("source", ["none", "batch", "all"])
def test_training_draws_the_views_that_a_bank_draws(accelerator: Accelerator, source: str) -> None:
    inputs = random_activations(views=2)
    make = ERM if source == "none" else partial(LISA, p_sel=0.5, partners=source)
    job = under(Training(batch_size=4, accumulation=2), make_job(make, steps=4, width=15))
    bank = list(batches([job], CachedData(inputs.features, digit_annotations())))
    loop = [step.parts for _, step in TrainingBatches(job, inputs, digit_annotations(), accelerator).begin()]
    assert len(bank) == len(loop) == 4
    seen = set()
    for theirs, parts in zip(bank, loop, strict=True):
        for ours in parts:
            assert torch.equal(ours.row, theirs.row[0, ours.position])
            assert torch.equal(ours.x.flatten(1), theirs.x[0, ours.position])
            if source != "none":
                assert torch.equal(ours.partner.flatten(1), theirs.partner[0, ours.position])
            for number in range(3):
                at = inputs.features.of_views(ours.row, torch.full_like(ours.row, number))
                seen |= {number} if (at == ours.x.flatten(1)).all(1).any() else set()
    assert seen == {1, 2}, "both augmented views, and never the plain one"


def test_evaluations_read_the_plain_view(accelerator: Accelerator) -> None:
    inputs = random_activations(views=2)
    rows = torch.tensor([3, 1797 - 1, 7])
    [first, second] = inputs.of_rows(rows.tolist(), 2)()
    assert torch.equal(torch.cat([first, second]).flatten(1), inputs.features[rows])
    assert [x.shape for x in (first, second)] == [(2, 5, 3), (1, 5, 3)]
    assert list(inputs.of_rows([], 2)()) == []


class Numbers:
    """Features whose reading calls a function of the row."""

    def __init__(self, read: Callable[[int], Tensor]) -> None:
        self.read = read

    def of_views(self, rows: Tensor, views: Tensor) -> Tensor:
        return self.read(int(rows))


def _ahead(read: Callable[[int], Tensor], count: int) -> Iterator[Tensor]:
    return CachedActivations(Numbers(read), ()).of_rows(range(count), 1)()  # type: ignore[arg-type]


def test_reads_ahead_in_order_and_stops_its_thread() -> None:
    begun: list[int] = []

    def read(number: int) -> Tensor:
        begun.append(number)
        return torch.tensor(number)

    read_ahead = _ahead(read, 10)
    assert next(read_ahead) == 0
    deadline = time.monotonic() + 10
    while len(begun) < 1 + STEPS_AHEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun == [0, 1, 2], "the next two are read while the first one is used"
    assert len(threads()) == 1
    read_ahead.close()
    assert not threads() and begun == [0, 1, 2]
    assert [int(x) for x in _ahead(read, 5)] == [0, 1, 2, 3, 4]
    assert not threads()
    assert list(_ahead(read, 0)) == []


def test_an_error_of_the_thread_is_raised_at_its_step() -> None:
    def read(number: int) -> Tensor:
        if number == 3:
            raise OSError("damaged")
        return torch.tensor(number)

    got = []
    with pytest.raises(OSError, match="damaged"):
        for x in _ahead(read, 6):
            got.append(int(x))
    assert got == [0, 1, 2] and not threads()


class Breaks(ERM):
    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        return losses._replace(total=losses.total * (float("nan") if step == 2 else 1))


@pytest.mark.parametrize(
    "end", ["failure", "damage", *(pytest.param(end, marks=pytest.mark.slow) for end in ("patience", "kill", "stop"))]
)
def test_no_thread_outlives_a_training(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    encoder, activations = BlockCNN(), random_activations(views=0, shape=(16, 4, 4)).features
    job = make_job(Breaks if end == "failure" else ERM, steps=100, width=16)
    training = ADAM.model_copy(update={"evaluate_every": 1, "patience": 1, "lr": 1e-9, "encoder_lr": 1e-9})
    if end != "patience":
        training = training.model_copy(update={"patience": None})
    run = partial(train_part, job, encoder, training, accelerator, blocks(1), activations)
    if end == "failure":
        assert "nan" in str(run().failure)
    elif end == "patience":
        assert run().stopped_at is not None
    elif end == "kill":
        with pytest.raises(Killed) as caught:
            run(checkpoint=Checkpoint(tmp_path / "c", 2))
    elif end == "stop":
        monkeypatch.setattr("xdm_ft.training.end_to_end.gradients.stop_requested", lambda: True)
        with pytest.raises(Interrupted) as caught:
            run()
    else:
        own, reads = Features._gather, []

        def gather(self: Features, positions: Tensor, last: int) -> Tensor:
            reads.append(threading.current_thread().name)
            if len(reads) == 40:
                raise OSError("the disk is gone")
            return own(self, positions, last)

        monkeypatch.setattr(Features, "_gather", gather)
        with pytest.raises(OSError, match="the disk is gone") as caught:
            run()
        assert all(name.startswith("activations") for name in reads)
    assert not threads()
    if end in ("kill", "stop", "damage"):
        assert caught.tb is not None  # its frames are still referenced, so that nothing was closed by their end
