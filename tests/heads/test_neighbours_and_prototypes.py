"""kNN and prototypes: heads of stored or averaged training features, against loops over images."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bank_problems import digits, job_of
from scipy.optimize import minimize_scalar
from torch import Tensor

from xdm_ft.algorithms import Candidate, Setup
from xdm_ft.algorithms.knn import KNN
from xdm_ft.algorithms.prototypes import Prototypes, best_scale, class_means
from xdm_ft.core import Batch, Criteria, Task
from xdm_ft.heads import neighbours
from xdm_ft.heads.neighbours import NeighbourHead
from xdm_ft.training import Trained
from xdm_ft.training.bank.data import CachedData
from xdm_ft.training.bank.train import solve

CLASSES, WIDTH, IMAGES = 3, 5, 20
SOLVERS = {KNN: {"head": NeighbourHead}, Prototypes: {}}


def keys(seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(IMAGES, WIDTH, generator=torch.Generator().manual_seed(seed)))


def labels() -> Tensor:
    return torch.arange(IMAGES) * 7 % CLASSES


def queries() -> Tensor:
    return 3 * torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(9))


def head(k: int, temperature: float = 0.07, seed: int = 0) -> NeighbourHead:
    made = NeighbourHead(WIDTH, CLASSES, 0, 0)
    state = {"keys": keys(seed), "labels": labels(), "k": torch.tensor(k), "temperature": torch.tensor(temperature)}
    made.load_state_dict(state)
    return made


def votes(z: Tensor, k: int, temperature: float) -> list[list[float]]:
    """Probabilities of each image, in float64."""
    rows = []
    for image in z.double():
        cosines = [float(image @ key / image.norm()) for key in keys().double()]
        nearest = sorted(range(IMAGES), key=lambda i, of=cosines: -of[i])[:k]
        of_classes = [0.0] * CLASSES
        for i in nearest:
            of_classes[int(labels()[i])] += math.exp(cosines[i] / temperature)
        count = min(k, IMAGES)
        rows.append([(count * v / sum(of_classes) + 1 / CLASSES) / (count + 1) for v in of_classes])
    return rows


@pytest.mark.parametrize("temperature", [0.02, 1.0])
def test_the_vote_is_that_of_a_loop(temperature: float) -> None:
    for k in (1, 4, IMAGES, 100):
        probabilities = head(k, temperature)(queries()).exp()
        torch.testing.assert_close(probabilities, torch.tensor(votes(queries(), k, temperature)), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(probabilities.sum(1), torch.ones(11))
    assert torch.equal(head(1)(keys()).argmax(1), labels()), "an image of the training set finds itself"


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, vote = head(4)(queries()), neighbours.vote
    monkeypatch.setattr(neighbours, "VALUES_AT_ONCE", 3 * IMAGES)
    sizes = list[int]()
    monkeypatch.setattr(neighbours, "vote", lambda z, *rest: (sizes.append(len(z)), vote(z, *rest))[1])
    torch.testing.assert_close(head(4)(queries()), at_once)
    assert sizes == [3, 3, 3, 2]


def test_stacked_heads_are_the_heads_one_by_one_each_with_its_own_k() -> None:
    heads = [head(k, temperature, seed) for seed, (k, temperature) in enumerate([(1, 0.1), (5, 0.1), (5, 1.0)])]
    state = {name: torch.stack([one.state_dict()[name] for one in heads]) for name in heads[0].state_dict()}
    stacked = NeighbourHead(WIDTH, CLASSES, 0, 0).stacked_logits(queries(), state)  # [n,H,C]
    for h, one in enumerate(heads):
        torch.testing.assert_close(stacked[:, h], one(queries()))


@pytest.mark.parametrize("assign", [False, True])
def test_it_loads_any_number_of_images_and_refuses_another_width(assign: bool) -> None:
    given, other = head(4), head(2)
    other.load_state_dict({**given.state_dict(), "keys": keys()[:7], "labels": labels()[:7]}, assign=assign)
    assert len(other.keys) == len(other.labels) == 7 and other.nearest == 4
    torch.testing.assert_close(copy.deepcopy(other)(queries()), other(queries()))
    with pytest.raises(RuntimeError, match="size mismatch for keys"):
        NeighbourHead(WIDTH + 1, CLASSES, 0, 0).load_state_dict(given.state_dict())


def test_without_training_images_all_classes_are_equal_and_zeros_have_finite_gradients() -> None:
    equal = torch.full((11, CLASSES), 1 / CLASSES)
    torch.testing.assert_close(NeighbourHead(WIDTH, CLASSES, 0, 0)(queries()).exp(), equal)
    z = torch.zeros(3, WIDTH, requires_grad=True)
    head(4)(z).sum().backward()
    assert z.grad is not None and z.grad.isfinite().all()


def solved(method: Any, data: CachedData, **settings: Any) -> Trained:
    job = job_of(method, setup=SOLVERS[method], **settings)
    return solve(job, data.features.normalized(), data.annotations, Criteria(("train_val", "oracle"), "accuracy"))


def test_candidates_of_knn_run_from_the_smoothest() -> None:
    data, job = digits(), job_of(KNN, setup=SOLVERS[KNN], neighbours=(1, 10), temperatures=(0.1, 1.0))
    solver, rows = job.make(job.setup), torch.cat(job.split.train)
    position = torch.arange(len(rows))
    batch = Batch(data.features[rows], data.annotations.labels[rows], position % 3, rows, position)
    candidates = list(solver.solve(batch.x, batch))
    pairs = [(one.hparams["k"], one.hparams["vote_temperature"]) for one in candidates]
    assert pairs == [(10, 1.0), (10, 0.1), (1, 1.0), (1, 0.1)]
    assert [one.step for one in candidates] == [0, 1, 2, 3] and solver.candidates == 4
    assert len({one.head["keys"].data_ptr() for one in candidates}) == 1, "they share the training features"
    torch.testing.assert_close(candidates[0].head["keys"].norm(dim=1), torch.ones(len(rows)))


def test_selection_picks_k_by_validation_images_and_large_weights_files_are_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("xdm_ft.algorithms.knn.LARGE", 1000)
    with caplog.at_level(logging.WARNING, logger="xdm_ft"):
        trained = solved(KNN, digits(), neighbours=(1, 5, 200), temperatures=(0.07,))
    assert "knn: each of its weights files holds all training features" in caplog.text
    values = trained.course["train_val"]
    best = max(values.values())
    assert trained.selected["train_val"].step == min(step for step, value in values.items() if value == best)
    assert len(values) == 3 and len(set(values.values())) > 1


Y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 0, 1])  # nothing of class 3
DOMAIN = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])  # class 2 in one domain only


def ten() -> Batch:
    z = F.normalize(torch.randn(len(Y), WIDTH, generator=torch.Generator().manual_seed(0)), dim=1)
    return Batch(z, Y, DOMAIN, torch.arange(len(Y)), torch.arange(len(Y)))


def prototypes(average: str) -> list[Tensor]:
    """The normalised mean of classes 0, 1, 2."""
    z, means = ten().x.double(), []
    for c in range(3):
        if average == "sample":
            mean = torch.stack([z[i] for i in range(len(Y)) if Y[i] == c]).mean(0)
        else:
            parts = [[z[i] for i in range(len(Y)) if Y[i] == c and DOMAIN[i] == d] for d in range(2)]
            mean = torch.stack([torch.stack(part).mean(0) for part in parts if part]).mean(0)
        means.append(mean / mean.norm())
    return means


def prototype_head(average: Any = "domain", weight: Tensor | None = None, **settings: Any) -> Candidate:
    task = Task(tuple("abcd"), ("p", "q"))
    setup = Setup(task, WIDTH, steps=0, seed=0, loss_average=average, class_weight=weight)
    [candidate] = Prototypes(setup, **settings).solve(ten().x, ten())
    return candidate


@pytest.mark.parametrize("rows", [3, 4096])
@pytest.mark.parametrize("average", ["domain", "sample"])
def test_the_means_are_those_of_a_loop(average: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are the scaled cosines; a class without images never wins."""
    monkeypatch.setattr("xdm_ft.algorithms.prototypes.ROWS", rows)
    means, made = class_means(ten().x, ten(), 4, 2, average), prototype_head(average, scale=7.0).head
    logits = ten().x @ made["weight"].T + made["bias"]
    for c, expected in enumerate(prototypes(average)):
        torch.testing.assert_close(F.normalize(means, dim=1)[c], expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(logits[:, c], 7 * (ten().x.double() @ expected).float(), rtol=1e-4, atol=1e-5)
    assert not means[3].any()
    torch.testing.assert_close(logits[:, 3], torch.full((len(Y),), -7.0))


def test_the_scale_has_the_lowest_loss_within_its_range() -> None:
    """Scipy finds the same minimum of the loss as it is written."""
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(300) % 4
    cosines = 0.3 * torch.rand(300, 4, generator=generator)
    cosines[torch.arange(300), y] += 0.1
    weight = torch.rand(300, generator=generator, dtype=torch.float64)

    def loss(scale: float) -> float:
        return float(F.cross_entropy(scale * cosines.double(), y, reduction="none") @ weight)

    scale = best_scale(cosines, y, weight)
    assert scale == pytest.approx(minimize_scalar(loss, bounds=(1, 100), method="bounded").x, rel=1e-3)
    assert 2 < scale < 60
    y, weight = torch.arange(8) % 2, torch.ones(8, dtype=torch.float64)
    right = F.one_hot(y, 2).float()
    assert best_scale(right, y, weight) == pytest.approx(100)  # separated: no scale is too large
    assert best_scale(1 - right, y, weight) == pytest.approx(1)  # wrong: the smaller the better


def test_the_scale_follows_class_weights() -> None:
    of_class = torch.tensor([5.0, 0.1, 0.1, 1.0])
    scale = prototype_head().hparams["scale"]
    assert prototype_head(weight=of_class).hparams["scale"] != pytest.approx(scale, rel=1e-3)
