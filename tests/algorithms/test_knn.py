"""kNN's candidates and their order; with random features kNN and prototypes find nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from bank_problems import CLASSES, WIDTH, digits, job_of

from xdm_ft.algorithms.knn import KNN
from xdm_ft.algorithms.prototypes import Prototypes
from xdm_ft.features.cache import Features
from xdm_ft.heads.neighbours import Neighbours
from xdm_ft.runtime.tensors import Batch, Criteria
from xdm_ft.training import Trained
from xdm_ft.training.bank.data import CachedData, cached_logits
from xdm_ft.training.solvers import solve

METHODS = {KNN: {"head": Neighbours}, Prototypes: {}}


def solved(method: Any, data: CachedData, **settings: Any) -> Trained:
    job = job_of(method, setup=METHODS[method], **settings)
    return solve(job, data.features.normalized(), data.annotations, Criteria(("train_val", "oracle"), "accuracy"))


def accuracy(method: Any, data: CachedData, split: str, trained: Trained) -> float:
    job = trained.job
    model, rows = job.make(job.setup), job.split.evaluation[split]
    model.load_state_dict(trained.selected["train_val"].state)
    logits = cached_logits(data.features.normalized(), rows, model)
    return float((logits.argmax(1) == data.annotations.labels[rows]).float().mean())


def test_candidates_run_from_the_smoothest() -> None:
    data, job = digits(), job_of(KNN, setup=METHODS[KNN], neighbours=(1, 10), temperatures=(0.1, 1.0))
    solver, rows = job.make(job.setup), torch.cat(job.split.train)
    z = data.features[rows]
    batch = torch.arange(len(rows))
    found = list(solver.solve(z, Batch(z, data.annotations.labels[rows], batch % 3, rows, batch)))
    assert [(one.hparams["k"], one.hparams["vote_temperature"]) for one in found] == [
        (10, 1.0), (10, 0.1), (1, 1.0), (1, 0.1),
    ]  # fmt: skip
    assert [one.step for one in found] == [0, 1, 2, 3] and solver.candidates == 4
    assert len({one.head["keys"].data_ptr() for one in found}) == 1, "all candidates share the training features"
    torch.testing.assert_close(found[0].head["keys"].norm(dim=1), torch.ones(len(rows)))


def test_selection_picks_k_by_validation_images() -> None:
    trained = solved(KNN, digits(), neighbours=(1, 5, 200), temperatures=(0.07,))
    values = trained.course["train_val"]
    best = max(values.values())
    assert trained.selected["train_val"].step == min(step for step, value in values.items() if value == best)
    assert len(values) == 3 and len(set(values.values())) > 1


@pytest.mark.parametrize("method", METHODS)
def test_digits_are_found_and_random_features_give_chance(method: Any) -> None:
    """The labels of 450 held-out images, 10 classes: a standard deviation of chance is 0.014."""
    trained = solved(method, digits())
    assert accuracy(method, digits(), "test", trained) > 0.6
    noise = torch.randn(len(digits().annotations.labels), WIDTH, generator=torch.Generator().manual_seed(0))
    random = CachedData(Features([noise]), digits().annotations)
    assert abs(accuracy(method, random, "test", solved(method, random)) - 1 / CLASSES) < 0.05


def test_large_weights_files_are_announced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("xdm_ft.algorithms.knn.LARGE", 1000)
    with caplog.at_level(logging.WARNING, logger="xdm_ft"):
        solved(KNN, digits(), neighbours=(1,), temperatures=(0.1,))
    assert "knn: each of its weights files holds all training features" in caplog.text
