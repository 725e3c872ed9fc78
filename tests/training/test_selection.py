"""Which step is kept: the value that a rule compares, its selector, the schedule and class weights."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import bank_problems
import loop_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from bank_problems import DOMAINS, digits, head_logits, job_of, split_of
from loop_models import SmallCNN, make_job, predict
from torch import Tensor

from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.averaging.swad import SWAD
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.protocol.splits import Metric, Split
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Annotations, Criteria
from xdm_ft.training import Job, Schedule, Trained, Training, balanced_class_weight
from xdm_ft.training.bank.data import CachedData
from xdm_ft.training.bank.train import solve
from xdm_ft.training.selection import (
    Averages,
    RuleImages,
    Selector,
    defined_domains,
    evaluation_steps,
    external_values,
    rows_of_rules,
)


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(step)}


@pytest.mark.parametrize(
    ("values", "metric", "first_step", "best"),
    [
        ([0.1, 0.5, 0.4, 0.5], "accuracy", 1, 2),  # the first of equals
        ([0.9, 0.2, 0.3, 0.2], "nll", 1, 2),
        ([0.9, 0.9, 0.1, 0.2], "accuracy", 3, 4),  # not in the warm-up
        ([math.nan, 0.2, math.nan], "auroc", 1, 2),
    ],
)
def test_the_best_step_is_selected(values: list[float], metric: str, first_step: int, best: int) -> None:
    selector = Selector(Criteria(("train_val",), metric), first_step)
    for step, value in enumerate(values, start=1):
        selector.offer(step, {"train_val": value}, lambda step=step: state_of(step))
    selected = selector.selected["train_val"]
    assert int(selected.state["step"]) == selected.step == best
    assert [*selector.course["train_val"]] == [*range(1, len(values) + 1)], "steps of a warm-up are measured too"


def test_rules_select_apart_and_a_state_is_made_only_where_needed() -> None:
    made = []

    def state(step: int) -> dict[str, torch.Tensor]:
        made.append(step)
        return state_of(step)

    selector = Selector(Criteria(("train_val", "oracle"), "accuracy"))
    for step, (val, oracle) in enumerate([(0.5, 0.5), (0.4, 0.6), (0.3, 0.2)], start=1):
        selector.offer(step, {"train_val": val, "oracle": oracle}, lambda step=step: state(step), {"l2": step})
    assert {rule: picked.step for rule, picked in selector.selected.items()} == {"train_val": 1, "oracle": 2}
    assert selector.selected["oracle"].hparams == {"l2": 2}
    assert made == [1, 2]
    assert selector.failure() is None


def test_of_tied_steps_oracle_takes_the_one_that_the_other_rule_picks() -> None:
    values = [(0.5, 0.6), (0.4, 0.9), (0.7, 0.9), (0.6, 0.9), (0.8, 0.8), (0.7, 0.9)]

    def steps(rules: tuple[str, ...], upto: int, metric: str = "accuracy") -> dict[str, int]:
        sign = -1 if metric == "nll" else 1
        selector = Selector(Criteria(rules, metric))
        for step, (val, oracle) in enumerate(values[:upto], start=1):
            offered = {"train_val": sign * val, "oracle": sign * oracle}
            selector.offer(step, {rule: offered[rule] for rule in rules}, lambda step=step: state_of(step))
        assert all(int(picked.state["step"]) == picked.step for picked in selector.selected.values())
        return {rule: picked.step for rule, picked in selector.selected.items()}

    for rules in (("train_val", "oracle"), ("oracle", "train_val")):
        for metric in ("accuracy", "nll"):
            assert steps(rules, 4, metric) == {"train_val": 3, "oracle": 3}, "steps 2, 3 and 4 are equal for oracle"
        assert steps(rules, 6) == {"train_val": 5, "oracle": 3}, "step 5 is no tie: oracle stays"
    assert steps(("oracle",), 6) == {"oracle": 2}, "without another rule the first"


def test_a_tie_that_oracle_follows_resets_no_patience() -> None:
    selector = Selector(Criteria(("oracle", "train_val"), "accuracy"), patience=2)
    for step, val in ((1, 0.5), (2, 0.6), (3, 0.7)):
        selector.offer(step, {"oracle": 0.9, "train_val": val}, lambda step=step: state_of(step))
    assert selector.selected["oracle"].step == 3 and selector.stopped_at == 3


def test_only_the_recipes_own_rule_must_select() -> None:
    selector = Selector(Criteria(("train_val", "oracle"), "auroc"), first_selectable_step=5)
    selector.offer(5, {"train_val": math.nan, "oracle": 0.5}, lambda: state_of(5))
    reason = str(selector.failure())
    assert reason.startswith("train_val could select no step: from step 5 on, auroc was") and "oracle" not in reason
    selector.offer(6, {"train_val": 0.5, "oracle": math.nan}, lambda: state_of(6))
    assert selector.failure() is None and selector.selected["oracle"].step == 5
    resumed = Selector(Criteria(("train_val", "oracle"), "auroc"), first_selectable_step=5)
    resumed.load_state(selector.state())
    resumed.offer(7, {"train_val": 0.6, "oracle": 0.5}, lambda: state_of(7))
    assert resumed.selected["oracle"].step == 7, "a resumed oracle follows the other rule too"


def test_patience_ends_after_so_many_evaluations_without_a_better_value() -> None:
    selector = Selector(Criteria(("train_val", "oracle"), "accuracy"), first_selectable_step=2, patience=2)
    for step, value in ((1, 0.9), (2, 0.5), (3, 0.4), (4, 0.6), (5, 0.6)):
        selector.offer(step, {"train_val": value, "oracle": step / 10}, lambda step=step: state_of(step))
        assert selector.stopped_at is None
    selector.offer(6, {"train_val": math.nan, "oracle": 0.9}, lambda: state_of(6))
    assert selector.stopped_at == 6 and selector.selected["train_val"].step == 4


def test_values_known_beforehand_look_at_no_rows() -> None:
    job = dataclasses.replace(job_of(), external_values={"cross_domain": {1: 0.5, 3: 0.7}})
    assert set(rows_of_rules(job, ["cross_domain", "oracle"])) == {"oracle"}
    assert external_values(job, 3) == {"cross_domain": 0.7}
    assert math.isnan(external_values(job, 2)["cross_domain"])


@pytest.mark.parametrize(
    "steps, every, expected",
    [
        (10, 4, [4, 8, 10]),
        (8, 4, [4, 8]),
        (3, 100, [3]),
        (1, None, [1]),
        (100, None, [*range(5, 101, 5)]),
        (30, None, [*range(1, 31)]),
    ],
)
def test_evaluation_steps(steps: int, every: int | None, expected: list[int]) -> None:
    assert evaluation_steps(steps, every) == expected


def test_a_rule_without_images_is_refused() -> None:
    job = job_of()
    assert rows_of_rules(job, ["oracle"])["oracle"] is job.split.evaluation["test_val"]
    with pytest.raises(UserError, match=r"protocol\.selection: \"val_domain\" needs images.*d0 is held out"):
        rows_of_rules(job, ["train_val", "val_domain"])


METRICS = get_args(Metric)


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
    images = RuleImages("train_val", rows, Annotations(labels, domains, domains), name, 3)
    assert images.value(logits[rows]) == pytest.approx(naive(name, logits, labels, domains), abs=1e-12)
    pooled = RuleImages("val_domain", rows, Annotations(labels, domains, domains), name, 3).value(logits[rows])
    assert pooled == pytest.approx(metric_of(name, logits, labels, domains), abs=1e-12)
    assert name == "worst_domain_accuracy" or abs(images.value(logits[rows]) - pooled) > 1e-4


def test_equal_steps_are_equal_in_any_order_of_domains() -> None:
    """1/10, 2/10, 3/10 and their permutations: float sums differ by their order, the value must not."""
    domains = torch.arange(30) // 10
    images = RuleImages(
        "train_val", torch.arange(30), Annotations(torch.zeros(30).long(), domains, domains), "accuracy", 2
    )
    values = set()
    for right in ((1, 2, 3), (3, 2, 1), (2, 3, 1), (3, 1, 2)):
        wrong = torch.cat([torch.arange(10) >= n for n in right])
        values.add(images.value(F.one_hot(wrong.long(), 2).float()))
    assert len(values) == 1


def test_domains_where_the_metric_is_not_defined_are_left_out_at_every_step() -> None:
    labels, domains = torch.tensor([0, 1, 0, 1, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    rows = torch.arange(8)
    assert defined_domains(rows, Annotations(labels, domains, domains), "auroc", 2)[1] == [1]
    assert defined_domains(rows, Annotations(labels, domains, domains), "accuracy", 2)[1] == []
    images = RuleImages("train_val", rows, Annotations(labels, domains, domains), "auroc", 2)
    for seed in range(3):
        logits = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed))
        kept = domains != 1
        assert images.value(logits) == pytest.approx(naive("auroc", logits[kept], labels[kept], domains[kept]))
    nowhere = RuleImages("train_val", rows[4:6], Annotations(labels, domains, domains), "auroc", 2)
    assert math.isnan(nowhere.value(torch.randn(2, 2)))


def of_train_val(trained: Trained, data: CachedData, name: str) -> float:
    rows = trained.job.split.evaluation["train_val"]
    logits = head_logits(data.features, rows, trained.selected["train_val"].state)
    return naive(name, logits, data.annotations.labels[rows], data.annotations.domains[rows])


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

    def watched(self: Averages, taken: int, losses: list[float | None], *more: Any) -> None:
        seen.extend(losses)
        evaluated(self, taken, losses, *more)

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


def test_balanced_by_hand() -> None:
    labels = torch.tensor([0, 0, 0, 0, 2, 2, 3, 0])  # n = 8, three classes of five
    expected = torch.tensor([8 / (3 * 5), 0.0, 8 / (3 * 2), 8 / (3 * 1), 0.0])
    torch.testing.assert_close(balanced_class_weight(labels, 5), expected)
    assert balanced_class_weight(labels, 5).dtype == torch.float32


def course(steps: int, **settings: object) -> list[float]:
    return [Schedule(**settings).factor(step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0, 1.0, 1.0]),
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"name": "cosine"}, [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
        ({"name": "cosine", "warmup_steps": 2}, [1 / 3, 2 / 3, 1.0, 0.5]),
    ],
)
def test_schedules_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    assert course(len(expected), **settings) == pytest.approx(expected)
