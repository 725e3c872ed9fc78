"""A training that is left at any step and begun again from its checkpoint ends as if nothing had been, bit for bit."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bank_problems
import loop_models
import pytest
import torch
from accelerate import Accelerator
from bank_problems import job_of
from loop_models import BlockCNN, SmallCNN, WithDomainHead, blocks, cached, lora, make_job, vit

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.fish import Fish
from xdm_ft.algorithms.groupdro import GroupDRO
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.averaging import Averaging
from xdm_ft.averaging.bma import BMA
from xdm_ft.averaging.swad import SWAD
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.mlp import MLP
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.sharpness.sam import SAM
from xdm_ft.storage.checkpoint import Checkpoint, Pace, State, read
from xdm_ft.training import Job, Schedule, Trained, Training
from xdm_ft.training.end_to_end.model import EncoderPart

STEPS = 6
RULES = ("train_val", "oracle")
TRAINING = Training(batch_size=4, evaluate_every=2, encoder_lr=0.01, schedule=Schedule(name="cosine"))
VALLEY, OPEN = SWAD(n_converge=2, n_tolerance=2, tolerance_ratio=0.0), SWAD(n_converge=1, tolerance_ratio=100.0)


class Killed(Exception):
    pass


class Cut(Checkpoint):
    """Saves after every step, and the process dies after having saved `lives` times."""

    def __init__(self, path: Path, lives: int = 10**9, **about: Any) -> None:
        super().__init__(path, about, Pace())
        self.lives = lives

    def save_if_due(self, state: Callable[[], State], event: bool = False) -> None:
        self.save(state)
        self.lives -= 1
        if self.lives == 0:
            raise Killed


def assert_same(got: Trained, expected: Trained) -> None:
    assert got.failure is None and expected.failure is None
    assert got.course == expected.course
    assert got.selected.keys() == expected.selected.keys()
    for rule, selected in expected.selected.items():
        assert (got.selected[rule].step, got.selected[rule].hparams) == (selected.step, selected.hparams)
        assert got.selected[rule].state.keys() == selected.state.keys()
        for name, value in selected.state.items():
            assert torch.equal(got.selected[rule].state[name], value), (rule, name)
    shared = [len({id(selected.state) for selected in trained.selected.values()}) for trained in (got, expected)]
    assert shared[0] == shared[1], "rules that picked the same share it"


def averaged(job: Job, averaging: Averaging) -> Job:
    return dataclasses.replace(job, averaging=averaging)


# --- the bank


def mixing(averaging: Averaging | None = None, **settings: Any) -> list[Job]:
    more = {"steps": STEPS, "warmup_steps": 2, "quantile_steps": 2, **settings}
    jobs = [job_of(XDomainMix, seed=seed, lr=0.01 * (1 + seed), sharpness=SAM(rho=0.05), **more) for seed in range(3)]
    return [dataclasses.replace(job, averaging=averaging) for job in jobs]


EVERY_STEP = TRAINING.model_copy(update={"evaluate_every": 1})
BANK = {
    "xdomainmix and sam": (mixing(), TRAINING),
    "domain head, sgd": (
        [job_of(WithDomainHead, seed=seed, steps=STEPS) for seed in range(2)],
        TRAINING.model_copy(update={"optimizer": "sgd"}),
    ),
    "groupdro": ([job_of(GroupDRO, steps=STEPS)], TRAINING.model_copy(update={"optimizer": "adamw", "amsgrad": True})),
    "mlp, swad": (mixing(VALLEY, setup={"head": partial(MLP, hidden_width=16)}), EVERY_STEP),
    "optimizer that is reset": ([job_of(IRM, steps=STEPS, anneal_steps=3)], TRAINING),
    "swad between evaluations": (mixing(OPEN), TRAINING),
    "bma": (mixing(BMA()), TRAINING),
}


@pytest.mark.parametrize("case", BANK)
def test_a_chunk_is_killed_and_begun_again(tmp_path: Path, case: str) -> None:
    jobs, training = BANK[case]
    expected = bank_problems.train(jobs, training, RULES)
    for lives in (1, 3, STEPS):  # within the warm-up, between two evaluations, at the end
        path, evaluated = tmp_path / f"{lives}", []
        with pytest.raises(Killed):
            bank_problems.train(jobs, training, RULES, checkpoint=lambda chunk, p=path, n=lives: Cut(p, n))
        assert read(path)[0]["taken"] == lives
        again = bank_problems.train(
            jobs, training, RULES, checkpoint=lambda chunk, path=path: Cut(path),
            record=lambda step, heads, evaluated=evaluated: evaluated.append(step),
        )  # fmt: skip
        assert all(step > lives for step in evaluated), "nothing is done twice"
        for got, other in zip(again, expected, strict=True):
            assert_same(got, other)


def test_a_head_that_has_failed_stays_failed_and_the_others_go_on(tmp_path: Path) -> None:
    jobs = [job_of(seed=0, steps=STEPS), job_of(seed=1, steps=STEPS, lr=float("inf"))]
    sgd = TRAINING.model_copy(update={"optimizer": "sgd"})
    expected = bank_problems.train(jobs, sgd)
    assert expected[1].failure is not None
    with pytest.raises(Killed):
        bank_problems.train(jobs, sgd, checkpoint=lambda chunk: Cut(tmp_path / "c", 4))
    got = bank_problems.train(jobs, sgd, checkpoint=lambda chunk: Cut(tmp_path / "c"))
    assert_same(got[0], expected[0])
    assert got[1].failure == expected[1].failure and got[1].selected == {}


def test_a_stop_of_a_chunk_saves_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, training = BANK["xdomainmix and sam"]
    expected, asked = bank_problems.train(jobs, training), []
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="3 models together: 3 of 6 steps"):
        patch.setattr("xdm_ft.training.bank.train.stop_requested", lambda: asked.append(1) or len(asked) == 3)
        bank_problems.train(jobs, training, checkpoint=lambda chunk: Cut(tmp_path / "c"))
    again = bank_problems.train(jobs, training, checkpoint=lambda chunk: Cut(tmp_path / "c"))
    for got, other in zip(again, expected, strict=True):
        assert_same(got, other)


# --- end to end

LOOP: dict[str, tuple[Job, dict[str, Any], dict[str, Any]]] = {
    "adam, domain head, buffers": (make_job(WithDomainHead, STEPS), {}, {}),
    "sgd, sam, clipped": (
        make_job(WithDomainHead, STEPS, sharpness=SAM(rho=0.1)),
        {"optimizer": "sgd", "clip_norm": 0.5, "accumulation": 2},
        {"batch_norm": "frozen"},
    ),
    "swad, batch norm": (averaged(make_job(steps=STEPS), VALLEY), {"evaluate_every": 1}, {}),
    "swad between evaluations": (averaged(make_job(steps=STEPS), OPEN), {"evaluate_every": 3}, {"unfreeze_at": 2}),
    "bma, unfreezing": (averaged(make_job(steps=STEPS), BMA()), {"evaluate_every": 4}, {"unfreeze_at": 2}),
    "fish, adamw": (make_job(Fish, STEPS, head=Cosine), {"optimizer": "adamw"}, {"unfreeze_at": 3}),
    "mlp, optimizer that is reset": (make_job(partial(IRM, anneal_steps=3), STEPS, head=MLP), {}, {}),
}
VIT = {"width": 64, "steps": STEPS}
ABOVE_A_CUT: dict[str, tuple[Any, Any, Job, dict[str, Any], dict[str, Any]]] = {
    "vit, sam": (vit, blocks(1), make_job(WithDomainHead, sharpness=SAM(rho=0.1), **VIT), {}, {}),
    "vit, lora, dropout, swad": (
        vit, lora(dropout=0.3), averaged(make_job(**VIT), OPEN), {"evaluate_every": 1, "layer_decay": 0.7}, {},
    ),
    "cnn, batch norm": (BlockCNN, blocks(3), make_job(width=16, steps=STEPS), {}, {"unfreeze_at": 2}),
}  # fmt: skip
QUICK = {"sgd, sam, clipped", "vit, lora, dropout, swad"}
Run = Callable[..., Trained]


def runs(case: str, reads: str, accelerator: Accelerator, folder: Path) -> Run:
    if case in LOOP:
        make, (job, changes, arguments) = partial(SmallCNN, dropout=0.3), LOOP[case]
    else:
        make, trainable, job, changes, arguments = ABOVE_A_CUT[case]
        part = cached(make(), trainable, folder) if reads == "cache" else EncoderPart(trainable)
        arguments = arguments | {"part": part}
    training = TRAINING.model_copy(update=changes)
    return lambda **more: loop_models.train(job, make(), training, accelerator, **arguments, rules=RULES, **more)


@pytest.mark.parametrize(
    ("case", "reads"),
    [
        pytest.param(case, reads, marks=() if case in QUICK and reads == "images" else pytest.mark.slow)
        for case in (*LOOP, *ABOVE_A_CUT)
        for reads in (("images", "cache") if case in ABOVE_A_CUT else ("images",))
    ],
)
def test_a_model_is_killed_and_begun_again(case: str, reads: str, accelerator: Accelerator, tmp_path: Path) -> None:
    run = runs(case, reads, accelerator, tmp_path)
    expected = run()
    for lives in (1, 4):
        path, taken = tmp_path / f"{lives}.safetensors", []
        with pytest.raises(Killed):
            run(checkpoint=Cut(path, lives))
        assert read(path)[0]["taken"] == lives
        torch.rand(3)
        got = run(checkpoint=Cut(path), record=lambda step, models, taken=taken: taken.append(step))
        assert all(step > lives for step in taken), "nothing is done twice"
        assert_same(got, expected)


@pytest.mark.slow
def test_killed_after_every_step_and_the_seconds_add_up(accelerator: Accelerator, tmp_path: Path) -> None:
    run, seconds = runs("swad, batch norm", "images", accelerator, tmp_path), [0.0]
    expected = run()
    for _ in range(STEPS):
        with pytest.raises(Killed):
            run(checkpoint=Cut(tmp_path / "c", 1))
        seconds.append(read(tmp_path / "c")[0]["seconds"])
    got = run(checkpoint=Cut(tmp_path / "c", 1))
    assert_same(got, expected)
    assert seconds == sorted(seconds) and seconds[-1] < got.seconds < seconds[-1] + expected.seconds + 1


@pytest.mark.parametrize("at", ["step", "evaluation"])
def test_a_stop_of_a_model_saves_and_loses_nothing(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    run, asked = runs("adam, domain head, buffers", "images", accelerator, tmp_path), []
    expected = run()
    where = "gradients" if at == "step" else "prediction"
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"method, .* held out, seed 3: \d of 6"):
        patch.setattr(f"xdm_ft.training.end_to_end.{where}.stop_requested", lambda: asked.append(1) or len(asked) > 3)
        run(checkpoint=Cut(tmp_path / "c"))
    saved = read(tmp_path / "c")[0]
    assert (saved["taken"], saved["evaluated"]) == ((4, False) if at == "step" else (2, False))
    assert_same(run(checkpoint=Cut(tmp_path / "c")), expected)


# --- checkpoints of something else


@pytest.mark.parametrize("other", ["weights", "data", "setting", pytest.param("below the cut", marks=pytest.mark.slow)])
def test_a_checkpoint_of_something_else_is_named_and_not_used(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    part = EncoderPart(blocks(1)) if other == "below the cut" else EncoderPart()
    job, encoder = make_job(Fish, STEPS, width=16), BlockCNN()
    train = partial(loop_models.train, training=TRAINING, accelerator=accelerator, part=part)
    with pytest.raises(Killed):
        train(job, encoder, checkpoint=Cut(tmp_path / "c", 2, recipe={"lr": 1}))
    if other == "data":
        split = dataclasses.replace(job.split, train=tuple(pool[1:] for pool in job.split.train))
        job = dataclasses.replace(job, split=split)
    if other in ("weights", "below the cut"):
        with torch.no_grad():
            encoder.stem[0].weight.mul_(1.1)
    recipe = {"lr": 2 if other == "setting" else 1}
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        got = train(job, encoder, checkpoint=Cut(tmp_path / "c", recipe=recipe))
    assert_same(got, train(job, encoder))
    key = {"data": "data", "setting": "recipe.lr was 1, is 2"}.get(other, "weights")
    [message] = [line for line in caplog.messages if "checkpoint" in line or "settings" in line]
    assert f"written for other settings ({key}" in message and "starts again" in message
    assert len(got.restarts) == 1 and key in got.restarts[0]


def test_a_chunk_on_other_images_starts_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(ERM, steps=STEPS)
    with pytest.raises(Killed):
        bank_problems.train([job], TRAINING, checkpoint=lambda chunk: Cut(tmp_path / "c", 5))
    fewer = {"train_val": job.split.evaluation["train_val"][1:]}
    split = dataclasses.replace(job.split, evaluation=job.split.evaluation | fewer)
    job = dataclasses.replace(job, split=split)
    [got] = bank_problems.train([job], TRAINING, checkpoint=lambda chunk: Cut(tmp_path / "c"))
    assert "written for other settings (data was" in caplog.text
    assert_same(got, bank_problems.train([job], TRAINING)[0])
