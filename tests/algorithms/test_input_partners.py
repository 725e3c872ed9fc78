"""Partners of LISA and Mixup, from the batch or from all training samples, against loops over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixup import Mixup, draw_partners, pick_other
from xdm_ft.runtime.tensors import InputPartners, Samples, Task

STEPS, BATCH, TRAINING = 50, 12, 40
TASK = Task(tuple("abcde"), tuple("xyz"))


def samples(*shape: int, seed: int = 0, classes: int = 5) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randperm(1000, generator=generator)[: shape[-1]].expand(shape)
    y, domain = (torch.randint(high, shape, generator=generator) for high in (classes, 3))
    return Samples(row, y, domain)


def valid(sample: tuple[int, int], pool: Samples, step: int, same: str | None, other: str | None) -> list[int]:
    """Places in the pool, by a loop."""
    found = []
    for place in range(pool.y.shape[-1]):
        theirs = {name: int(getattr(pool, name)[..., place][step] if pool.y.ndim == 2 else getattr(pool, name)[place])
                  for name in ("y", "domain")}  # fmt: skip
        own = dict(zip(("y", "domain"), sample, strict=True))
        if (same is None or theirs[same] == own[same]) and (other is None or theirs[other] != own[other]):
            found.append(place)
    return found


@pytest.mark.parametrize("source", ["batch", "all"])
@pytest.mark.parametrize("same, other", [("y", "domain"), ("domain", "y"), (None, "domain"), (None, None)])
def test_partners_are_uniform_over_the_valid_samples(source: str, same: str | None, other: str | None) -> None:
    drawn, training = samples(STEPS, BATCH), samples(TRAINING, seed=1, classes=4)  # class 4 has no partner among all
    pool = drawn if source == "batch" else training
    fractions = torch.linspace(0, 0.999, 60)
    chosen = [draw_partners(drawn, training, torch.full((STEPS, BATCH), u), source, same, other) for u in fractions]
    alone = 0
    for step in range(0, STEPS, 10):
        for i in range(BATCH):
            allowed = valid((int(drawn.y[step, i]), int(drawn.domain[step, i])), pool, step, same, other)
            alone += not allowed
            for partners in chosen:
                assert bool(partners.found[step, i]) == bool(allowed)
                row, place = int(partners.row[step, i]), int(partners.place[step, i])
                if not allowed:
                    assert (row, place) == (int(drawn.row[step, i]), i)
                elif source == "batch":
                    assert place in allowed and row == int(drawn.row[step, place])
                else:
                    assert place == BATCH + i and row in [int(training.row[j]) for j in allowed]
            if allowed:  # every one of them, each as often as the others but for rounding
                rows = torch.stack([partners.row[step, i] for partners in chosen])
                counts = rows.unique(return_counts=True)[1]
                assert len(counts) == len(allowed) and counts.max() - counts.min() <= 2
    expected = (source, same) == ("all", "y") or (source, same, other) == ("batch", "y", "domain")
    assert (alone > 0) == expected


def test_the_largest_draw_does_not_leave_the_pool() -> None:
    u = torch.full((1, 4), 1 - 2**-24)
    y, domain = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 0, 1]])
    place, found = pick_other(y, domain, y, domain, u)
    assert place.tolist() == [[1, 0, 3, 2]] and found.all()


def choose(algorithm: Algorithm, steps: Tensor, seed: int = 0) -> tuple[Samples, Samples, InputPartners]:
    drawn, training = samples(len(steps), BATCH, seed=seed), samples(TRAINING, seed=1)
    partners = algorithm.input_partners(drawn, training, steps)
    assert partners is not None
    return drawn, training, partners


@pytest.mark.parametrize("partners", ["batch", "all"])
@pytest.mark.parametrize("p_sel", [0.0, 0.5, 1.0])
def test_lisa_picks_by_class_or_by_domain_for_a_whole_batch(p_sel: float, partners: str) -> None:
    drawn, training, chosen = choose(LISA(Setup(TASK, 8, 100, 0), p_sel=p_sel, partners=partners), torch.arange(STEPS))
    label_of = dict(
        zip(training.row.tolist(), zip(training.y.tolist(), training.domain.tolist(), strict=True), strict=True)
    )
    intra_label = []
    for step in range(STEPS):
        if partners == "batch":
            theirs = torch.stack([drawn.y[step][chosen.place[step]], drawn.domain[step][chosen.place[step]]], 1)
        else:
            known = [label_of.get(row, (-1, -1)) for row in chosen.row[step].tolist()]
            theirs = torch.tensor(known)
        own = torch.stack([drawn.y[step], drawn.domain[step]], 1)
        equal = (theirs == own)[chosen.found[step]]
        assert len(equal) and (equal[:, 0] != equal[:, 1]).all() and len(equal[:, 0].unique()) == 1
        intra_label.append(bool(equal[0, 0]))
    share = sum(intra_label) / STEPS
    assert share == p_sel if p_sel != 0.5 else 0.2 < share < 0.8


@pytest.mark.parametrize("method", [LISA, Mixup])
def test_partners_of_a_step_do_not_depend_on_which_steps_are_asked_for(method: type[Algorithm]) -> None:
    algorithm, whole = method(Setup(TASK, 8, 100, 0)), samples(STEPS, BATCH)
    training, steps = samples(TRAINING, seed=1), torch.arange(STEPS)
    together = algorithm.input_partners(whole, training, steps)
    late = algorithm.input_partners(Samples(*(field[30:] for field in whole)), training, steps[30:])
    assert together is not None and late is not None
    assert all(torch.equal(one[30:], other) for one, other in zip(together, late, strict=True))


def test_mixup_s_partners_in_the_batch_are_a_permutation() -> None:
    _, _, chosen = choose(Mixup(Setup(TASK, 8, 100, 0)), torch.arange(STEPS))
    assert torch.equal(chosen.place.sort().values, torch.arange(BATCH).expand(STEPS, -1))
    assert torch.equal(chosen.found, chosen.place != torch.arange(BATCH))
