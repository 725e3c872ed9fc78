"""Which weights are kept: the value that a rule compares, its selector, averages, the schedule and class weights."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

import bank_problems
import loop_models
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from bank_problems import DOMAINS, digits, head_logits, job_of, split_of, under
from loop_models import SmallCNN, batch_of, make_job, predict
from torch import Tensor

from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.averaging import Segment
from xdm_ft.averaging.bma import BMA
from xdm_ft.averaging.swad import SWAD
from xdm_ft.core import Annotations, Criteria
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.protocol.splits import Metric, Split
from xdm_ft.runtime.errors import UserError
from xdm_ft.training import Job, Schedule, Selected, Trained, Training, balanced_class_weight
from xdm_ft.training.bank.data import batches
from xdm_ft.training.bank.step import Bank
from xdm_ft.training.bank.step import step as take_step
from xdm_ft.training.bank.train import chunks, solve
from xdm_ft.training.selection import (
    LOSS_SPLIT,
    Averages,
    RuleImages,
    Selector,
    defined_domains,
    evaluation_steps,
    external_values,
    rows_of_rules,
)

VAL, ORACLE = "train_val", "oracle"
NAN = math.nan


# --- the selector


def offer(selector: Selector, *values: tuple[float, ...], first: int = 1) -> Selector:
    """Offers a value of each rule after the steps `first`, first + 1, …"""
    for step, of_rules in enumerate(values, start=first):
        of_step = dict(zip(selector.rules, of_rules, strict=True))
        selector.offer(step, of_step, lambda step=step: {"step": torch.tensor(step)})
    assert all(int(picked.state["step"]) == picked.step for picked in selector.selected.values())
    return selector


TIED = [(0.5, 0.6), (0.4, 0.9), (0.7, 0.9), (0.6, 0.9), (0.8, 0.8), (0.7, 0.9)]


@pytest.mark.parametrize(
    ("rules", "metric", "first", "values", "picked"),
    [
        ((VAL,), "accuracy", 1, [(0.1,), (0.5,), (0.4,), (0.5,)], (2,)),  # the first of equals
        ((VAL,), "nll", 1, [(0.9,), (0.2,), (0.3,), (0.2,)], (2,)),
        ((VAL,), "accuracy", 3, [(0.9,), (0.9,), (0.1,), (0.2,)], (4,)),  # not in the warm-up
        ((VAL,), "auroc", 1, [(NAN,), (0.2,), (NAN,)], (2,)),
        ((VAL, ORACLE), "accuracy", 1, [(0.5, 0.5), (0.4, 0.6), (0.3, 0.2)], (1, 2)),
        # of tied steps oracle takes the one that the other rule picks: 2, 3 and 4 are equal for it
        ((VAL, ORACLE), "accuracy", 1, TIED[:4], (3, 3)),
        ((VAL, ORACLE), "nll", 1, [(-val, -oracle) for val, oracle in TIED[:4]], (3, 3)),
        ((ORACLE, VAL), "accuracy", 1, [(oracle, val) for val, oracle in TIED[:4]], (3, 3)),
        ((VAL, ORACLE), "accuracy", 1, TIED, (5, 3)),  # step 5 is no tie: oracle stays
        ((ORACLE,), "accuracy", 1, [(oracle,) for _, oracle in TIED], (2,)),  # without another rule the first
    ],
)
def test_the_best_step_is_selected(
    rules: tuple[str, ...], metric: str, first: int, values: list[tuple[float, ...]], picked: tuple[int, ...]
) -> None:
    selector = offer(Selector(Criteria(rules, metric), first), *values)
    assert [selector.selected[rule].step for rule in rules] == list(picked) and selector.failure() is None
    steps = [*range(1, len(values) + 1)]
    assert all([*course] == steps for course in selector.course.values()), "steps of a warm-up are measured too"


def test_a_state_is_made_only_where_needed() -> None:
    selector, made = Selector(Criteria((VAL, ORACLE), "accuracy")), list[int]()
    for step, (val, oracle) in enumerate([(0.5, 0.5), (0.4, 0.6), (0.3, 0.2)], start=1):
        selector.offer(step, {VAL: val, ORACLE: oracle}, lambda step=step: made.append(step) or {}, {"l2": step})
    assert made == [1, 2] and selector.selected[ORACLE].hparams == {"l2": 2}


def test_only_the_recipes_own_rule_must_select() -> None:
    selector, resumed = (Selector(Criteria((VAL, ORACLE), "auroc"), first_selectable_step=5) for _ in range(2))
    offer(selector, (NAN, 0.5), first=5)
    reason = str(selector.failure())
    assert (
        reason.startswith("train_val could not select a step: from step 5 on, every evaluation had an undefined auroc")
        and ORACLE not in reason
    )
    offer(selector, (0.5, NAN), first=6)
    assert selector.failure() is None and selector.selected[ORACLE].step == 5
    resumed.load_state(selector.state())
    offer(resumed, (0.6, 0.5), first=7)
    assert resumed.selected[ORACLE].step == 7, "a resumed oracle follows the other rule too"


def test_patience_ends_after_so_many_evaluations_without_a_better_value() -> None:
    selector = Selector(Criteria((VAL, ORACLE), "accuracy"), first_selectable_step=2, patience=2)
    offer(selector, *((val, step / 10) for step, val in enumerate((0.9, 0.5, 0.4, 0.6, 0.6), start=1)))
    assert selector.stopped_at is None
    offer(selector, (NAN, 0.9), first=6)
    assert selector.stopped_at == 6 and selector.selected[VAL].step == 4
    # a tie that oracle follows resets no patience
    selector = offer(Selector(Criteria((ORACLE, VAL), "accuracy"), patience=2), (0.9, 0.5), (0.9, 0.6), (0.9, 0.7))
    assert selector.selected[ORACLE].step == selector.stopped_at == 3


def test_values_known_beforehand_look_at_no_rows() -> None:
    job = dataclasses.replace(job_of(), external_values={"cross_domain": {1: 0.5, 3: 0.7}})
    assert set(rows_of_rules(job, ["cross_domain", ORACLE])) == {ORACLE}
    assert external_values(job, 3) == {"cross_domain": 0.7} and math.isnan(external_values(job, 2)["cross_domain"])


def test_a_rule_without_images_is_refused() -> None:
    job = job_of()
    assert rows_of_rules(job, [ORACLE])[ORACLE] is job.split.evaluation["test_val"]
    with pytest.raises(UserError, match=r"protocol\.selection: \"val_domain\" needs images.*d0 is held out"):
        rows_of_rules(job, [VAL, "val_domain"])


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


# --- the value: DomainBed's mean over domains


def naive(name: str, logits: Tensor, labels: Tensor, domains: Tensor) -> float:
    """DomainBed's average of `env{i}_out_acc`, for any metric that is defined in every domain."""
    if name == "worst_domain_accuracy":
        return metric_of(name, logits, labels, domains)
    members = [domains == domain for domain in domains.unique()]
    return sum(metric_of(name, logits[of], labels[of], domains[of]) for of in members) / len(members)


