"""What a bank does beside its numbers: chunks, batches, records, failures of single heads."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank_problems import CLASSES, WIDTH, digits, head_logits, job_of, split_of, spoiled, train, under
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.fish import Fish
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.rsc import RSC
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.averaging.bma import BMA
from xdm_ft.averaging.swad import SWAD
from xdm_ft.evaluation.metrics import metric
from xdm_ft.protocol.samplers import PerDomainSampler, PooledSampler
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Schedule, Training
from xdm_ft.training.bank.data import BankValidation, batches
from xdm_ft.training.bank.step import Bank, step
from xdm_ft.training.bank.train import CHUNK_BYTES, CHUNK_HEADS, GPU_CHUNK_BYTES, GPU_CHUNK_HEADS, chunks
from xdm_ft.training.selection import RuleImages

CPU = torch.device("cpu")
SGD = Training(batch_size=8, optimizer="sgd", momentum=0.9)


def accuracy(state: dict[str, Tensor], rows: Tensor) -> float:
    data = digits()
    return metric(
        "accuracy",
        head_logits(data.features, rows, state),
        data.annotations.labels[rows],
        data.annotations.domains[rows],
    )


def test_batches_are_the_samplers_and_domains_those_of_the_split() -> None:
    jobs = [job_of(held_out=3, seed=1, steps=5), job_of(held_out=1, seed=2, steps=5)]
    data, training = digits(), Training(batch_size=4, sampler="pooled")
    made: list[Batch] = list(batches([under(training, job) for job in jobs], data))
    assert len(made) == 5
    for h, job in enumerate(jobs):
        rows = PooledSampler(job.split.train, 4, job.seed).indices(0, 5)
        for batch, expected in zip(made, rows, strict=True):
            assert torch.equal(batch.row[h], expected)
            assert torch.equal(batch.x[h], data.features[expected])
            assert torch.equal(batch.y[h], data.annotations.labels[expected])
            names = [job.split.train_domains[d] for d in batch.domain[h].tolist()]
            assert names == [f"d{d}" for d in data.annotations.domains[expected].tolist()]


@pytest.mark.parametrize("method", [ERM, XDomainMix, Mixup, RSC], ids=lambda method: method.__name__)
def test_heads_with_the_same_batches_train_as_among_others(method: type[Algorithm]) -> None:
    """Bit for bit: their batches are a view of one, those of the others are copies."""
    split = split_of(0, seed=0)
    jobs = [under(SGD, job_of(method, split=split, steps=6, lr=1e-2 * (1 + h))) for h in range(3)]
    other = under(SGD, job_of(method, held_out=1, steps=6))
    shared, copied = (trained(some).stacked() for some in (jobs, [*jobs, other]))
    [x] = {batch.x.untyped_storage().nbytes() // batch.x[0].nbytes for batch in batches(jobs, digits())}
    assert x == 1
    for name, values in shared.items():
        assert torch.equal(values, copied[name][:3])


def test_a_head_that_stops_keeps_what_it_picked_and_the_others_go_on() -> None:
    """Its patience ends as it would alone; the rest of its chunk is what it is without it."""
    training = SGD.model_copy(update={"patience": 1, "evaluate_every": 2})
    jobs = [job_of(steps=20, lr=lr) for lr in (10.0, 1e-3)]
    both = train(jobs, training)
    for job, together in zip(jobs, both, strict=True):
        (alone,) = train([job], training)
        assert alone.stopped_at == together.stopped_at
        assert alone.selected["train_val"].step == together.selected["train_val"].step
        states = alone.selected["train_val"].state, together.selected["train_val"].state
        torch.testing.assert_close(*states, atol=1e-5, rtol=1e-5)
    assert both[0].stopped_at is not None and both[0].stopped_at < 20
    assert max(both[0].course["train_val"]) == both[0].stopped_at


class BrokenLate(ERM):
    """Its loss is not finite from the tenth step on."""

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        losses = super().loss(z, batch, step)
        return losses if step < 9 else losses._replace(total=losses.total * torch.nan)


def test_a_head_that_has_stopped_does_not_fail_with_the_others() -> None:
    training = SGD.model_copy(update={"patience": 2, "evaluate_every": 2})
    stopped, broken = train([job_of(BrokenLate, steps=20, lr=lr) for lr in (1e-6, 0.03)], training)
    assert stopped.stopped_at is not None and stopped.stopped_at < 9
    assert stopped.failure is None and stopped.selected
    assert broken.failure is not None and "step 10 of 20" in broken.failure


def test_settings_that_differ_but_do_not_stack_are_refused() -> None:
    jobs = [job_of(XDomainMix, warmup_steps=3), job_of(XDomainMix, warmup_steps=4)]
    with pytest.raises(AssertionError, match="must be buffers"):
        Bank([under(SGD, job) for job in jobs], torch.device("cpu"))
    jobs = [job_of(sharpness=SAM(adaptive=True)), job_of(sharpness=SAM())]
    with pytest.raises(AssertionError, match="sharpness"):
        Bank([under(SGD, job) for job in jobs], torch.device("cpu"))


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
            images = RuleImages(split, rows, data.annotations, name, CLASSES)
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


CPU, GPU = torch.device("cpu"), torch.device("cuda")
STEPS = 4


def numbered(jobs: list[Job], device: torch.device = CPU) -> list[list[int]]:
    """The numbers of the jobs in each chunk."""
    number = {id(job): number for number, job in enumerate(jobs)}
    return [[number[id(job)] for job in chunk] for chunk in chunks(jobs, device)]


def changed(*changes: dict[str, Any]) -> list[Job]:
    return [dataclasses.replace(job_of(), training=SGD.model_copy(update=own)) for own in changes]


def of_five(size: int) -> list[Job]:
    """Seven heads of which five fill the memory of a chunk: there are three training domains."""
    return changed(*[{"batch_size": size // (4 * 3 * WIDTH) // 5}] * 7)


PARTS = {
    "settings": (
        [job_of(XDomainMix, seed=s, warmup_steps=3 + s % 2, p_discard=s / 10) for s in range(4)]
        + [job_of(XDomainMix, warmup_steps=3, sharpness=SAM(rho=rho)) for rho in (0.1, 0.2)],
        [[0, 2], [1, 3], [4, 5]],
    ),
    "training": (
        changed({}, {"lr": 0.5, "momentum": 0.1}, {"beta1": 0.5}, {"batch_size": 3}, {}),
        [[0, 1, 4], [2], [3]],
    ),
    "averaging": (
        [dataclasses.replace(job_of(), averaging=kind) for kind in (None, SWAD(), None, SWAD(n_converge=2), BMA())],
        [[0, 2], [1, 3], [4]],
    ),
    "steps": ([job_of(steps=5), job_of(steps=6), job_of(steps=5)], [[0, 2], [1]]),
    "memory": (of_five(CHUNK_BYTES), [[0, 1, 2, 3, 4], [5, 6]]),
    "a head larger than the memory": (changed(*[{"batch_size": CHUNK_BYTES}] * 2), [[0], [1]]),
}


@pytest.mark.parametrize("name", PARTS)
def test_chunks_hold_what_stacks(name: str) -> None:
    jobs, expected = PARTS[name]
    assert numbered(jobs) == expected


def test_chunks_are_as_large_as_the_device_takes() -> None:
    jobs = [job_of(steps=5, seed=seed) for seed in range(GPU_CHUNK_HEADS + 3)]
    assert numbered(jobs, GPU) == [[*range(GPU_CHUNK_HEADS)], [*range(GPU_CHUNK_HEADS, GPU_CHUNK_HEADS + 3)]]
    first = numbered(jobs[: 2 * CHUNK_HEADS + 1])
    assert first == [[*range(CHUNK_HEADS)], [*range(CHUNK_HEADS, 2 * CHUNK_HEADS)], [2 * CHUNK_HEADS]]
    assert numbered(of_five(GPU_CHUNK_BYTES), GPU) == [[0, 1, 2, 3, 4], [5, 6]]


def test_trials_with_the_same_batches_share_a_chunk_if_they_fill_half_of_it() -> None:
    counts = {"d0": CHUNK_HEADS // 2 + 1, "d1": CHUNK_HEADS // 2, "d2": CHUNK_HEADS + CHUNK_HEADS // 2}
    counts["d3"] = counts["d0"]
    jobs = [job for h, n in enumerate(counts.values()) for job in [job_of(held_out=h, split=split_of(h, 0))] * n]
    found = [sorted({job.test_domains[0] for job in chunk}) for chunk in chunks(jobs, CPU)]
    assert found == [["d0"], ["d2"], ["d3"], ["d1", "d2"]]
    assert sorted(map(id, jobs)) == sorted(id(job) for chunk in chunks(jobs, CPU) for job in chunk)


def varied(method: Callable[..., Algorithm], *settings: dict[str, float]) -> list[Job]:
    return [job_of(method, seed=0, steps=STEPS, **own) for own in settings]


SEARCHES = {
    "rsc": varied(RSC, {}, {"feature_drop": 0.1, "batch_drop": 0.9}, {"feature_drop": 0.5}),
    "mixup": varied(Mixup, {}, {"alpha": 0.1}, {"alpha": 10.0}),
    "lisa": varied(LISA, {}, {"alpha": 0.5}, {"p_sel": 0.5}),
    "fish": varied(Fish, {}, {"meta_lr": 0.05}, {"meta_lr": 0.1}),
    "irm": varied(IRM, {"anneal_steps": 2}, {"anneal_steps": 2, "penalty_weight": 1.0}),
    "sagm": [job_of(ERM, steps=STEPS, sharpness=SAGM(alpha=alpha, rho=rho)) for alpha, rho in ((0.01, 0.1), (1, 1))],
}


def trained(jobs: list[Job]) -> Bank:
    bank = Bank(jobs, CPU)
    for number, batch in enumerate(batches(jobs, digits())):
        step(bank, batch, number)
    return bank


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_over_settings_is_one_bank_of_heads_as_alone(name: str) -> None:
    jobs = SEARCHES[name]
    assert chunks(jobs, CPU) == [jobs]
    together, ends = trained(jobs), []
    for head, job in enumerate(jobs):
        alone = trained([job]).state(0)
        assert alone.keys() == job.new_algorithm().state_dict().keys(), "a weights file holds no other buffers"
        torch.testing.assert_close(together.state(head), alone, rtol=1e-5, atol=1e-6)
        ends.append(alone["head.weight"])
    assert all((end - ends[0]).abs().max() > 1e-4 for end in ends[1:]), "the settings matter"
