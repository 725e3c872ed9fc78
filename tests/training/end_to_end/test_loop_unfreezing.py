"""LP-FT: the head alone first, then all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from loop_models import SmallCNN, digits, final_state, make_job, one_process, rows_of, train
from torch import Tensor

from xdm_ft.algorithms.erm import ERM
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Schedule, Training

TRAINING = Training(batch_size=4, encoder_lr=0.01, schedule=Schedule(name="cosine", warmup_steps=2))


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


class Watched(SmallCNN):
    """The loop trains a copy of it: the last one made."""

    copies: list[Watched] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        copied = Watched(dropout=0.3)
        copied.load_state_dict(self.state_dict())
        self.copies.append(copied)
        return copied


class Watching(ERM):
    """Takes down the encoder's state at every pass."""

    seen: list[dict[str, Tensor]] = []

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        self.seen.append(copy.deepcopy(Watched.copies[-1].state_dict()))
        return super().loss(z, batch, step)


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [None, SAM()], ids=["erm", "sam"])
def test_the_encoder_is_exactly_frozen_until_the_step(accelerator: Accelerator, sharpness: SAM | None) -> None:
    encoder, passes = Watched(dropout=0.3), 2 if sharpness else 1
    start, job = copy.deepcopy(encoder.state_dict()), make_job(Watching, steps=6, sharpness=sharpness)
    Watching.seen.clear()
    final = final_state(train(job, encoder, TRAINING, accelerator, unfreeze_at=4))
    assert len(Watching.seen) == 6 * passes
    for before in Watching.seen[: 4 * passes]:
        assert all(torch.equal(before[name], value) for name, value in start.items())
    for name in ("layers.0.weight", "layers.1.weight", "layers.1.running_mean"):
        assert not torch.equal(final[f"encoder.{name}"], start[name])
    assert not torch.equal(final["head.weight"], ERM(job.setup).head.weight)


@pytest.mark.slow
def test_the_first_phase_is_a_linear_probe_and_the_second_goes_on_from_it(accelerator: Accelerator) -> None:
    job, encoder = make_job(steps=5), SmallCNN()
    got = final_state(train(job, encoder, TRAINING, accelerator, unfreeze_at=3))

    encoder, head = copy.deepcopy(encoder), ERM(job.setup).head
    optimizer = torch.optim.Adam(
        [
            {"params": list(head.parameters()), "lr": job.training.lr},
            {"params": list(encoder.parameters()), "lr": 0.01},
        ],
        weight_decay=job.training.weight_decay,
    )
    base = [group["lr"] for group in optimizer.param_groups]
    for number in range(5):
        x, y = batch_of(job, number)
        encoder.train(number >= 3)
        z = encoder(x) if number >= 3 else encoder(x).detach()
        optimizer.zero_grad()
        F.cross_entropy(head(z), y).backward()
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * factor(number)
        optimizer.step()
    expected = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    expected |= {"head.weight": head.weight, "head.bias": head.bias}
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def factor(number: int) -> float:

    return TRAINING.schedule.factor(number, 5)


def batch_of(job: Job, number: int) -> tuple[Tensor, Tensor]:
    rows = rows_of(job, TRAINING, number)
    images = ImageRows(digits(), evaluation_transform(SmallCNN.preprocessing))
    return torch.stack([images[int(row)][0] for row in rows]), torch.from_numpy(digits().labels)[rows]


@pytest.mark.slow
def test_steps_of_the_head_alone_are_not_selected(accelerator: Accelerator) -> None:
    class Worsens(ERM):
        """After the first step every further one takes the head away from what it learned."""

        def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
            losses = super().loss(z, batch, step)
            return losses if step < 20 else losses._replace(total=-losses.total)

    training, recorded = TRAINING.model_copy(update={"evaluate_every": 10}), {}
    trained = train(
        make_job(Worsens, steps=40), SmallCNN(), training, accelerator, unfreeze_at=20,
        record=lambda step, models: recorded.update({step: models[0][1]["train_val/accuracy"]}),
    )  # fmt: skip
    assert max(recorded, key=lambda step: recorded[step]) <= 20
    assert trained.selected["train_val"].step > 20


@pytest.mark.slow
def test_both_phases_in_bf16() -> None:
    with one_process("bf16") as accelerator:
        job = make_job(steps=3)
        final = final_state(train(job, SmallCNN(), TRAINING, accelerator, unfreeze_at=1))
    assert all(value.isfinite().all() for value in final.values())
