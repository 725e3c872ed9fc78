"""What a bank does beside its numbers: batches, evaluations, records, failures of single heads, chunks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bank_problems import DOMAINS, WIDTH, digits, head_logits, job_of, split_of, spoiled, train, under
from scipy.stats import chisquare
from torch import Tensor
from torch.overrides import TorchFunctionMode

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.fish import Fish
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.rsc import RSC
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.averaging.bma import BMA
from xdm_ft.averaging.swad import SWAD
from xdm_ft.core import Batch, Criteria, Losses
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.features import cache as feature_cache
from xdm_ft.features.cache import Features
from xdm_ft.protocol.samplers import PerDomainSampler
from xdm_ft.runtime.randomness import Stream, integers
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Schedule, Trained, Training
from xdm_ft.training.bank import data as data_module
from xdm_ft.training.bank.data import BankValidation, CachedData, batches
from xdm_ft.training.bank.step import Bank, step
from xdm_ft.training.bank.train import CHUNK_BYTES, CHUNK_HEADS, GPU_CHUNK_BYTES, GPU_CHUNK_HEADS, chunks, solve
from xdm_ft.training.selection import RuleImages, rows_of_rules
from xdm_ft.training.selection import split_of as split_of_rule

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SGD = Training(batch_size=8, optimizer="sgd", momentum=0.9)
RULES = ("train_val", "oracle")
JOBS = [job_of(held_out=head % DOMAINS, seed=head // 5) for head in range(10)]
Records = list[tuple[Job, int, dict[str, float]]]


def walked(jobs: list[Job]) -> Bank:
    bank = Bank(jobs, CPU)
    for number, batch in enumerate(batches(jobs, digits())):
        step(bank, batch, number)
    return bank


def states_of(trained: list[Trained]) -> list[dict[str, Tensor]]:
    return [each.selected["train_val"].state for each in trained]


# --- batches


def test_rows_are_drawn_once_per_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials share them: 4 jobs of 2 seeds."""
    jobs = [job_of(held_out=0, seed=seed, split=JOBS[0].split, lr=lr) for lr in (0.1, 0.2) for seed in (0, 1)]
    drawn, indices = [], PerDomainSampler.indices
    monkeypatch.setattr(
        PerDomainSampler, "indices", lambda self, *steps: (drawn.append(self.seed), indices(self, *steps))[1]
    )
    row = next(iter(batches(jobs, digits()))).row
    assert drawn == [0, 1]
    assert torch.equal(row[0], row[2]) and torch.equal(row[1], row[3]) and not torch.equal(row[0], row[1])


