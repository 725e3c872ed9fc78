"""The loop, left at any step and begun again from its checkpoint, ends as if nothing had been: bit for bit on a CPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from cut_short import Cut, Killed, assert_same
from loop_models import SmallCNN, WithDomainHead, make_job, one_process, train

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.fish import Fish
from xdm_ft.algorithms.irm import IRM
from xdm_ft.averaging.bma import BMA
from xdm_ft.averaging.swad import SWAD
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.mlp import MLP
from xdm_ft.runtime import interrupt
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.sharpness.sam import SAM
from xdm_ft.storage.checkpoint import read, write
from xdm_ft.training import Job, Schedule, Training

STEPS = 6
EVERY_OTHER = Training(batch_size=4, evaluate_every=2, encoder_lr=0.01, schedule=Schedule(name="cosine"))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    # starting workers would take most of the time
    monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)
    with one_process() as accelerator:
        yield accelerator


CASES: dict[str, tuple[Job, Training, dict[str, Any]]] = {
    "adam, domain head, buffers": (make_job(WithDomainHead, STEPS), EVERY_OTHER, {}),
    "sgd, sam, clipped": (
        make_job(WithDomainHead, STEPS, sharpness=SAM(rho=0.1)),
        EVERY_OTHER.model_copy(update={"optimizer": "sgd", "clip_norm": 0.5, "accumulation": 2}),
        {"batch_norm": "frozen"},
    ),
    "swad, batch norm": (
        dataclasses.replace(
            make_job(steps=STEPS), averaging=SWAD(n_converge=2, n_tolerance=2, tolerance_ratio=0.0)
        ),
        EVERY_OTHER.model_copy(update={"evaluate_every": 1}),
        {},
    ),
    "swad between evaluations": (
        dataclasses.replace(make_job(steps=STEPS), averaging=SWAD(n_converge=1, tolerance_ratio=100.0)),
        EVERY_OTHER.model_copy(update={"evaluate_every": 3}),
        {"unfreeze_at": 2},
    ),
    "bma, unfreezing": (
        dataclasses.replace(make_job(steps=STEPS), averaging=BMA()),
        EVERY_OTHER.model_copy(update={"evaluate_every": 4}),
        {"unfreeze_at": 2},
    ),
    "adamw, unfreezing": (
        make_job(WithDomainHead, STEPS),
        EVERY_OTHER.model_copy(update={"optimizer": "adamw"}),
        {"unfreeze_at": 3},
    ),
    "fish": (make_job(Fish, STEPS), EVERY_OTHER, {}),
    "cosine": (make_job(WithDomainHead, STEPS, sharpness=SAM(rho=0.1), head=Cosine), EVERY_OTHER, {}),
    "mlp, unfreezing": (make_job(ERM, STEPS, head=partial(MLP, hidden_width=16)), EVERY_OTHER, {"unfreeze_at": 3}),
    "optimizer that is reset": (make_job(partial(IRM, anneal_steps=3), STEPS), EVERY_OTHER, {}),
}  # fmt: skip


IN_BRIEF = {"sgd, sam, clipped"}  # the other cases run in the full check


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in IN_BRIEF else pytest.mark.slow) for case in CASES]
)
def test_killed_after_any_step_and_begun_again(accelerator: Accelerator, tmp_path: Path, case: str) -> None:
    job, training, arguments = CASES[case]
    arguments = {"rules": ("train_val", "oracle"), **arguments}
    expected = train(job, SmallCNN(dropout=0.3), training, accelerator, **arguments)
    for lives in range(1, STEPS + 1):
        path, taken = tmp_path / f"{lives}.safetensors", []
        with pytest.raises(Killed):
            train(job, SmallCNN(dropout=0.3), training, accelerator, checkpoint=Cut(path, lives), **arguments)
        assert read(path)[0]["taken"] == lives
        torch.rand(3)
        got = train(
            job, SmallCNN(dropout=0.3), training, accelerator, checkpoint=Cut(path), **arguments,
            record=lambda step, models, taken=taken: taken.append(step),
        )  # fmt: skip
        assert all(step > lives for step in taken), "nothing is done twice"
        assert_same(got, expected)


@pytest.mark.slow
def test_killed_after_every_step(accelerator: Accelerator, tmp_path: Path) -> None:
    job, training, _ = CASES["swad, batch norm"]
    expected, got = train(job, SmallCNN(), training, accelerator), None
    for _ in range(STEPS):
        with pytest.raises(Killed):
            train(job, SmallCNN(), training, accelerator, checkpoint=Cut(tmp_path / "c", 1))
    got = train(job, SmallCNN(), training, accelerator, checkpoint=Cut(tmp_path / "c", 1))
    assert_same(got, expected)


@pytest.mark.parametrize("at", ["step", "evaluation"])
def test_a_stop_saves_and_loses_nothing(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    job, training, _ = CASES["adam, domain head, buffers"]
    expected = train(job, SmallCNN(), training, accelerator)
    asked = 0

    def stop_requested() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    where = "gradients" if at == "step" else "prediction"
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"method, .* held out, seed 3: \d of 6"):
        patch.setattr(f"xdm_ft.training.end_to_end.{where}.stop_requested", stop_requested)
        train(job, SmallCNN(), training, accelerator, checkpoint=Cut(tmp_path / "c"))
    assert not interrupt.stop_requested()
    saved = read(tmp_path / "c")[0]
    assert (saved["taken"], saved["evaluated"]) == ((4, False) if at == "step" else (2, False))
    assert_same(train(job, SmallCNN(), training, accelerator, checkpoint=Cut(tmp_path / "c")), expected)


@pytest.mark.slow
def test_the_seconds_add_up(accelerator: Accelerator, tmp_path: Path) -> None:
    job, training, _ = CASES["fish"]
    with pytest.raises(Killed):
        train(job, SmallCNN(), training, accelerator, checkpoint=Cut(tmp_path / "c", STEPS))
    before = read(tmp_path / "c")[0]["seconds"]
    again = train(job, SmallCNN(), training, accelerator, checkpoint=Cut(tmp_path / "c"))
    assert before < again.seconds < 2 * before + 1


@pytest.mark.slow
@pytest.mark.parametrize("other", ["encoder", "split", "setting"])
def test_a_checkpoint_of_something_else_is_named_and_not_used(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    job, training, _ = CASES["fish"]
    with pytest.raises(Killed):
        train(job, SmallCNN(), training, accelerator, checkpoint=Cut(tmp_path / "c", 2, recipe={"lr": 1}))
    if other == "split":
        split = dataclasses.replace(job.split, train=tuple(pool[1:] for pool in job.split.train))
        job = dataclasses.replace(job, split=split)
    encoder, recipe = SmallCNN(seed=int(other == "encoder")), {"lr": 2 if other == "setting" else 1}
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        got = train(job, encoder, training, accelerator, checkpoint=Cut(tmp_path / "c", recipe=recipe))
    assert_same(got, train(job, encoder, training, accelerator))
    key = {"encoder": "weights", "split": "data", "setting": "recipe.lr was 1, is 2"}[other]
    [message] = caplog.messages
    assert f"written for other settings ({key}" in message and "starts again" in message


@pytest.mark.slow
def test_what_started_again_says_so(accelerator: Accelerator, tmp_path: Path) -> None:
    job, training, arguments = CASES["adam, domain head, buffers"]
    path = tmp_path / "c.safetensors"
    with pytest.raises(Killed):
        train(job, SmallCNN(), training, accelerator, checkpoint=Cut(path, 2), **arguments)
    state, about = read(path)
    write(path, state, about | {"processes": 2})
    again = train(job, SmallCNN(), training, accelerator, checkpoint=Cut(path), **arguments)
    assert again.restarts == ("its checkpoint was written for other settings (processes was 2, is 1)",)
    assert_same(again, train(job, SmallCNN(), training, accelerator, **arguments))
