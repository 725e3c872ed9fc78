"""Domain shift: values by hand, loops over samples, what moving does to a domain, the second pass of SAM."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from recorded import CLASSES, DOMAINS, SETUP, WIDTH, random_batch, same_gradients
from torch import Tensor
from torch.func import vmap

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.domain_shift import DomainShift, draw_domains, shift
from xdm_ft.algorithms.erm import ERM
from xdm_ft.core import Batch
from xdm_ft.runtime.randomness import Stream, uniform

BATCHES = [[0, 0, 1, 1, 2, 2, 2], [2, 0, 2, 0, 0, 2], [0, 1, 2] * 4, [1] * 5]


def one_hot(values: list[int | None], number: int) -> Tensor:
    """Rows of 0 for None."""
    return torch.stack([torch.arange(number) == (-1 if value is None else value) for value in values]).long()


def naive_shift(z: Tensor, domain: list[int], after: list[int | None], y: list[int] | None) -> Tensor:
    """By a loop over samples; `y`: by class too."""
    key = list(zip(domain, y or [0] * len(domain), strict=True))

    def mean(d: int, c: int | None) -> Tensor:
        return torch.stack([z[j] for j, (e, other) in enumerate(key) if e == d and c in (None, other)]).mean(0)

    moved = []
    for i, d in enumerate(after):
        if d is None:
            moved.append(z[i])
        else:
            c = key[i][1] if (d, key[i][1]) in key else None
            moved.append(z[i] - mean(domain[i], c) + mean(d, c))
    return torch.stack(moved)


def drawn(algorithm: DomainShift, batch: Batch, step: int) -> list[int | None]:
    """d′ of every sample, by a loop."""
    u = uniform(algorithm.seed, step, Stream.TARGET_DOMAIN, batch.position).tolist()
    others = [sorted({*batch.domain.tolist()} - {d}) for d in batch.domain.tolist()]
    return [of[int(v * len(of))] if of else None for of, v in zip(others, u, strict=True)]


def test_a_shift_by_hand() -> None:
    """Means of domains 0, 1: (1, 1), (10, 0); domain 2 is empty."""
    z = torch.tensor([[0.0, 1.0], [2.0, 1.0], [9.0, 0.0], [11.0, 0.0]])
    before = one_hot([0, 0, 1, 1], 3)
    moved = shift(z, before, one_hot([1, None, 0, 0], 3))
    assert moved.tolist() == [[9, 0], [2, 1], [0, 1], [2, 1]]
    # classes 0 1 0 0: of domain 0 class 0 has mean (0, 1) and class 1 (2, 1), which domain 1 lacks
    by_class = shift(z, before, one_hot([1, 1, 0, 0], 3), one_hot([0, 1, 0, 0], 2))
    assert by_class.tolist() == [[10, 0], [11, 0], [-1, 1], [1, 1]]


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("domain", BATCHES)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_a_loop_over_samples(domain: list[int], per_class: bool, weighted: bool) -> None:
    """With its gradients, by features too: they flow through the means."""
    weight = torch.tensor([0.5, 1.0, 2.0]) if weighted else None
    algorithm = DomainShift(Setup(SETUP.task, WIDTH, 100, seed=3, class_weight=weight), per_class=per_class)
    for step in (0, 50):
        batch = random_batch(domain)
        z = batch.x.clone().requires_grad_()
        after = drawn(algorithm, batch, step)
        moved = naive_shift(z, domain, after, batch.y.tolist() if per_class else None)
        both = [F.cross_entropy(algorithm.head(v), batch.y, reduction="none") for v in (z, moved)]
        expected = algorithm.average((both[0] + both[1]) / 2, batch)
        losses = algorithm(z, batch, step)
        torch.testing.assert_close(losses.total, expected)
        same_gradients(losses.total, expected, [z, *algorithm.head.parameters()])
        assert losses.logs["without_other_domain"] == float(after[0] is None) and losses.auxiliary == 0


def test_with_one_domain_it_is_erm() -> None:
    batch = random_batch([1] * 6)
    for per_class in (False, True):
        losses = DomainShift(SETUP, per_class=per_class)(batch.x, batch, 0)
        assert losses.logs["without_other_domain"] == 1
        torch.testing.assert_close(losses.total, ERM(SETUP)(batch.x, batch, 0).total)
    before, after = draw_domains(batch.domain, torch.rand(6), DOMAINS)
    assert torch.equal(shift(batch.x, before, after), batch.x) and not after.any()


@given(st.lists(st.integers(0, DOMAINS - 1), min_size=2, max_size=12), st.integers(0, 2**31))
def test_what_moves_takes_the_other_mean_and_keeps_its_spread(domain: list[int], seed: int) -> None:
    """A whole domain moved to one d′ has its mean, and its own differences; by class too it is the loop."""
    generator, target = torch.Generator().manual_seed(seed), (domain[0] + 1) % DOMAINS
    z = torch.randn(len(domain), 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (len(domain),), generator=generator)
    moves, there = (torch.tensor(domain) == d for d in (domain[0], target))
    after = [target if d == domain[0] and target in domain else None for d in domain]
    before_after = one_hot(list(domain), DOMAINS), one_hot(after, DOMAINS)
    moved = shift(z, *before_after)
    assert torch.equal(moved[~moves], z[~moves])
    if there.any():
        torch.testing.assert_close(moved[moves].mean(0), z[there].mean(0))
        torch.testing.assert_close(moved[moves] - moved[moves].mean(0), z[moves] - z[moves].mean(0))
    by_class = shift(z, *before_after, F.one_hot(y, CLASSES))
    torch.testing.assert_close(by_class, naive_shift(z, domain, after, y.tolist()))


def test_the_other_domain_is_uniform_and_in_the_batch() -> None:
    domain = torch.tensor([0, 1, 3, 1]).repeat(3000)  # nothing of domain 2
    u = uniform(7, 3, Stream.TARGET_DOMAIN, torch.arange(len(domain)))
    before, after = draw_domains(domain, u, 4)
    assert torch.equal(before.argmax(1), domain) and after.sum(1).unique().tolist() == [1]
    pairs = (before.T @ after).double()
    assert not pairs.diagonal().any() and not pairs[:, 2].any()
    shares = pairs[[0, 1, 3]] / pairs[[0, 1, 3]].sum(1, keepdim=True)
    torch.testing.assert_close(shares[shares > 0], torch.full((6,), 0.5, dtype=torch.float64), atol=0.03, rtol=0)
    largest = torch.full((len(domain),), 1 - 2**-24)  # times n, the float32 product must not be n
    assert draw_domains(domain, largest, 4)[1].sum(1).unique().tolist() == [1]


def test_the_second_pass_repeats_the_domains_and_takes_the_means_anew() -> None:
    """The loss at other features is that of the first pass's draw at their own means."""
    algorithm, batch = DomainShift(SETUP), random_batch(BATCHES[0])
    first = algorithm(batch.x, batch, 5)
    z = batch.x.cos() * 3  # features at the perturbed weights
    second = algorithm(z, batch, 5, first.first_pass_draws)
    moved = naive_shift(z, BATCHES[0], drawn(algorithm, batch, 5), None)
    both = [F.cross_entropy(algorithm.head(v), batch.y, reduction="none") for v in (z, moved)]
    torch.testing.assert_close(second.total, algorithm.average((both[0] + both[1]) / 2, batch))


def test_by_class_too_a_head_is_the_same_alone_and_stacked() -> None:
    domain, y = torch.tensor([BATCHES[0]] * 5), torch.randint(0, CLASSES, (5, 7))
    z, u = torch.randn(5, 7, WIDTH), torch.rand(5, 7)

    def of_head(z: Tensor, domain: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return shift(z, *draw_domains(domain, u, DOMAINS), F.one_hot(y, CLASSES))

    alone = torch.stack([of_head(*fields) for fields in zip(z, domain, y, u, strict=True)])
    torch.testing.assert_close(vmap(of_head)(z, domain, y, u), alone)
