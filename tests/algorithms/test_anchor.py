"""The pull of a class head to its start: by hand, beside every method's loss, and with CLAP's strengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_contract import ALGORITHMS, CLASSES, METHODS, STEPS, WIDTH, setup, toy
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm, text_confidence
from xdm_ft.algorithms.erm import ERM
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.training.bank.step import settings_of


def moved(algorithm: Algorithm) -> Algorithm:
    """With other parameters than those that it starts from."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return algorithm


def by_hand(start: nn.Module, end: nn.Module, a: Tensor, same_divisor: bool) -> float:
    """The mean over classes, one class after the other."""
    rows = [(float(w.detach().double().square().sum()), c) for c, w in enumerate(start.weight)]  # type: ignore[arg-type]
    mean, total = sum(length for length, _ in rows) / len(rows), 0.0
    for length, c in rows:
        way = float((end.weight[c] - start.weight[c]).detach().double().square().sum())  # type: ignore[index]
        if hasattr(end, "bias"):
            way += float((end.bias[c] - start.bias[c]).detach() ** 2)  # type: ignore[index]
        total += float(a[c]) * way / (mean if same_divisor else length)
    return total / len(rows)


@pytest.mark.parametrize("head", [Linear, Cosine])
@pytest.mark.parametrize("head_init", ["random", "zero_shot"])
def test_the_pull_is_that_of_the_definition(head: Any, head_init: Any) -> None:
    a, arguments = torch.tensor([0.0, 0.5, 3.0]), {"head": head, "head_init": head_init}
    start, end = ERM(setup(**arguments)), moved(ERM(setup(**arguments, anchor=a)))
    assert float(end.pull().detach()) == pytest.approx(
        by_hand(start.head, end.head, a, head_init == "random"), rel=1e-5
    )
    assert not float(ERM(setup(**arguments, anchor=a)).pull().detach())


def test_one_number_pulls_a_linear_and_a_cosine_head_alike() -> None:
    """A linear head holds s·t, a cosine head t: the same turn of all weights costs the same."""
    pulls = []
    for head in (Linear, Cosine):
        algorithm = ERM(setup(head=head, head_init="zero_shot", anchor=torch.ones(CLASSES)))
        with torch.no_grad():
            algorithm.head.weight *= 1.5  # type: ignore[operator]
        pulls.append(float(algorithm.pull().detach()))
    assert pulls == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_added_once_to_the_loss_of_every_method_and_to_nothing_else(name: str) -> None:
    a = torch.tensor([0.5, 1.0, 2.0])
    plain, anchored = (moved(METHODS[name](setup(anchor=anchor))) for anchor in (None, a))
    batch = toy()
    for step in (0, STEPS - 1):
        first, with_pull = plain(batch.x, batch, step), anchored(batch.x, batch, step)
        pull = anchored.pull()
        torch.testing.assert_close(with_pull.total, first.total + pull)
        torch.testing.assert_close(with_pull.auxiliary, first.auxiliary)
        second = [of(batch.x, batch, step, first.first_pass_draws) for of in (plain, anchored)]
        torch.testing.assert_close(second[1].total, second[0].total + pull)
        assert with_pull.buffers.keys() == first.buffers.keys()
    assert anchored.state_dict().keys() == plain.state_dict().keys(), "weights files hold nothing of it"
    assert settings_of(plain) != settings_of(anchored), "a bank stacks no heads of which some have it"


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=12))
def test_the_strengths_of_clap_are_means_over_a_class(images: list[tuple[int, float]]) -> None:
    y, probability = (torch.tensor(values) for values in zip(*images, strict=True))
    found = text_confidence(probability, y, 5)
    for c in range(5):
        of_class = [p for label, p in images if label == c]
        assert float(found[c]) == pytest.approx(sum(of_class) / len(of_class) if of_class else 0, abs=1e-6)


def test_a_strong_anchor_keeps_the_start_and_none_leaves_it() -> None:
    ends = {}
    for strength in (0.0, 1e5):
        anchor = torch.full((CLASSES,), strength) if strength else None
        algorithm = ERM(setup(head_init="zero_shot", anchor=anchor))
        start = algorithm.head.weight.detach().clone()
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=1e-3)
        for step in range(30):
            batch = toy(step)
            optimizer.zero_grad()
            algorithm(batch.x, batch, step).total.backward()
            optimizer.step()
        ends[strength] = float((algorithm.head.weight.detach() - start).norm())
    assert ends[1e5] < 0.2 * ends[0.0] and WIDTH > CLASSES
