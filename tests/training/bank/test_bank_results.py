"""What the bank hands back: selected steps, records, failures of single heads."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from bank_problems import CLASSES, WithDomainHead, digits, head_logits, job_of, split_of, train
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.features.cache import Features
from xdm_ft.protocol.samplers import PerDomainSampler
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.training import Job, Schedule, Training
from xdm_ft.training.bank.data import CachedData
from xdm_ft.training.bank.validation import BankValidation
from xdm_ft.training.selection import rule_images

Records = list[tuple[Job, int, dict[str, float]]]


class Counting(Algorithm):
    """Its loss is the number of the step, its weights stay; it logs at odd steps only."""

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        total = self.head.weight.sum() * 0 + step
        return Losses(total, total.new_zeros(()), logs={"odd": torch.tensor(float(step))} if step % 2 else {})


def recorded(jobs: list[Job], training: Training, **arguments: object) -> Records:
    records: Records = []
    train(
        jobs,
        training,
        record=lambda step, heads: records.extend((job, step, values) for job, values in heads),
        **arguments,
    )
    return records


def test_records_hold_the_means_since_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xdm_ft.training.state.READ_STEPS", 3)  # losses are read in more than one block
    training = Training(batch_size=2, evaluate_every=4, schedule=Schedule(warmup_steps=9))
    jobs = [job_of(Counting, seed=seed, steps=10, lr=seed + 1.0) for seed in range(2)]
    records = recorded(jobs, training)
    assert [(job.seed, step) for job, step, _ in records] == [(0, 4), (1, 4), (0, 8), (1, 8), (0, 10), (1, 10)]
    of_second = [values for job, _, values in records if job.seed == 1]
    assert [values["loss"] for values in of_second] == [1.5, 5.5, 8.5]
    assert [values["odd"] for values in of_second] == [2.0, 6.0, 9.0]
    assert [values["lr"] for values in of_second] == pytest.approx([2 * 0.4, 2 * 0.8, 2.0])
    assert all("auxiliary_loss" not in values for values in of_second)


def test_records_hold_the_auxiliary_loss_and_the_metric_of_every_rule() -> None:
    rules = ["train_val", "oracle"]
    records = recorded([job_of(WithDomainHead, steps=5)], Training(batch_size=2, evaluate_every=5), rules=rules)
    ((_, _, values),) = records
    assert values.keys() == {"loss", "auxiliary_loss", "count", "lr", "train_val/accuracy", "oracle/accuracy"}


@pytest.mark.parametrize("name", ["accuracy", "nll", "worst_domain_accuracy"])
def test_the_selected_state_has_the_best_recorded_metric(name: str) -> None:
    """Heads that look at different rows: each one's value is that of its own weights on its own rows."""
    jobs = [job_of(held_out=h, seed=h, steps=40, lr=0.05) for h in range(3)]
    records: Records = []
    results = train(
        jobs,
        Training(batch_size=8, evaluate_every=3),
        rules=["train_val", "oracle"],
        metric=name,
        record=lambda step, heads: records.extend((job, step, values) for job, values in heads),
    )
    data = digits()
    for job, trained in zip(jobs, results, strict=True):
        for rule, split in (("train_val", "train_val"), ("oracle", "test_val")):
            course = [(step, values[f"{rule}/{name}"]) for of, step, values in records if of.key == job.key]
            best = (min if name == "nll" else max)(value for _, value in course)
            selected = trained.selected[rule]
            equal = [step for step, value in course if value == best]
            assert selected.step in equal and (selected.step == equal[0] or rule == "oracle")
            rows = job.split.evaluation[split]
            logits = head_logits(data.features, rows, selected.state)
            images = rule_images(split, rows, data.annotations, name, CLASSES)
            assert selected.value == best
            assert images.value(logits) == pytest.approx(best, abs=1e-6)


def test_oracle_follows_where_its_steps_are_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = BankValidation.values

    def tied(self: BankValidation, *arguments: Any) -> list[dict[str, float] | None]:
        return [of_head and of_head | {"oracle": 1.0} for of_head in measured(self, *arguments)]

    monkeypatch.setattr(BankValidation, "values", tied)
    jobs = [job_of(seed=seed, steps=12, lr=0.05) for seed in range(2)]
    for trained in train(jobs, Training(evaluate_every=3), rules=["train_val", "oracle"], metric="nll"):
        own, oracle = trained.selected["train_val"], trained.selected["oracle"]
        assert own.step > 3, "the loss falls"
        assert oracle.step == own.step and oracle.state is own.state
        torch.testing.assert_close(oracle.state["head.weight"], own.state["head.weight"], rtol=0, atol=0)


