"""Heads that draw among augmented views: which view a place of a batch reads, and what is trained on it."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from bank_problems import digits, job_of, train
from own_training import under
from scipy.stats import chisquare
from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.features.cache import Features
from xdm_ft.protocol.samplers import PerDomainSampler
from xdm_ft.runtime.randomness import Stream, integers
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Training
from xdm_ft.training.bank import data as data_module
from xdm_ft.training.bank import validation
from xdm_ft.training.bank.data import CachedData, batches
from xdm_ft.training.bank.step import stack, step
from xdm_ft.training.bank.validation import BankValidation
from xdm_ft.training.solvers import solve

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


def drawn_by_hand(job: Job, number: int, count: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels and rows of a step."""
    rows = PerDomainSampler(job.split.train, 8, job.seed).indices(number, number + 1)[0]
    view = 1 + integers(job.seed, number, Stream.VIEW, torch.arange(len(rows)), count)
    every = torch.stack([viewed(count).features.of_views(rows, torch.full_like(rows, v)) for v in range(count + 1)])
    return every[view, torch.arange(len(rows))], viewed(count).annotations.labels[rows], rows


def test_a_head_on_views_is_the_naive_loop_over_the_same_view_rows() -> None:
    jobs = [under(SGD, job_of(held_out=h, seed=s, steps=20, lr=0.01)) for h, s in ((0, 0), (2, 5))]
    bank = stack(jobs, torch.device("cpu"))
    for number, batch in enumerate(batches(jobs, viewed())):
        step(bank, batch, number)
    for head, job in enumerate(jobs):
        model = job.make(job.setup)
        assert isinstance(model, Algorithm)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=job.training.lr)
        for number in range(20):
            z, y, _ = drawn_by_hand(job, number)
            optimizer.zero_grad()
            F.cross_entropy(model.head(z), y).backward()  # domains are equally large: both loss averages agree
            optimizer.step()
        torch.testing.assert_close(bank.main["head.weight"][head], model.head.weight.detach(), rtol=1e-5, atol=1e-6)


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


def test_rows_batches_and_starts_are_those_of_the_plain_view() -> None:
    jobs = [under(SGD, job_of(steps=5))]
    for plain, other in zip(batches(jobs, digits()), batches(jobs, viewed()), strict=True):
        assert torch.equal(plain.index, other.index) and torch.equal(plain.y, other.y)
        assert not torch.equal(plain.x, other.x)


def test_both_passes_of_sam_see_the_same_views() -> None:
    jobs = [under(SGD, job_of(held_out=0, steps=1, sharpness=SAM(rho=0.5), lr=0.3))]
    bank = stack(jobs, torch.device("cpu"))
    [batch] = batches(jobs, viewed())
    step(bank, batch, 0)
    model = jobs[0].make(jobs[0].setup)
    assert isinstance(model, Algorithm)
    z, y, _ = drawn_by_hand(jobs[0], 0)
    parameters = list(model.head.parameters())
    first = torch.autograd.grad(F.cross_entropy(model.head(z), y), parameters)
    norm = sum(gradient.square().sum() for gradient in first).sqrt()
    moved = [(p + 0.5 * g / norm).detach().requires_grad_() for p, g in zip(parameters, first, strict=True)]
    second = torch.autograd.grad(F.cross_entropy(F.linear(z, *moved), y), moved)
    torch.testing.assert_close(
        bank.main["head.weight"][0], (parameters[0] - 0.3 * second[0]).detach(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("metric", ["accuracy", "nll"])
def test_evaluation_reads_the_plain_view(metric: str) -> None:
    jobs = [job_of(), job_of(held_out=1)]
    weight = torch.randn(2, 10, viewed().features.width, generator=torch.Generator().manual_seed(0))
    model, state = jobs[0].make(jobs[0].setup), {"head.weight": weight, "head.bias": torch.zeros(2, 10)}
    plain, other = (BankValidation(jobs, data, Criteria(("train_val",), metric)) for data in (digits(), viewed()))
    assert plain.values(model, state) == other.values(model, state)


@pytest.mark.slow
def test_training_on_views_ends_elsewhere_and_still_learns() -> None:
    for method in (None, XDomainMix):
        job = job_of(steps=200) if method is None else job_of(method, steps=200)
        plain, other = (train([job], data=data)[0] for data in (digits(), viewed()))
        one, two = (trained.selected["train_val"].state["head.weight"] for trained in (plain, other))
        assert not torch.equal(one, two)
        assert max(other.course["train_val"].values()) > 0.8
        again = train([job], data=viewed())[0]
        assert torch.equal(again.selected["train_val"].state["head.weight"], two)


def test_solvers_read_the_plain_view() -> None:
    job = job_of(LinearProbe, steps=1)
    found = [
        solve(job, data.features, data.annotations, Criteria(("train_val",), "accuracy")).selected["train_val"].state
        for data in (digits(), viewed())
    ]
    assert torch.equal(found[0]["head.weight"], found[1]["head.weight"])


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
    monkeypatch.setattr(validation, "VALUES_PER_READING", 10 * len(whole.rows) * 3)  # three heads, then one
    blocks = BankValidation(jobs, digits(), Criteria(tuple(rules), "nll"))
    assert whole.loaded is not None and blocks.loaded is None
    for one, other in zip(expected, blocks.values(model, state), strict=True):
        assert one is not None and other is not None and one.keys() == set(rules)
        assert one == pytest.approx(other, rel=1e-6)
    model.load_state_dict({name: value[0] for name, value in state.items()}, strict=False)
    rows = torch.randperm(1000, generator=generator)
    in_blocks = data_module.cached_logits(digits().features, rows, model)
    torch.testing.assert_close(in_blocks, F.linear(digits().features[rows], weight[0], bias[0]))


@pytest.mark.parametrize("heads", [1, 5, 33, 70])
def test_distinct_rows_are_torchs(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    kinds = torch.rand(9, heads, generator=generator) < 0.5
    looks = kinds[torch.randint(9, (200,), generator=generator)]
    expected = looks.unique(dim=0, return_inverse=True)
    assert all(torch.equal(a, b) for a, b in zip(validation.distinct_rows(looks), expected, strict=True))
