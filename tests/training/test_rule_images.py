"""The value that a rule compares: the mean over the training domains on `train_val`, all images together elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, get_args

import bank_problems
import loop_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from bank_problems import DOMAINS, digits, head_logits, job_of, split_of
from loop_models import SmallCNN, make_job, one_process
from torch import Tensor

from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.averaging.swad import SWAD
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.protocol.splits import Metric, Split
from xdm_ft.runtime.tensors import Annotations, Criteria
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.averages import Averages
from xdm_ft.training.bank.data import CachedData
from xdm_ft.training.end_to_end.prediction import predict
from xdm_ft.training.selection import rule_images, undefined_domains
from xdm_ft.training.solvers import solve

METRICS = get_args(Metric)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


def naive(name: str, logits: Tensor, labels: Tensor, domains: Tensor) -> float:
    """DomainBed's average of `env{i}_out_acc`, for any metric that is defined in every domain."""
    if name == "worst_domain_accuracy":
        return metric_of(name, logits, labels, domains)
    values = []
    for domain in domains.unique():
        own = domains == domain
        values.append(metric_of(name, logits[own], labels[own], domains[own]))
    return float(np.mean(values))


def uneven(held_out: int) -> Split:
    """Domains with very different numbers of validation images."""
    split, domains = split_of(held_out, 0), digits().annotations.domains
    rows = split.evaluation["train_val"]
    few = torch.cat([rows[domains[rows] == d][: 70 // (1 + 3 * d)] for d in range(DOMAINS)])
    return dataclasses.replace(split, evaluation={**split.evaluation, "train_val": few})


@pytest.mark.parametrize("name", METRICS)
def test_the_mean_over_domains_by_hand(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(60, 3, generator=generator), torch.arange(60) % 3
    domains = torch.tensor([5] * 9 + [2] * 40 + [0] * 11)
    rows = torch.randperm(60, generator=generator)
    images = rule_images("train_val", rows, Annotations(labels, domains, domains), name, 3)
    assert images.value(logits[rows]) == pytest.approx(naive(name, logits, labels, domains), abs=1e-12)
    pooled = rule_images("val_domain", rows, Annotations(labels, domains, domains), name, 3).value(logits[rows])
    assert pooled == pytest.approx(metric_of(name, logits, labels, domains), abs=1e-12)
    assert name == "worst_domain_accuracy" or abs(images.value(logits[rows]) - pooled) > 1e-4


def test_one_training_domain_is_its_own_mean() -> None:
    labels, domains = torch.tensor([0, 1, 1, 0]), torch.tensor([2, 2, 2, 2])
    logits, rows = torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 0]]), torch.arange(4)
    for name in METRICS:
        value = rule_images("train_val", rows, Annotations(labels, domains, domains), name, 2).value(logits)
        assert value == metric_of(name, logits, labels, domains), name


def test_equal_steps_are_equal_in_any_order_of_domains() -> None:
    """7/10, 1/10, 2/10 and their permutations: float sums differ by their order, the value must not."""
    domains = torch.arange(30) // 10
    images = rule_images(
        "train_val", torch.arange(30), Annotations(torch.zeros(30).long(), domains, domains), "accuracy", 2
    )
    values = set()
    for right in ((7, 1, 2), (1, 7, 2), (2, 1, 7), (1, 2, 7)):
        wrong = torch.cat([torch.arange(10) >= n for n in right])
        values.add(images.value(F.one_hot(wrong.long(), 2).float()))
    assert len(values) == 1


def test_domains_where_the_metric_is_not_defined_are_left_out_at_every_step() -> None:
    labels, domains = torch.tensor([0, 1, 0, 1, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    rows = torch.arange(8)
    assert undefined_domains(rows, Annotations(labels, domains, domains), "auroc", 2) == [1]
    assert undefined_domains(rows, Annotations(labels, domains, domains), "accuracy", 2) == []
    images = rule_images("train_val", rows, Annotations(labels, domains, domains), "auroc", 2)
    for seed in range(3):
        logits = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed))
        kept = domains != 1
        assert images.value(logits) == pytest.approx(naive("auroc", logits[kept], labels[kept], domains[kept]))
    nowhere = rule_images("train_val", rows[4:6], Annotations(labels, domains, domains), "auroc", 2)
    assert math.isnan(nowhere.value(torch.randn(2, 2)))


def of_train_val(trained: Trained, data: CachedData, name: str) -> float:
    rows = trained.job.split.evaluation["train_val"]
    logits = head_logits(data.features, rows, trained.selected["train_val"].state)
    return naive(name, logits, data.annotations.labels[rows], data.annotations.domains[rows])


@pytest.mark.parametrize("name", METRICS)
def test_the_bank_selects_by_the_mean_over_domains(name: str) -> None:
    jobs = [job_of(held_out=h, steps=40, lr=0.05, split=uneven(h)) for h in range(2)]
    for trained in bank_problems.train(jobs, Training(batch_size=8, evaluate_every=8), metric=name):
        selected, course = trained.selected["train_val"], trained.course["train_val"]
        best = (min if name in ("nll", "ece") else max)(course.values())
        assert selected.value == best == course[selected.step]
        assert selected.step == next(step for step, value in course.items() if value == best)
        assert of_train_val(trained, digits(), name) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("name", ["accuracy", "nll"])
def test_a_solver_selects_by_the_mean_over_domains(name: str) -> None:
    data, job = digits(), job_of(LinearProbe, strengths=(10.0, 0.1, 1e-3), split=uneven(0))
    trained = solve(job, data.features, data.annotations, Criteria(("train_val",), name))
    selected = trained.selected["train_val"]
    assert selected.value == trained.course["train_val"][selected.step]
    assert selected.value == pytest.approx(of_train_val(trained, data, name), abs=1e-6)


def lopsided(job: Job) -> Job:
    """One domain with a quarter of the others' validation images."""
    rows = job.split.evaluation["train_val"]
    few = torch.cat([rows[: loop_models.VAL_ROWS // 4], rows[loop_models.VAL_ROWS :]])
    split = dataclasses.replace(job.split, evaluation={**job.split.evaluation, "train_val": few})
    return dataclasses.replace(job, split=split)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy", "nll"])
def test_the_loop_selects_by_the_mean_over_domains(name: str, accelerator: Accelerator) -> None:
    training, dataset = Training(batch_size=4, evaluate_every=2), loop_models.digits()
    trained = loop_models.train(lopsided(make_job(steps=4)), SmallCNN(), training, accelerator, metric=name)
    selected, rows = trained.selected["train_val"], trained.job.split.evaluation["train_val"]
    logits = predict(trained.job, SmallCNN(), selected.state, dataset, rows, accelerator, 8)
    labels, domains = (torch.from_numpy(values)[rows] for values in (dataset.labels, dataset.domains))
    assert selected.value == trained.course["train_val"][selected.step]
    assert selected.value == pytest.approx(naive(name, logits, labels, domains), abs=1e-6)


def losses_seen(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    seen: list[float | None] = []
    evaluated = Averages.evaluated

    def watched(self: Averages, taken: int, losses: list[float | None], **more: Any) -> None:
        seen.extend(losses)
        evaluated(self, taken, losses, **more)

    monkeypatch.setattr(Averages, "evaluated", watched)
    return seen


@pytest.mark.slow
def test_swad_looks_at_the_mean_loss_over_domains(monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator) -> None:
    seen = losses_seen(monkeypatch)
    job = dataclasses.replace(job_of(steps=8, split=uneven(0)), averaging=SWAD(n_converge=1))
    (plain,) = bank_problems.train(
        [dataclasses.replace(job, averaging=None)], Training(batch_size=8, evaluate_every=8), metric="nll"
    )
    bank_problems.train([job], Training(batch_size=8, evaluate_every=8))
    assert seen == pytest.approx([of_train_val(plain, digits(), "nll")], abs=1e-6)

    seen.clear()
    training, lop = Training(batch_size=4, evaluate_every=3), lopsided(make_job(steps=3))
    alone = loop_models.train(lop, SmallCNN(), training, accelerator, metric="nll")
    loop_models.train(dataclasses.replace(lop, averaging=SWAD(n_converge=1)), SmallCNN(), training, accelerator)
    assert seen == pytest.approx([alone.selected["train_val"].value], abs=1e-6)