def test_xdomainmix_never_selects_its_warm_up() -> None:
    steps = 40
    (trained,) = train([job_of(XDomainMix, steps=steps, lr=0.3, warmup_steps=38)], Training(evaluate_every=1))
    assert trained.selected["train_val"].step in (39, 40)
    assert trained.mixed_steps == 2
    assert train([job_of(steps=4)])[0].mixed_steps is None


def test_mixed_steps_are_those_taken_where_patience_ends_a_head() -> None:
    jobs = [job_of(XDomainMix, seed=seed, steps=60, lr=lr, warmup_steps=5) for seed, lr in ((0, 0.0), (1, 0.01))]
    results = train(jobs, Training(batch_size=8, evaluate_every=1, patience=2), metric="nll")
    assert results[0].stopped_at == 8, "its first selectable step is 6, and none after it is better"
    stops = [trained.stopped_at or 60 for trained in results]
    assert stops[1] > 8 and [trained.mixed_steps for trained in results] == [stop - 5 for stop in stops]


def test_a_state_is_whole_and_on_the_cpu() -> None:
    (trained,) = train([job_of(WithDomainHead, steps=6)], Training(batch_size=4, evaluate_every=6))
    state = trained.selected["train_val"].state
    assert state.keys() == {"head.weight", "head.bias", "domain_head.weight", "domain_head.bias", "seed", "count"}
    assert float(state["count"]) == 6
    assert all(value.device.type == "cpu" and not value.requires_grad for value in state.values())


def spoiled(row: int) -> CachedData:
    """Digits with one image whose features are not numbers."""
    data = digits()
    z = data.features[torch.arange(len(data.annotations.labels))].clone()
    z[row] = math.nan
    return CachedData(Features([z]), data.annotations)


def test_a_broken_head_fails_alone_and_names_its_step_and_rows() -> None:
    jobs = [job_of(held_out=h, steps=60) for h in (0, 1)]
    row = int(jobs[1].split.train[0][5])  # of domain 0: trains head 1 and is held out of head 0
    sound, broken = train(jobs, data=spoiled(row))
    assert sound.failure is None
    (expected,) = train([jobs[0]], data=digits())
    for name, value in expected.selected["train_val"].state.items():
        torch.testing.assert_close(sound.selected["train_val"].state[name], value, rtol=1e-4, atol=1e-5)

    assert broken.selected == {}
    assert broken.failure is not None
    found = re.fullmatch(r"the loss was not finite at step (\d+) of 60; rows of its batch: (.*)", broken.failure)
    assert found is not None
    rows = [int(word) for word in found[2].split(", ")]
    batches = PerDomainSampler(jobs[1].split.train, 8, jobs[1].seed).indices(0, 60)
    first = next(number for number, of_step in enumerate(batches) if (of_step == row).any())
    assert int(found[1]) == first + 1
    assert rows == batches[first].tolist() and row in rows


def test_a_head_whose_validation_logits_are_not_finite_fails() -> None:
    job = job_of(steps=10)
    (trained,) = train([job], data=spoiled(int(job.split.evaluation["train_val"][3])))
    assert trained.selected == {}
    assert trained.failure == "the logits of the validation images were not finite after step 1 of 10"


def test_all_heads_broken_ends_the_training() -> None:
    class Diverging(ERM):
        def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
            assert step < 2, "nothing is left to train"
            return Losses(self.head.weight.sum() * math.inf, torch.zeros(()))

    trained = train([job_of(Diverging, seed=s, steps=50) for s in range(3)], Training(evaluate_every=2))
    assert all(t.failure is not None and "step 1 of 50" in t.failure for t in trained)


def test_an_undefined_metric_is_a_failure_with_its_reason() -> None:
    split = split_of(0, 0)
    rows = split.evaluation["train_val"]
    split.evaluation["train_val"] = rows[digits().annotations.labels[rows] == 4]  # auroc needs a second class
    (trained,) = train([job_of(split=split, steps=5)], metric="auroc")
    assert trained.selected == {}
    assert trained.failure is not None and "auroc" in trained.failure
