"""Evaluations of all heads at once, and features that are read from files or among views."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from bank_problems import DOMAINS, digits, head_logits, job_of, train, under
from scipy.stats import chisquare
from torch import Tensor
from torch.overrides import TorchFunctionMode

from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.features.cache import Features
from xdm_ft.protocol.samplers import PerDomainSampler
from xdm_ft.runtime.randomness import Stream, integers
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.training import Training
from xdm_ft.training.bank import data as data_module
from xdm_ft.training.bank.data import BankValidation, CachedData, batches
from xdm_ft.training.bank.step import Bank
from xdm_ft.training.bank.train import solve
from xdm_ft.training.selection import RuleImages, rows_of_rules, split_of

RULES = ("train_val", "oracle")
JOBS = [job_of(held_out=head % DOMAINS, seed=head // 5) for head in range(10)]


def trained() -> Bank:
    bank = Bank(JOBS, torch.device("cpu"))
    with torch.no_grad():
        bank.main["head.weight"] += torch.randn(bank.main["head.weight"].shape, generator=torch.Generator())
        bank.main["head.weight"][3, 0, 0] = torch.inf
    return bank


@pytest.mark.parametrize("at_once", [None, 3], ids=["all heads", "three at a time"])
@pytest.mark.parametrize("metric", HIGHER_IS_BETTER)
def test_values_are_those_of_each_head_alone(metric: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, data = trained(), digits()
    validation = BankValidation(JOBS, data, Criteria(RULES, metric))
    if at_once:
        monkeypatch.setattr(data_module, "VALUES_AT_ONCE", at_once * len(validation.rows) * 10)
    found = validation.values(bank.template, bank.main)
    assert found[3] is None and sum(own is None for own in found) == 1
    for head, (job, own) in enumerate(zip(JOBS, found, strict=True)):
        for rule, rows in rows_of_rules(job, RULES).items():
            state = {name: values[head].detach() for name, values in bank.main.items()}
            images = RuleImages(split_of(rule), rows, data.annotations, metric, 10)
            logits = head_logits(data.features, rows, state)
            if own is not None:
                assert own[rule] == pytest.approx(images.value(logits), abs=1e-5)


def test_heads_together_are_measured_bit_for_bit_as_alone() -> None:
    """Of the same logits: only the product before them may round differently with the number of heads."""
    generator = torch.Generator().manual_seed(0)
    job, data = JOBS[0], digits()
    rows = job.split.evaluation["train_val"]
    logits = 3 * torch.randn(len(rows), 7, 10, generator=generator)
    for metric in HIGHER_IS_BETTER:
        for split in (*RULES[:1], "test"):
            images = RuleImages(split, rows, data.annotations, metric, 10)
            assert images.values(logits) == [images.value(logits[:, head]) for head in range(7)]


class Reads(TorchFunctionMode):
    """Lists the reads of tensors that wait for a GPU, with the tensors' numbers of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[tuple[str, int]]()

    def __torch_function__(self, function, types, given=(), named=None):  # type: ignore[no-untyped-def]
        name = getattr(function, "__name__", "")
        if name in {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__"}:
            self.found.append((name, given[0].ndim))
        return function(*given, **(named or {}))


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
def test_all_heads_are_read_from_the_device_once(metric: str) -> None:
    bank, validation = trained(), BankValidation(JOBS, digits(), Criteria(RULES, metric))
    with Reads() as reads:
        validation.values(bank.template, bank.main)
    # the counts of all images and heads; or the logits, from which the CPU computes the rest
    assert reads.found == [("tolist", 1)] if metric == "accuracy" else reads.found[0] == ("cpu", 3)


def test_rows_are_drawn_once_per_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials share them: 4 jobs of 2 seeds."""
    jobs = [job_of(held_out=0, seed=seed, split=JOBS[0].split, lr=lr) for lr in (0.1, 0.2) for seed in (0, 1)]
    drawn, indices = [], PerDomainSampler.indices
    monkeypatch.setattr(
        PerDomainSampler, "indices", lambda self, *steps: (drawn.append(self.seed), indices(self, *steps))[1]
    )
    first = next(iter(batches(jobs, digits())))
    assert drawn == [0, 1]
    assert torch.equal(first.row[0], first.row[2]) and torch.equal(first.row[1], first.row[3])
    assert not torch.equal(first.row[0], first.row[1])


SGD = Training(batch_size=8, optimizer="sgd", momentum=0.0)


@cache
def viewed(count: int = 2) -> CachedData:
    """Digits, and `count` views of their features, each moved by a noise of its own."""
    data = digits()
    plain = data.features[torch.arange(len(data.annotations.labels))]
    generator = torch.Generator().manual_seed(1)
    views = [plain + 0.3 * torch.randn(plain.shape, generator=generator) for _ in range(count)]
    return dataclasses.replace(data, features=of_passes([plain, *views]))


def of_passes(passes: list[Tensor], rows_per_shard: int | None = None) -> Features:
    """`passes`: the plain one and the views, [N,K] each."""
    shards = [shard for one in passes for shard in one.split(rows_per_shard or len(one))]
    return Features(shards, torch.arange(sum(map(len, passes))).view(len(passes), -1))


def test_views_are_drawn_uniformly_and_independently() -> None:
    count = 3
    [job] = jobs = [under(SGD, job_of(steps=600))]
    drawn = torch.cat([1 + integers(job.seed, s, Stream.VIEW, torch.arange(24), count)[None] for s in range(600)])
    found = torch.stack([batch.x[0] for batch in batches(jobs, viewed(count))])
    rows = PerDomainSampler(job.split.train, 8, job.seed).indices(0, 600)
    assert torch.equal(found, viewed(count).features.of_views(rows, drawn))
    assert chisquare(drawn.flatten().bincount()[1:].numpy()).pvalue > 1e-3
    pairs = (count * (drawn[:, :-1] - 1) + drawn[:, 1:] - 1).flatten()  # neighbours of a batch
    assert chisquare(pairs.bincount().numpy()).pvalue > 1e-3
    times = (count * (drawn[:-1] - 1) + drawn[1:] - 1).flatten()  # one place at neighbouring steps
    assert chisquare(times.bincount().numpy()).pvalue > 1e-3


def test_a_head_draws_the_same_alone_and_among_others() -> None:
    jobs = [under(SGD, job_of(held_out=h % 4, seed=h // 2, steps=300)) for h in range(6)]
    together = list(batches(jobs, viewed()))
    for h, job in enumerate(jobs):
        for number, batch in enumerate(batches([job], viewed())):
            assert torch.equal(batch.x[0], together[number].x[h])
    assert not torch.equal(together[0].x[0], together[0].x[2])


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
def test_evaluations_and_solvers_read_the_plain_view(metric: str) -> None:
    jobs, criteria = [job_of(), job_of(held_out=1)], Criteria(("train_val",), metric)
    weight = torch.randn(2, 10, viewed().features.width, generator=torch.Generator().manual_seed(0))
    model, state = jobs[0].new_method(), {"head.weight": weight, "head.bias": torch.zeros(2, 10)}
    plain, other = (BankValidation(jobs, data, criteria).values(model, state) for data in (digits(), viewed()))
    assert plain == other
    job = job_of(LinearProbe, steps=1)
    first, second = (solve(job, data.features, data.annotations, criteria) for data in (digits(), viewed()))
    assert first.course == second.course
    states = [solved.selected["train_val"].state["head.weight"] for solved in (first, second)]
    assert torch.equal(*states)


@pytest.mark.parametrize("views", [0, 2])
def test_features_from_files_train_to_the_same_bits(views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of three steps, the images that selection looks at read again in blocks at each evaluation."""
    from xdm_ft.features import cache as feature_cache

    data = viewed() if views else digits()
    rows = torch.arange(len(data.annotations.labels))
    monkeypatch.setattr(data_module, "KEEP_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(data_module, "READ_BYTES", 4 * data.features.width * 24 * 2 * 3)
    passes = [data.features.of_views(rows, torch.full_like(rows, v)) for v in range(views + 1)]
    monkeypatch.setattr(feature_cache, "MEMORY_FRACTION", 0.0)
    mapped = dataclasses.replace(data, features=of_passes(passes, 500))
    assert data.features.in_memory and not mapped.features.in_memory
    jobs = [job_of(XDomainMix, seed=s, steps=40) for s in (0, 1)]
    for one, other in zip(train(jobs, data=data), train(jobs, data=mapped), strict=True):
        assert one.course == other.course
        a, b = one.selected["train_val"], other.selected["train_val"]
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)


def test_selection_in_blocks_and_by_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one piece, to rounding."""
    jobs = [job_of(held_out=h, seed=h) for h in range(4)]
    rules = ["train_val", "oracle"]
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((4, 10, digits().features.width), (4, 10)))
    whole = BankValidation(jobs, digits(), Criteria(tuple(rules), "nll"))
    model, state = jobs[0].make(jobs[0].setup).eval(), {"head.weight": weight, "head.bias": bias}
    expected = whole.values(model, state)
    monkeypatch.setattr(data_module, "KEEP_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(data_module, "READ_BYTES", 4 * digits().features.width * 100)
    monkeypatch.setattr(data_module, "VALUES_PER_READING", 10 * len(whole.rows) * 3)  # three heads, then one
    blocks = BankValidation(jobs, digits(), Criteria(tuple(rules), "nll"))
    assert whole.loaded is not None and blocks.loaded is None
    for one, other in zip(expected, blocks.values(model, state), strict=True):
        assert one is not None and other is not None and one.keys() == set(rules)
        assert one == pytest.approx(other, rel=1e-6)
    model.load_state_dict({name: value[0] for name, value in state.items()}, strict=False)
    rows = torch.randperm(1000, generator=generator)
    monkeypatch.setattr(data_module, "PREDICTOR_BYTES", 0)
    in_blocks = data_module.CachedPredictor(jobs[0], digits().features).logits(model.state_dict(), rows)
    torch.testing.assert_close(in_blocks, F.linear(digits().features[rows], weight[0], bias[0]))


@pytest.mark.parametrize("heads", [1, 5, 33, 70])
def test_distinct_rows_are_torchs(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    kinds = torch.rand(9, heads, generator=generator) < 0.5
    looks = kinds[torch.randint(9, (200,), generator=generator)]
    expected = looks.unique(dim=0, return_inverse=True)
    assert all(torch.equal(a, b) for a, b in zip(data_module.distinct_rows(looks), expected, strict=True))
