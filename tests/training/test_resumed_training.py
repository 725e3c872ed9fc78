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


def assert_same(resumed: list[Trained], expected: list[Trained]) -> None:
    """Bit for bit, and rules that picked the same step share its weights."""
    for one, other in zip(resumed, expected, strict=True):
        assert (one.failure, one.course, one.selected.keys()) == (other.failure, other.course, other.selected.keys())
        for rule, selected in other.selected.items():
            picked = one.selected[rule]
            assert (picked.step, picked.hparams) == (selected.step, selected.hparams)
            torch.testing.assert_close(picked.state, selected.state, rtol=0, atol=0)
        shared = [len({id(selected.state) for selected in each.selected.values()}) for each in (one, other)]
        assert shared[0] == shared[1]


def averaged(job: Job, averaging: Averaging) -> Job:
    return dataclasses.replace(job, averaging=averaging)


def mixing(averaging: Averaging | None = None, **settings: Any) -> list[Job]:
    more = {"steps": STEPS, "warmup_steps": 2, "quantile_steps": 2, **settings}
    jobs = [job_of(XDomainMix, seed=seed, lr=0.01 * (1 + seed), sharpness=SAM(rho=0.05), **more) for seed in range(3)]
    return [dataclasses.replace(job, averaging=averaging) for job in jobs]


DOMAIN_HEADS = [job_of(WithDomainHead, seed=seed, steps=STEPS) for seed in range(2)]
# one of the two has failed when the other goes on
BROKEN = [job_of(seed=0, steps=STEPS), job_of(seed=1, steps=STEPS, lr=float("inf"))]
BANK: dict[str, tuple[list[Job], dict[str, Any]]] = {
    "xdomainmix and sam": (mixing(), {}),
    "domain head, sgd": (DOMAIN_HEADS, {"optimizer": "sgd"}),
    "groupdro": ([job_of(GroupDRO, steps=STEPS)], {"optimizer": "adamw", "amsgrad": True}),
    "mlp, swad": (mixing(VALLEY, setup={"head": partial(MLP, hidden_width=16)}), {"evaluate_every": 1}),
    "optimizer that is reset": ([job_of(IRM, steps=STEPS, anneal_steps=3)], {}),
    "swad between evaluations": (mixing(OPEN), {}),
    "bma": (mixing(BMA()), {}),
    "a head that has failed": (BROKEN, {"optimizer": "sgd"}),
}
SGD_SAM = {"optimizer": "sgd", "clip_norm": 0.5, "accumulation": 2}
LOOP: dict[str, tuple[Job, dict[str, Any], dict[str, Any]]] = {
    "adam, domain head, buffers": (make_job(WithDomainHead, STEPS), {}, {}),
    "sgd, sam, clipped": (make_job(WithDomainHead, STEPS, sharpness=SAM(rho=0.1)), SGD_SAM, {"batch_norm": "frozen"}),
    "swad, batch norm": (averaged(make_job(steps=STEPS), VALLEY), {"evaluate_every": 1}, {}),
    "open swad, unfreezing": (averaged(make_job(steps=STEPS), OPEN), {"evaluate_every": 3}, {"unfreeze_at": 2}),
    "bma, unfreezing": (averaged(make_job(steps=STEPS), BMA()), {"evaluate_every": 4}, {"unfreeze_at": 2}),
    "fish, adamw": (make_job(Fish, STEPS, head=Cosine), {"optimizer": "adamw"}, {"unfreeze_at": 3}),
    "mlp, reset": (make_job(partial(IRM, anneal_steps=3), STEPS, head=MLP), {}, {}),
}
VIT = {"width": 64, "steps": STEPS}
ABOVE_A_CUT: dict[str, tuple[Any, Any, Job, dict[str, Any], dict[str, Any]]] = {
    "vit, sam": (vit, blocks(1), make_job(WithDomainHead, sharpness=SAM(rho=0.1), **VIT), {}, {}),
    "vit, lora, dropout, swad": (
        vit, lora(dropout=0.3), averaged(make_job(**VIT), OPEN), {"evaluate_every": 1, "layer_decay": 0.7}, {},
    ),
    "cnn, batch norm": (BlockCNN, blocks(3), make_job(width=16, steps=STEPS), {}, {"unfreeze_at": 2}),
}  # fmt: skip
QUICK = {"domain head, sgd", "bma", "a head that has failed"}
SOAK = {("vit, sam", "images"), ("vit, lora, dropout, swad", "cache"), ("cnn, batch norm", "images")}
SOAK |= {("swad, batch norm", "images"), ("bma, unfreezing", "images")}
Run = Callable[..., list[Trained]]