@pytest.mark.parametrize("name", get_args(Metric))
def test_the_mean_over_domains_by_hand(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(60, 3, generator=generator), torch.arange(60) % 3
    domains, rows = torch.tensor([5] * 9 + [2] * 40 + [0] * 11), torch.randperm(60, generator=generator)
    mean, pooled = (
        RuleImages(split, rows, Annotations(labels, domains, domains), name).value(logits[rows])
        for split in (VAL, "val_domain")
    )
    assert mean == pytest.approx(naive(name, logits, labels, domains), abs=1e-12)
    assert pooled == pytest.approx(metric_of(name, logits, labels, domains), abs=1e-12)
    assert name == "worst_domain_accuracy" or abs(mean - pooled) > 1e-4


def test_equal_steps_are_equal_in_any_order_of_domains() -> None:
    """1/10, 2/10, 3/10 and their permutations: float sums differ by their order, the value must not."""
    domains = torch.arange(30) // 10
    images = RuleImages(VAL, torch.arange(30), Annotations(torch.zeros(30).long(), domains, domains), "accuracy")
    values = set()
    for right in ((1, 2, 3), (3, 2, 1), (2, 3, 1), (3, 1, 2)):
        wrong = torch.cat([torch.arange(10) >= n for n in right])
        values.add(images.value(F.one_hot(wrong.long(), 2).float()))
    assert len(values) == 1


def test_domains_where_the_metric_is_not_defined_are_left_out_at_every_step() -> None:
    labels, domains = torch.tensor([0, 1, 0, 1, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    rows, annotations, kept = torch.arange(8), Annotations(labels, domains, domains), domains != 1
    assert defined_domains(rows, annotations, "auroc")[1] == [1]
    assert defined_domains(rows, annotations, "accuracy")[1] == []
    images = RuleImages(VAL, rows, annotations, "auroc")
    for seed in range(3):
        logits = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed))
        assert images.value(logits) == pytest.approx(naive("auroc", logits[kept], labels[kept], domains[kept]))
    assert math.isnan(RuleImages(VAL, rows[4:6], annotations, "auroc").value(torch.randn(2, 2)))


def with_rows(job: Job, rows: Tensor) -> Job:
    """The job with other validation images."""
    split = dataclasses.replace(job.split, evaluation={**job.split.evaluation, VAL: rows})
    return dataclasses.replace(job, split=split)


def uneven() -> Split:
    """Domains with very different numbers of validation images."""
    job, domains = job_of(split=split_of(0, 0)), digits().annotations.domains
    rows = job.split.evaluation[VAL]
    few = torch.cat([rows[domains[rows] == d][: 70 // (1 + 3 * d)] for d in range(DOMAINS)])
    return with_rows(job, few).split


def lopsided(job: Job) -> Job:
    """One domain with a quarter of the others' validation images."""
    rows, per_domain = job.split.evaluation[VAL], loop_models.VAL_ROWS
    return with_rows(job, torch.cat([rows[: per_domain // 4], rows[per_domain:]]))


def by_hand(trained: Trained, name: str) -> float:
    """The mean over domains of a head's selected weights."""
    rows, data = trained.job.split.evaluation[VAL], digits()
    logits = head_logits(data.features, rows, trained.selected[VAL].state)
    return naive(name, logits, data.annotations.labels[rows], data.annotations.domains[rows])


@pytest.mark.parametrize("name", ["accuracy", "nll"])
def test_a_solver_selects_by_the_mean_over_domains(name: str) -> None:
    job = job_of(LinearProbe, strengths=(10.0, 0.1, 1e-3), split=uneven())
    trained = solve(job, digits().features, digits().annotations, Criteria((VAL,), name))
    selected = trained.selected[VAL]
    assert selected.value == trained.course[VAL][selected.step] == pytest.approx(by_hand(trained, name), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy"])
def test_the_loop_selects_by_the_mean_over_domains(name: str, accelerator: Accelerator) -> None:
    training, dataset = Training(batch_size=4, evaluate_every=2), loop_models.digits()
    trained = loop_models.train(lopsided(make_job(steps=4)), SmallCNN(), training, accelerator, metric=name)
    selected, rows = trained.selected[VAL], trained.job.split.evaluation[VAL]
    logits = predict(trained.job, SmallCNN(), selected.state, dataset, rows, accelerator, 8)
    labels, domains = (torch.from_numpy(values)[rows] for values in (dataset.labels, dataset.domains))
    expected = pytest.approx(naive(name, logits, labels, domains), abs=1e-6)
    assert selected.value == trained.course[VAL][selected.step] == expected


# --- averages: the mean of the very weights that plain training walks through

ANY_VALLEY = SWAD(n_converge=1, tolerance_ratio=100.0)  # averages everything
VALLEY = SWAD(n_converge=2, n_tolerance=2, tolerance_ratio=0.0)
FAST = Training(batch_size=8, evaluate_every=5, optimizer="sgd", momentum=0.0)


def averaged(job: Job, averaging: SWAD | None) -> Job:
    return dataclasses.replace(job, averaging=averaging)


@pytest.mark.slow
def test_swad_looks_at_the_mean_loss_over_domains(monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator) -> None:
    seen, evaluated = list[float | None](), Averages.evaluated

    def watched(self: Averages, taken: int, losses: list[float | None], *rest: Any) -> None:
        seen.extend(losses)
        evaluated(self, taken, losses, *rest)

    monkeypatch.setattr(Averages, "evaluated", watched)
    job, training = averaged(job_of(steps=8, split=uneven()), ANY_VALLEY), Training(batch_size=8, evaluate_every=8)
    [plain] = bank_problems.train([averaged(job, None)], training, metric="nll")
    bank_problems.train([job], training)
    assert seen == pytest.approx([by_hand(plain, "nll")], abs=1e-6)

    seen.clear()
    job, training = lopsided(make_job(steps=3)), Training(batch_size=4, evaluate_every=3)
    alone = loop_models.train(job, SmallCNN(), training, accelerator, metric="nll")
    loop_models.train(averaged(job, ANY_VALLEY), SmallCNN(), training, accelerator)
    assert seen == pytest.approx([alone.selected[VAL].value], abs=1e-6)


def expected_valley(states: Sequence[dict[str, Tensor]], rows: Tensor) -> Any:
    """SWAD's own average of a head's states after each of 40 steps, evaluated every 5."""
    labels, domains = digits().annotations.labels[rows], digits().annotations.domains[rows]
    reference = VALLEY.begin()
    for first in range(0, 40, 5):
        names = states[0].keys() - {"seed"}
        mean = {name: torch.stack([state[name] for state in states[first : first + 5]]).mean(0) for name in names}
        logits = head_logits(digits().features, rows, states[first + 4])
        reference.add(Segment(first + 1, first + 5, mean, 5), naive("nll", logits, labels, domains))
    return reference.result()


def test_heads_of_a_bank_average_their_own_valleys() -> None:
    plain = [under(FAST, job_of(seed=seed, steps=40, lr=lr)) for seed, lr in ((1, 0.003), (1, 1.0), (1, 3.0))]
    bank, states, windows = Bank(plain, torch.device("cpu")), list[list[dict[str, Tensor]]](), list[Any]()
    for number, batch in enumerate(batches(plain, digits())):
        take_step(bank, batch, number)
        states.append([bank.state(head) for head in range(len(plain))])
    together = bank_problems.train([averaged(job, VALLEY) for job in plain], FAST, (VAL, ORACLE))
    for head, (job, trained) in enumerate(zip(plain, together, strict=True)):
        expected = expected_valley([of_step[head] for of_step in states], job.split.evaluation[LOSS_SPLIT])
        selected = trained.selected[ORACLE]
        assert selected is trained.selected[VAL]
        windows.append((selected.hparams["averaged_from"], selected.step))
        assert windows[-1] == (expected.first, expected.last)
        for name, value in expected.mean.items():
            torch.testing.assert_close(selected.state[name], value, rtol=1e-5, atol=1e-5)
    assert {*windows} == {(36, 40), (16, 40), (16, 20)}


SETTINGS = [
    SWAD(n_converge=1, n_tolerance=1, tolerance_ratio=0.0),
    VALLEY,
    SWAD(n_converge=3, n_tolerance=1, tolerance_ratio=0.1),
    ANY_VALLEY,
]


@pytest.mark.parametrize("kind", ["settings", "patience"])
def test_heads_of_a_bank_average_as_alone(kind: str) -> None:
    """With settings of their own, as a search draws them, and until their own patience ends."""
    if kind == "settings":
        jobs, training = [averaged(job_of(seed=1, steps=40, lr=0.5), own) for own in SETTINGS], FAST
    else:
        jobs = [averaged(job_of(steps=20, lr=lr), ANY_VALLEY) for lr in (1e-6, 3e-3)]
        training = Training(batch_size=8, evaluate_every=2, patience=1)
    assert len(chunks(jobs, torch.device("cpu"))) == 1
    together, picked = bank_problems.train(jobs, training), list[Selected]()
    for job, among in zip(jobs, together, strict=True):
        [alone] = bank_problems.train([job], training)
        one, other = alone.selected[VAL], among.selected[VAL]
        assert alone.stopped_at == among.stopped_at and (one.step, one.hparams) == (other.step, other.hparams)
        torch.testing.assert_close(one.state, other.state, rtol=1e-3, atol=1e-3)
        picked.append(other)
    if kind == "settings":
        assert len({(selected.hparams["averaged_from"], selected.step) for selected in picked}) >= 3
    else:
        assert picked[0].step == together[0].stopped_at and picked[0].step < picked[1].step


def test_a_training_that_stopped_before_its_first_step_counts_its_start_once() -> None:
    start, later = {"w": torch.zeros(1, 2)}, {"w": torch.ones(1, 2)}
    once, twice = (Averages([BMA(beta=0.5)], 1, 1) for _ in range(2))
    once.add(0, start)
    twice.load_state(copy.deepcopy(once.state()), torch.device("cpu"))
    twice.add(0, start)  # the resumed training
    for averages in (once, twice):
        averages.add(1, later)
        averages.evaluated(1, [0.0])
        assert averages.selected(0).hparams == {"averaged_from": 0}
        torch.testing.assert_close(averages.selected(0).state["w"], torch.full((2,), 0.5))


def test_averaged_weights_get_their_own_batch_norm_statistics(accelerator: Accelerator) -> None:
    training, job = Training(batch_size=4, encoder_lr=0.01), averaged(make_job(steps=3), ANY_VALLEY)
    state = loop_models.final_state(loop_models.train(job, SmallCNN(), training, accelerator))
    encoder = SmallCNN()
    encoder.load_state_dict({k.removeprefix("encoder."): v for k, v in state.items() if "encoder." in k})
    seen = [encoder.layers[0](batch_of(job, training, step).x) for step in range(3)]
    norm, means, variances = encoder.layers[1], [x.mean((0, 2, 3)) for x in seen], [x.var((0, 2, 3)) for x in seen]
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0), rtol=0, atol=1e-5)
    torch.testing.assert_close(norm.running_var, torch.stack(variances).mean(0), rtol=0, atol=1e-5)


# --- class weights and schedules


def test_balanced_by_hand() -> None:
    labels = torch.tensor([0, 0, 0, 0, 2, 2, 3, 0])  # n = 8, three classes of five
    expected = torch.tensor([8 / (3 * 5), 0.0, 8 / (3 * 2), 8 / (3 * 1), 0.0])
    torch.testing.assert_close(balanced_class_weight(labels, 5), expected)  # its type too: float32


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
    factors = [Schedule(**settings).factor(step, len(expected)) for step in range(len(expected))]
    assert factors == pytest.approx(expected)
