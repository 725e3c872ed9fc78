"""What is read above a cut: cached or computed activations, their views, and the thread that reads ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from cut_models import BlockCNN, blocks, cached, lora, train_part, vit
from cut_short import Cut as Checkpoint
from cut_short import Killed
from loop_models import digit_annotations, digits, final_state, make_job, one_process
from own_training import under
from torch import Tensor

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.encoders import Encoder
from xdm_ft.features.cache import Features
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.data import CachedData, batches
from xdm_ft.training.end_to_end.batches import TrainingBatches
from xdm_ft.training.end_to_end.inputs import STEPS_AHEAD, CachedActivations, _ahead

ADAM = Training(batch_size=4, encoder_lr=0.001)
METHODS: dict[str, Callable[[int, int], Job]] = {
    "erm": lambda width, steps: make_job(ERM, steps, width=width),
    "xdomainmix, sam": lambda width, steps: make_job(
        partial(XDomainMix, warmup_steps=5, quantile_steps=5), steps, width=width, sharpness=SAM(rho=0.1)
    ),
    "lisa": lambda width, steps: make_job(partial(LISA, p_sel=0.5, partners="all"), steps, width=width),
}


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("activations")]


def difference(job: Job, encoder: Encoder, part: Any, accelerator: Accelerator, folder: Path, **settings: Any) -> float:
    """‖cached − computed‖ / ‖computed − start‖, of the encoder's weights after training on either activations."""
    activations = cached(encoder, part, folder, **settings)
    stored = final_state(train_part(job, encoder, ADAM, accelerator, part, activations))
    computed = final_state(train_part(job, encoder, ADAM, accelerator, part))
    assert stored.keys() == computed.keys()
    start = {f"encoder.{name}": value for name, value in encoder.state_dict().items() if value.is_floating_point()}
    weights = [name for name in stored if name in start]
    far, moved = (
        torch.cat([(one[name] - other[name]).flatten() for name in weights]).norm()
        for one, other in ((stored, computed), (computed, start))
    )
    assert moved > 0.1
    print(f"difference after {job.setup.steps} steps: {far / moved:.1e}")
    return float(far / moved)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", [blocks(2), lora(blocks=2, dropout=0.2)], ids=["blocks", "lora"])
def test_cache_equals_compute_in_float32(accelerator: Accelerator, tmp_path: Path, method: str, part: Any) -> None:
    """To a thousandth of the way after 50 steps of Adam: batches of other sizes may round differently below the cut."""
    assert difference(METHODS[method](64, 50), vit(), part, accelerator, tmp_path) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_cache_equals_compute_with_batch_norm(accelerator: Accelerator, tmp_path: Path, method: str) -> None:
    assert difference(METHODS[method](16, 50), BlockCNN(), blocks(2), accelerator, tmp_path) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_bf16_activations_differ_by_their_rounding(accelerator: Accelerator, tmp_path: Path, method: str) -> None:
    """bfloat16 has 8 bits: activations are off by up to 1/256 of their size, and so is what runs below the cut."""
    job = METHODS[method](64, 50)
    assert 1e-3 < difference(job, vit(), blocks(2), accelerator, tmp_path, precision="bf16") < 0.1


def random_activations(views: int, shape: tuple[int, ...] = (5, 3)) -> CachedActivations:
    rows, width = len(digits()), int(torch.tensor(shape).prod())
    table = torch.randn((1 + views) * rows, width, generator=torch.Generator().manual_seed(0))
    places = torch.arange((1 + views) * rows).view(1 + views, rows)
    return CachedActivations(Features([table[:1000], table[1000:]], places, streamed=True), shape)


@pytest.mark.parametrize("source", ["none", "batch", "all"])
def test_training_draws_the_views_that_a_bank_draws(accelerator: Accelerator, source: str) -> None:
    inputs = random_activations(views=2)
    make = ERM if source == "none" else partial(LISA, p_sel=0.5, partners=source)
    job = under(Training(batch_size=4), make_job(make, steps=4, width=15))
    bank = list(batches([job], CachedData(inputs.features, digit_annotations())))
    loop = [step.parts[0] for _, step in TrainingBatches(job, inputs, digit_annotations(), accelerator).begin()]
    assert len(bank) == len(loop) == 4
    rows, seen = [], set()
    for theirs, ours in zip(bank, loop, strict=True):
        assert torch.equal(ours.index, theirs.index[0])
        assert torch.equal(ours.x.flatten(1), theirs.x[0])
        if source != "none":
            assert torch.equal(ours.partner.flatten(1), theirs.partner[0])
        rows.append(ours.index)
        for number in range(3):
            at = inputs.features.of_views(ours.index, torch.full_like(ours.index, number))
            seen |= {number} if (at == ours.x.flatten(1)).all(1).any() else set()
    assert seen == {1, 2}, "both augmented views, and never the plain one"


def test_evaluations_read_the_plain_view(accelerator: Accelerator) -> None:
    inputs = random_activations(views=2)
    rows = torch.tensor([3, 1797 - 1, 7])
    [first, second] = inputs.of_rows(rows.tolist(), 2)
    assert torch.equal(torch.cat([first, second]).flatten(1), inputs.features[rows])
    assert [x.shape for x in (first, second)] == [(2, 5, 3), (1, 5, 3)]
    assert list(inputs.of_rows([], 2)) == []


@pytest.mark.slow
def test_views_change_what_trains(accelerator: Accelerator, tmp_path: Path) -> None:
    encoder, job = vit(), make_job(steps=3, width=64)
    states = [
        final_state(
            train_part(job, encoder, ADAM, accelerator, blocks(1), cached(encoder, blocks(1), tmp_path, views=views))
        )
        for views in (0, 2)
    ]
    assert not torch.equal(states[0]["head.weight"], states[1]["head.weight"])


def test_reads_ahead_in_order_and_stops_its_thread() -> None:
    begun: list[int] = []

    def read(number: int) -> Tensor:
        begun.append(number)
        return torch.tensor(number)

    read_ahead = _ahead(partial(read, number) for number in range(10))
    assert next(read_ahead) == 0
    deadline = time.monotonic() + 10
    while len(begun) < 1 + STEPS_AHEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun == [0, 1, 2], "the next two are read while the first one is used"
    assert len(threads()) == 1
    read_ahead.close()
    assert not threads() and begun == [0, 1, 2]
    assert [int(x) for x in _ahead(partial(read, number) for number in range(5))] == [0, 1, 2, 3, 4]
    assert not threads()
    assert list(_ahead([])) == []


def test_an_error_of_the_thread_is_raised_at_its_step() -> None:
    def read(number: int) -> Tensor:
        if number == 3:
            raise OSError("damaged")
        return torch.tensor(number)

    got = []
    with pytest.raises(OSError, match="damaged"):
        for x in _ahead(partial(read, number) for number in range(6)):
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
