"""A chunk of heads, left at any step and begun again from its checkpoint, ends as if nothing had been."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from bank_problems import WithDomainHead, job_of, train
from cut_short import Cut, Killed, assert_same

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
from xdm_ft.storage.checkpoint import read
from xdm_ft.training import Job, Schedule, Training

STEPS = 10


TRAINING = Training(batch_size=8, evaluate_every=4, schedule=Schedule(name="cosine", warmup_steps=2))
SGD = TRAINING.model_copy(update={"optimizer": "sgd"})


def averaged(jobs: list[Job], averaging: Averaging) -> list[Job]:
    return [dataclasses.replace(job, averaging=averaging) for job in jobs]


def mixing(lr: float = 0.01, **settings: object) -> list[Job]:
    more = {"steps": STEPS, "warmup_steps": 3, "quantile_steps": 2, **settings}
    return [job_of(XDomainMix, seed=seed, lr=lr * (1 + seed), sharpness=SAM(rho=0.05), **more) for seed in range(3)]


SMALL_MLP = partial(MLP, hidden_width=16)
EVERY_STEP = TRAINING.model_copy(update={"evaluate_every": 1})
CASES = {
    "xdomainmix and sam": (mixing(), TRAINING),
    "domain head": ([job_of(WithDomainHead, seed=seed, steps=STEPS) for seed in range(2)], SGD),
    "groupdro": ([job_of(GroupDRO, steps=STEPS)], TRAINING.model_copy(update={"optimizer": "adamw", "amsgrad": True})),
    "cosine": (mixing(setup={"head": Cosine}), TRAINING),
    "mlp, swad": (
        averaged(mixing(lr=1e-3, setup={"head": SMALL_MLP}), SWAD(n_converge=2, n_tolerance=2, tolerance_ratio=0.0)),
        EVERY_STEP,
    ),
    "optimizer that is reset": ([job_of(IRM, steps=STEPS, anneal_steps=5)], TRAINING),
    "swad": (averaged(mixing(), SWAD(n_converge=2, n_tolerance=2, tolerance_ratio=0.0)), EVERY_STEP),
    "swad between evaluations": (averaged(mixing(), SWAD(n_converge=1, tolerance_ratio=100.0)), TRAINING),
    "bma": (averaged(mixing(), BMA()), TRAINING),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_and_begun_again(tmp_path: Path, case: str) -> None:
    jobs, training = CASES[case]
    rules = ("train_val", "oracle")
    expected = train(jobs, training, rules)
    for lives in (1, 4, 7, STEPS):  # within the warm-up, at an evaluation, between two, at the end
        path, evaluated = tmp_path / f"{lives}", []
        with pytest.raises(Killed):
            train(jobs, training, rules, checkpoint=lambda chunk, path=path, lives=lives: Cut(path, lives))
        assert read(path)[0]["taken"] == lives
        again = train(
            jobs, training, rules, checkpoint=lambda chunk, path=path: Cut(path),
            record=lambda step, heads, evaluated=evaluated: evaluated.extend([step] * len(heads)),
        )  # fmt: skip
        assert all(step > lives for step in evaluated), "nothing is done twice"
        for got, other in zip(again, expected, strict=True):
            assert_same(got, other)
        assert not path.exists(), "a chunk that is done leaves nothing"


def test_a_head_that_has_failed_stays_failed_and_the_others_go_on(tmp_path: Path) -> None:
    jobs = [job_of(seed=0, steps=STEPS), job_of(seed=1, steps=STEPS, lr=float("inf"))]
    expected = train(jobs, SGD)
    assert expected[1].failure is not None
    with pytest.raises(Killed):
        train(jobs, SGD, checkpoint=lambda chunk: Cut(tmp_path / "c", 7))
    got = train(jobs, SGD, checkpoint=lambda chunk: Cut(tmp_path / "c"))
    assert_same(got[0], expected[0])
    assert got[1].failure == expected[1].failure and got[1].selected == {}


def test_a_stop_saves_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, training = CASES["xdomainmix and sam"]
    expected, asked = train(jobs, training), []
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="3 models together: 6 of 10 steps"):
        patch.setattr("xdm_ft.training.bank.train.stop_requested", lambda: asked.append(1) or len(asked) == 6)
        train(jobs, training, checkpoint=lambda chunk: Cut(tmp_path / "c"))
    for got, other in zip(train(jobs, training, checkpoint=lambda chunk: Cut(tmp_path / "c")), expected, strict=True):
        assert_same(got, other)


def test_other_features_start_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs, training = CASES["groupdro"]
    with pytest.raises(Killed):
        train(jobs, training, checkpoint=lambda chunk: Cut(tmp_path / "c", 5))
    torch.manual_seed(0)
    jobs = [dataclasses.replace(job, split=dataclasses.replace(job.split, evaluation=job.split.evaluation | {
        "train_val": job.split.evaluation["train_val"][1:]})) for job in jobs]  # fmt: skip
    got = train(jobs, training, checkpoint=lambda chunk: Cut(tmp_path / "c"))
    assert "written for other settings (data was" in caplog.text
    assert_same(got[0], train(jobs, training)[0])