def runs(case: str, accelerator: Accelerator, folder: Path, reads: str = "images") -> Run:
    """A function that trains, with a checkpoint `kept` and a callback `at` for the steps of evaluations."""
    if case in BANK:
        jobs, changes = BANK[case]
        of_bank = partial(bank_problems.train, jobs, TRAINING.model_copy(update=changes), RULES)
        return lambda kept=None, at=lambda step: None: of_bank(
            checkpoint=kept and (lambda chunk: kept), record=lambda step, heads: at(step)
        )
    if case in LOOP:
        make, (job, changes, arguments) = partial(SmallCNN, dropout=0.3), LOOP[case]
    else:
        make, trainable, job, changes, arguments = ABOVE_A_CUT[case]
        part = cached(make(), trainable, folder) if reads == "cache" else EncoderPart(trainable)
        arguments = arguments | {"part": part}
    training = TRAINING.model_copy(update=changes)
    of_loop = partial(loop_models.train, job, training=training, accelerator=accelerator, rules=RULES, **arguments)
    return lambda kept=None, at=lambda step: None: [
        of_loop(encoder=make(), checkpoint=kept, record=lambda step, models: at(step))
    ]


def marks_of(case: str, reads: str) -> Any:
    if (case, reads) in SOAK:
        return pytest.mark.soak
    return () if case in QUICK and reads == "images" else pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "reads"),
    [
        pytest.param(case, reads, marks=marks_of(case, reads))
        for case in (*BANK, *LOOP, *ABOVE_A_CUT)
        for reads in (("images", "cache") if case in ABOVE_A_CUT else ("images",))
    ],
)
def test_killed_and_begun_again(case: str, reads: str, accelerator: Accelerator, tmp_path: Path) -> None:
    run = runs(case, accelerator, tmp_path, reads)
    expected = run()
    for lives in (1, 3, STEPS) if case in QUICK else (1, 4):  # in a warm-up, between two evaluations, at the end
        path, evaluated = tmp_path / f"{lives}", list[int]()
        with pytest.raises(Killed):
            run(Cut(path, lives))
        assert read(path)[0]["taken"] == lives
        torch.rand(3)
        assert_same(run(Cut(path), evaluated.append), expected)
        assert all(step > lives for step in evaluated), "nothing is done twice"


@pytest.mark.slow
def test_killed_after_every_step_and_the_seconds_add_up(accelerator: Accelerator, tmp_path: Path) -> None:
    run, seconds = runs("swad, batch norm", accelerator, tmp_path), [0.0]
    expected = run()
    for _ in range(STEPS):
        with pytest.raises(Killed):
            run(Cut(tmp_path / "c", 1))
        seconds.append(read(tmp_path / "c")[0]["seconds"])
    resumed = run(Cut(tmp_path / "c", 1))
    assert_same(resumed, expected)
    assert seconds == sorted(seconds) and 0 < resumed[0].seconds - seconds[-1] < expected[0].seconds + 1


CHUNK, MODEL = "xdomainmix and sam", "adam, domain head, buffers"


@pytest.mark.parametrize(
    ("case", "module", "asked_before", "line", "saved"),
    [
        (CHUNK, "bank.train", 2, "3 models together: 3 of 6 steps", {"taken": 3}),
        *(
            pytest.param(MODEL, module, 3, line, {"taken": taken, "evaluated": False}, marks=pytest.mark.slow)
            for module, line, taken in (
                ("end_to_end.gradients", "seed 3: 4 of 6", 4),
                ("end_to_end.prediction", "seed 3: 2 of 6", 2),
            )
        ),
    ],
)
def test_a_stop_saves_and_loses_nothing(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, module: str,
    asked_before: int, line: str, saved: dict[str, Any],
) -> None:  # fmt: skip
    run, asked = runs(case, accelerator, tmp_path), list[int]()
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=line):
        stop = lambda: asked.append(1) or len(asked) > asked_before  # noqa: E731
        patch.setattr(f"xdm_ft.training.{module}.stop_requested", stop)
        run(Cut(tmp_path / "c"))
    assert saved.items() <= read(tmp_path / "c")[0].items()
    assert_same(run(Cut(tmp_path / "c")), run())


# --- checkpoints of something else


@pytest.mark.slow
@pytest.mark.parametrize("other", ["data", "setting", "below the cut"])
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
    if other == "below the cut":
        with torch.no_grad():
            encoder.stem[0].weight.mul_(1.1)
    recipe = {"lr": 2 if other == "setting" else 1}
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        resumed = train(job, encoder, checkpoint=Cut(tmp_path / "c", recipe=recipe))
    assert_same([resumed], [train(job, encoder)])
    key = {"data": "data", "setting": "recipe.lr was 1, is 2"}.get(other, "weights")
    [message] = [line for line in caplog.messages if "checkpoint" in line or "settings" in line]
    assert f"written for other settings ({key}" in message and "starts again" in message
    assert len(resumed.restarts) == 1 and key in resumed.restarts[0]


def test_a_chunk_on_other_images_starts_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(ERM, steps=STEPS)
    with pytest.raises(Killed):
        bank_problems.train([job], TRAINING, checkpoint=lambda chunk: Cut(tmp_path / "c", 5))
    fewer = {"train_val": job.split.evaluation["train_val"][1:]}
    split = dataclasses.replace(job.split, evaluation=job.split.evaluation | fewer)
    job = dataclasses.replace(job, split=split)
    resumed = bank_problems.train([job], TRAINING, checkpoint=lambda chunk: Cut(tmp_path / "c"))
    assert "written for other settings (data was" in caplog.text
    assert_same(resumed, bank_problems.train([job], TRAINING))