@pytest.mark.parametrize("method", [ERM, XDomainMix, Mixup, RSC], ids=lambda method: method.__name__)
def test_heads_with_the_same_batches_train_as_among_others(method: type[Algorithm]) -> None:
    """Bit for bit: their batches are a view of one, those of the others are copies."""
    split = split_of(0, seed=0)
    jobs = [under(SGD, job_of(method, split=split, steps=6, lr=1e-2 * (1 + h))) for h in range(3)]
    other = under(SGD, job_of(method, held_out=1, steps=6))
    shared, copied = (walked(some).stacked() for some in (jobs, [*jobs, other]))
    assert {batch.x.untyped_storage().nbytes() // batch.x[0].nbytes for batch in batches(jobs, digits())} == {1}
    for name, values in shared.items():
        assert torch.equal(values, copied[name][:3])


# --- views, and features in files


def of_passes(passes: list[Tensor], rows_per_shard: int | None = None) -> Features:
    """`passes`: the plain one and the views, [N,K] each."""
    shards = [shard for each in passes for shard in each.split(rows_per_shard or len(each))]
    return Features(shards, torch.arange(sum(map(len, passes))).view(len(passes), -1))


@cache
def viewed(count: int = 2) -> CachedData:
    """Digits, and `count` views of their features, each with its own noise."""
    data, generator = digits(), torch.Generator().manual_seed(1)
    plain = data.features[torch.arange(len(data.annotations.labels))]
    views = [plain + 0.3 * torch.randn(plain.shape, generator=generator) for _ in range(count)]
    return dataclasses.replace(data, features=of_passes([plain, *views]))


def test_views_are_drawn_uniformly_and_independently() -> None:
    count = 3
    [job] = jobs = [under(SGD, job_of(steps=600))]
    drawn = torch.cat([1 + integers(job.seed, s, Stream.VIEW, torch.arange(24), count)[None] for s in range(600)])
    read = torch.stack([batch.x[0] for batch in batches(jobs, viewed(count))])
    rows = PerDomainSampler(job.split.train, 8, job.seed).indices(0, 600)
    assert torch.equal(read, viewed(count).features.of_views(rows, drawn))
    in_batch = count * (drawn[:, :-1] - 1) + drawn[:, 1:] - 1  # neighbours of a batch
    in_time = count * (drawn[:-1] - 1) + drawn[1:] - 1  # one position at neighbouring steps
    for numbers in (drawn - 1, in_batch, in_time):
        assert chisquare(numbers.flatten().bincount().numpy()).pvalue > 1e-3


def test_a_head_draws_views_as_among_others() -> None:
    jobs = [under(SGD, job_of(held_out=h % 4, seed=h // 2, steps=300)) for h in range(6)]
    together = list(batches(jobs, viewed()))
    for h, job in enumerate(jobs):
        for number, batch in enumerate(batches([job], viewed())):
            assert torch.equal(batch.x[0], together[number].x[h])
    assert not torch.equal(together[0].x[0], together[0].x[2])


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
def test_evaluations_and_solvers_read_the_plain_view(metric: str) -> None:
    jobs, criteria = [job_of(), job_of(held_out=1)], Criteria(("train_val",), metric)
    weight = torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(0))
    model, state = jobs[0].new_method(), {"head.weight": weight, "head.bias": torch.zeros(2, 10)}
    plain, other = (BankValidation(jobs, data, criteria).values(model, state) for data in (digits(), viewed()))
    assert plain == other
    job = job_of(LinearProbe, steps=1)
    first, second = (solve(job, data.features, data.annotations, criteria) for data in (digits(), viewed()))
    assert first.course == second.course
    assert torch.equal(*(state["head.weight"] for state in states_of([first, second])))


@pytest.mark.parametrize("views", [0, 2])
def test_features_from_files_train_to_the_same_bits(views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of three steps, the images that selection looks at read again in blocks at each evaluation."""
    data = viewed() if views else digits()
    rows = torch.arange(len(data.annotations.labels))
    monkeypatch.setattr(data_module, "KEEP_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(data_module, "READ_BYTES", 4 * WIDTH * 24 * 2 * 3)
    passes = [data.features.of_views(rows, torch.full_like(rows, v)) for v in range(views + 1)]
    monkeypatch.setattr(feature_cache, "MEMORY_FRACTION", 0.0)
    mapped = dataclasses.replace(data, features=of_passes(passes, 500))
    assert data.features.in_memory and not mapped.features.in_memory
    jobs = [job_of(XDomainMix, seed=s, steps=40) for s in (0, 1)]
    in_memory, in_files = train(jobs, data=data), train(jobs, data=mapped)
    assert [each.course for each in in_memory] == [each.course for each in in_files]
    torch.testing.assert_close(states_of(in_files), states_of(in_memory), rtol=0, atol=0)


# --- evaluations


def random_bank() -> Bank:
    """Ten heads; a weight of the fourth is not finite."""
    bank = Bank(JOBS, CPU)
    with torch.no_grad():
        bank.main["head.weight"] += torch.randn(bank.main["head.weight"].shape, generator=torch.Generator())
        bank.main["head.weight"][3, 0, 0] = torch.inf
    return bank


@pytest.mark.parametrize("at_once", [None, 3], ids=["all heads", "three at a time"])
@pytest.mark.parametrize("metric", HIGHER_IS_BETTER)
def test_values_are_those_of_each_head_alone(metric: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, data = random_bank(), digits()
    validation = BankValidation(JOBS, data, Criteria(RULES, metric))
    if at_once:
        monkeypatch.setattr(data_module, "VALUES_AT_ONCE", at_once * len(validation.rows) * 10)
    values_of = validation.values(bank.template, bank.main)
    assert [head for head, values in enumerate(values_of) if values is None] == [3]
    for head, (job, values) in enumerate(zip(JOBS, values_of, strict=True)):
        state = {name: weights[head].detach() for name, weights in bank.main.items()}
        for rule, rows in rows_of_rules(job, RULES).items():
            images = RuleImages(split_of_rule(rule), rows, data.annotations, metric)
            logits = head_logits(data.features, rows, state)
            assert values is None or values[rule] == pytest.approx(images.value(logits), abs=1e-5)


def test_heads_together_are_measured_bit_for_bit_as_alone() -> None:
    """Of the same logits: only the product before them may round differently with the number of heads."""
    rows = JOBS[0].split.evaluation["train_val"]
    logits = 3 * torch.randn(len(rows), 7, 10, generator=torch.Generator().manual_seed(0))
    for metric in HIGHER_IS_BETTER:
        for split in ("train_val", "test"):
            images = RuleImages(split, rows, digits().annotations, metric)
            assert images.values(logits) == [images.value(logits[:, head]) for head in range(7)]


class Reads(TorchFunctionMode):
    """Lists the reads of tensors that wait for a GPU, with the tensors' numbers of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = list[tuple[str, int]]()

    def __torch_function__(self, function, types, given=(), named=None):  # type: ignore[no-untyped-def]
        name = getattr(function, "__name__", "")
        if name in {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__"}:
            self.reads.append((name, given[0].ndim))
        return function(*given, **(named or {}))


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
def test_all_heads_are_read_from_the_device_once(metric: str) -> None:
    bank, validation = random_bank(), BankValidation(JOBS, digits(), Criteria(RULES, metric))
    with Reads() as mode:
        validation.values(bank.template, bank.main)
    # the counts of all images and heads; or the logits, from which the CPU computes the rest
    assert mode.reads == [("tolist", 1)] if metric == "accuracy" else mode.reads[0] == ("cpu", 3)


def test_selection_in_blocks_and_by_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one piece, to rounding."""
    jobs, criteria = [job_of(held_out=h, seed=h) for h in range(4)], Criteria(RULES, "nll")
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((4, 10, WIDTH), (4, 10)))
    whole = BankValidation(jobs, digits(), criteria)
    model, state = jobs[0].new_method().eval(), {"head.weight": weight, "head.bias": bias}
    expected = whole.values(model, state)
    monkeypatch.setattr(data_module, "KEEP_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(data_module, "READ_BYTES", 4 * WIDTH * 100)
    monkeypatch.setattr(data_module, "VALUES_PER_READING", 10 * len(whole.rows) * 3)  # three heads, then one
    in_blocks = BankValidation(jobs, digits(), criteria)
    assert whole.loaded is not None and in_blocks.loaded is None
    for one, other in zip(expected, in_blocks.values(model, state), strict=True):
        assert one is not None and other is not None and one.keys() == set(RULES)
        assert one == pytest.approx(other, rel=1e-6)
    monkeypatch.setattr(data_module, "PREDICTOR_BYTES", 0)
    rows, first = torch.randperm(1000, generator=generator), {name: value[0] for name, value in state.items()}
    logits = data_module.CachedPredictor(jobs[0], digits().features).logits(model.state_dict() | first, rows)
    torch.testing.assert_close(logits, F.linear(digits().features[rows], weight[0], bias[0]))


# --- records and selection


class Counting(Algorithm):
    """Its loss is the number of the step, its weights stay; it logs at odd steps only."""

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        total = self.head.weight.sum() * 0 + step
        return Losses(total, total.new_zeros(()), logs={"odd": torch.tensor(float(step))} if step % 2 else {})


def recorded(jobs: list[Job], training: Training, **arguments: Any) -> tuple[Records, list[Trained]]:
    records: Records = []
    record = lambda step, heads: records.extend((job, step, values) for job, values in heads)  # noqa: E731
    return records, train(jobs, training, record=record, **arguments)


def test_records_hold_the_means_since_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xdm_ft.training.state.READ_STEPS", 3)  # losses are read in more than one block
    training = Training(batch_size=2, evaluate_every=4, schedule=Schedule(warmup_steps=9))
    jobs = [job_of(Counting, seed=seed, steps=10, lr=seed + 1.0) for seed in range(2)]
    records, _ = recorded(jobs, training)
    assert [(job.seed, step) for job, step, _ in records] == [(0, 4), (1, 4), (0, 8), (1, 8), (0, 10), (1, 10)]
    of_second = [values for job, _, values in records if job.seed == 1]
    assert [values["loss"] for values in of_second] == [1.5, 5.5, 8.5]
    assert [values["odd"] for values in of_second] == [2.0, 6.0, 9.0]
    assert [values["lr"] for values in of_second] == pytest.approx([2 * 0.4, 2 * 0.8, 2.0])
    assert all("auxiliary_loss" not in values for values in of_second)


@pytest.mark.parametrize("name", ["accuracy", "nll", "worst_domain_accuracy"])
def test_the_selected_state_has_the_best_recorded_metric(name: str) -> None:
    """Heads that look at different rows: each one's value is that of its own weights on its own rows."""
    jobs, data = [job_of(held_out=h, seed=h, steps=40, lr=0.05) for h in range(3)], digits()
    records, results = recorded(jobs, Training(batch_size=8, evaluate_every=3), rules=RULES, metric=name)
    for job, trained in zip(jobs, results, strict=True):
        for rule, split in (("train_val", "train_val"), ("oracle", "test_val")):
            course = [(step, values[f"{rule}/{name}"]) for of, step, values in records if of.key == job.key]
            best = (min if name == "nll" else max)(value for _, value in course)
            selected, equal = trained.selected[rule], [step for step, value in course if value == best]
            assert selected.step in equal and (selected.step == equal[0] or rule == "oracle")
            rows = job.split.evaluation[split]
            images = RuleImages(split, rows, data.annotations, name)
            logits = head_logits(data.features, rows, selected.state)
            assert selected.value == best and images.value(logits) == pytest.approx(best, abs=1e-6)


def test_warm_up_is_not_selected_and_mixed_steps_are_those_taken() -> None:
    [trained] = train([job_of(XDomainMix, steps=40, lr=0.3, warmup_steps=38)], Training(evaluate_every=1))
    assert trained.selected["train_val"].step in (39, 40) and trained.mixed_steps == 2
    assert train([job_of(steps=4)])[0].mixed_steps is None
    jobs = [job_of(XDomainMix, seed=seed, steps=60, lr=lr, warmup_steps=5) for seed, lr in ((0, 0.0), (1, 0.01))]
    results = train(jobs, Training(batch_size=8, evaluate_every=1, patience=2), metric="nll")
    assert results[0].stopped_at == 8, "its first selectable step is 6, and none after it is better"
    stops = [trained.stopped_at or 60 for trained in results]
    assert stops[1] > 8 and [trained.mixed_steps for trained in results] == [stop - 5 for stop in stops]


# --- heads that stop or fail


def test_a_head_that_stops_keeps_what_it_picked_and_the_others_go_on() -> None:
    """Its patience ends as it would alone; the rest of its chunk is what it is without it."""
    training = SGD.model_copy(update={"patience": 1, "evaluate_every": 2})
    jobs = [job_of(steps=20, lr=lr) for lr in (10.0, 1e-3)]
    both = train(jobs, training)
    alone = [train([job], training)[0] for job in jobs]
    assert [each.stopped_at for each in alone] == [each.stopped_at for each in both]
    assert [each.selected["train_val"].step for each in alone] == [each.selected["train_val"].step for each in both]
    torch.testing.assert_close(states_of(alone), states_of(both), atol=1e-5, rtol=1e-5)
    assert both[0].stopped_at is not None and max(both[0].course["train_val"]) == both[0].stopped_at < 20


class Broken(ERM):
    """Its loss is not finite from step `at` (counted from 0) on; after step `ends` nothing may be left to train."""

    at, ends = 9, 99

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        assert step < self.ends
        losses = super().loss(z, batch, step)
        return losses if step < self.at else losses._replace(total=losses.total * torch.nan)


def test_a_head_that_has_stopped_does_not_fail_with_the_others() -> None:
    training = SGD.model_copy(update={"patience": 2, "evaluate_every": 2})
    stopped, broken = train([job_of(Broken, steps=20, lr=lr) for lr in (1e-6, 0.03)], training)
    assert stopped.stopped_at is not None and stopped.stopped_at < 9
    assert stopped.failure is None and stopped.selected
    assert broken.failure is not None and "step 10 of 20" in broken.failure


def test_all_heads_broken_ends_the_training() -> None:
    at_once = type("AtOnce", (Broken,), {"at": 0, "ends": 2})
    trained = train([job_of(at_once, seed=s, steps=50) for s in range(3)], Training(evaluate_every=2))
    assert all(t.failure is not None and "step 1 of 50" in t.failure for t in trained)


def test_a_broken_head_fails_alone_and_names_its_step_and_rows() -> None:
    jobs = [job_of(held_out=h, steps=60) for h in (0, 1)]
    row = int(jobs[1].split.train[0][5])  # of domain 0: trains head 1 and is held out of head 0
    sound, broken = train(jobs, data=spoiled(row))
    assert sound.failure is None
    torch.testing.assert_close(states_of([sound]), states_of(train(jobs[:1])), rtol=1e-4, atol=1e-5)
    assert broken.selected == {} and broken.failure is not None
    match = re.fullmatch(r"the loss was not finite at step (\d+) of 60; rows of its batch: (.*)", broken.failure)
    assert match is not None
    rows = PerDomainSampler(jobs[1].split.train, 8, jobs[1].seed).indices(0, 60)
    first = next(number for number, of_step in enumerate(rows) if (of_step == row).any())
    assert (int(match[1]), [int(word) for word in match[2].split(", ")]) == (first + 1, rows[first].tolist())


def test_what_can_not_be_measured_is_a_failure_with_its_reason() -> None:
    job = job_of(steps=10)
    [trained] = train([job], data=spoiled(int(job.split.evaluation["train_val"][3])))
    assert trained.selected == {}
    assert trained.failure == "the logits of the validation images were not finite after step 1 of 10"
    split = split_of(0, 0)
    rows = split.evaluation["train_val"]
    split.evaluation["train_val"] = rows[digits().annotations.labels[rows] == 4]  # auroc needs a second class
    [trained] = train([job_of(split=split, steps=5)], metric="auroc")
    assert trained.selected == {} and trained.failure is not None and "auroc" in trained.failure


# --- chunks


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


def test_settings_that_differ_but_do_not_stack_are_refused() -> None:
    for jobs, reason in (
        ([job_of(XDomainMix, warmup_steps=3), job_of(XDomainMix, warmup_steps=4)], "must be buffers"),
        ([job_of(sharpness=SAM(adaptive=True)), job_of(sharpness=SAM())], "sharpness"),
    ):
        with pytest.raises(AssertionError, match=reason):
            Bank([under(SGD, job) for job in jobs], CPU)


def test_chunks_are_as_large_as_the_device_takes() -> None:
    jobs = [job_of(steps=5, seed=seed) for seed in range(GPU_CHUNK_HEADS + 3)]
    assert numbered(jobs, GPU) == [[*range(GPU_CHUNK_HEADS)], [*range(GPU_CHUNK_HEADS, GPU_CHUNK_HEADS + 3)]]
    first = numbered(jobs[: 2 * CHUNK_HEADS + 1])
    assert first == [[*range(CHUNK_HEADS)], [*range(CHUNK_HEADS, 2 * CHUNK_HEADS)], [2 * CHUNK_HEADS]]
    assert numbered(of_five(GPU_CHUNK_BYTES), GPU) == [[0, 1, 2, 3, 4], [5, 6]]


def test_trials_with_the_same_batches_share_a_chunk_if_they_fill_half_of_it() -> None:
    half = CHUNK_HEADS // 2
    counts = (half + 1, half, CHUNK_HEADS + half, half + 1)  # of heads with domain 0, 1, 2, 3 held out
    jobs = [job for h, n in enumerate(counts) for job in [job_of(held_out=h, split=split_of(h, 0))] * n]
    domains = [sorted({job.test_domains[0] for job in chunk}) for chunk in chunks(jobs, CPU)]
    assert domains == [["d0"], ["d2"], ["d3"], ["d1", "d2"]]
    assert sorted(map(id, jobs)) == sorted(id(job) for chunk in chunks(jobs, CPU) for job in chunk)


def varied(method: Callable[..., Algorithm], *settings: dict[str, float]) -> list[Job]:
    return [job_of(method, seed=0, steps=4, **own) for own in settings]


SEARCHES = {
    "rsc": varied(RSC, {}, {"feature_drop": 0.1, "batch_drop": 0.9}, {"feature_drop": 0.5}),
    "mixup": varied(Mixup, {}, {"alpha": 0.1}, {"alpha": 10.0}),
    "lisa": varied(LISA, {}, {"alpha": 0.5}, {"p_sel": 0.5}),
    "fish": varied(Fish, {}, {"meta_lr": 0.05}, {"meta_lr": 0.1}),
    "irm": varied(partial(IRM, anneal_steps=2), {}, {"penalty_weight": 1.0}),
    "sagm": [job_of(ERM, steps=4, sharpness=SAGM(alpha=alpha, rho=rho)) for alpha, rho in ((0.01, 0.1), (1, 1))],
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_over_settings_is_one_bank_of_heads_as_alone(name: str) -> None:
    jobs = SEARCHES[name]
    assert chunks(jobs, CPU) == [jobs]
    together, ends = walked(jobs), []
    for head, job in enumerate(jobs):
        alone = walked([job]).state(0)
        assert alone.keys() == job.new_algorithm().state_dict().keys(), "a weights file holds no other buffers"
        torch.testing.assert_close(together.state(head), alone, rtol=1e-5, atol=1e-6)
        ends.append(alone["head.weight"])
    assert all((end - ends[0]).abs().max() > 1e-4 for end in ends[1:]), "the settings matter"
