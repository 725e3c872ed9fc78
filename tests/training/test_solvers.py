"""Linear probe and zero-shot: the optimum against scikit-learn and its own gradient; the pick among candidates."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bank_problems import CLASSES, WIDTH, digits, head_logits, job_of, split_of
from torch import Tensor

from xdm_ft.algorithms import Candidate, LossAverage, Setup, mean_loss
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.zero_shot import ZeroShot
from xdm_ft.features.cache import Features
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.tensors import Batch, Criteria, Task
from xdm_ft.training import Job, Trained, balanced_class_weight
from xdm_ft.training.bank.data import CachedData
from xdm_ft.training.solvers import solve

ROOT = Path(__file__).parents[2]
STRENGTHS = (0.3, 1e-2, 1e-4)


def problem(average: LossAverage = "domain") -> tuple[LinearProbe, Tensor, Batch]:
    """A third of the digits, domains of very different sizes."""
    split, data = split_of(0, 0), digits()
    rows = torch.cat([pool[: 40 * (1 + 3 * place)] for place, pool in enumerate(split.train)])
    task = Task(tuple(str(c) for c in range(CLASSES)), split.train_domains)
    setup = Setup(task, WIDTH, steps=0, seed=0, loss_average=average)
    z = data.features[rows]
    batch = Batch(z, data.annotations.labels[rows], split.domain_of[data.annotations.domains[rows]], rows, rows)
    return LinearProbe(setup, strengths=STRENGTHS, tolerance=1e-6), z, batch


def gradient_norm(candidate: Candidate, z: Tensor, batch: Batch, average: LossAverage) -> float:
    """Of the penalised loss as it is written down, in float64."""
    weight, bias = (candidate.head[name].double().requires_grad_() for name in ("weight", "bias"))
    per_sample = F.cross_entropy(z.double() @ weight.T + bias, batch.y, reduction="none")
    loss = mean_loss(per_sample, batch.domain, 3, average) + candidate.hparams["l2"] / 2 * weight.square().sum()
    return max(float(g.abs().max()) for g in torch.autograd.grad(loss, [weight, bias]))


@pytest.mark.parametrize("average", ["domain", "sample"])
def test_every_candidate_is_an_optimum(average: LossAverage) -> None:
    probe, z, batch = problem(average)
    candidates = list(probe.solve(z, batch))
    unit = float(mean_loss(z.square().mean(1), batch.domain, 3, average))  # the mean square, averaged as the loss is
    assert [c.hparams["strength"] for c in candidates] == list(STRENGTHS)
    assert [c.hparams["l2"] for c in candidates] == pytest.approx([strength * unit for strength in STRENGTHS])
    assert [c.step for c in candidates] == [0, 1, 2]
    for candidate in candidates:
        assert gradient_norm(candidate, z, batch, average) < 2e-5
    other = next(iter(problem("sample" if average == "domain" else "domain")[0].solve(z, batch)))
    assert gradient_norm(other, z, batch, average) > 1e-3  # the two averages are two problems


def test_blocks_of_images_have_the_same_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, z, batch = problem()
    whole = [candidate.head for candidate in probe.solve(z, batch)]
    monkeypatch.setattr("xdm_ft.algorithms.linear_probe.BLOCK_BYTES", 8 * WIDTH * 100)  # 100 images
    assert len(z) > 300
    for head, candidate in zip(whole, probe.solve(z, batch), strict=True):
        scale = float(head["weight"].abs().max())
        for name, value in head.items():
            torch.testing.assert_close(candidate.head[name], value, atol=1e-4 * scale, rtol=0)


@pytest.mark.slow
def test_it_needs_little_more_memory_than_its_features() -> None:
    script = """
import torch
from bank_problems import job_of
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.features.cache import Features
from xdm_ft.runtime.tensors import Batch, Criteria
from xdm_ft.runtime.machine import PeakMemory
from xdm_ft.training.solvers import solve
import dataclasses, bank_problems
n, width, classes = 200_000, 512, bank_problems.CLASSES
job = job_of(LinearProbe)
pool = torch.arange(n).chunk(len(job.split.train))
split = dataclasses.replace(job.split, train=tuple(pool), evaluation={"train_val": torch.arange(n, n + 5000)})
setup = dataclasses.replace(job.setup, width=width)
job = dataclasses.replace(job, split=split, setup=setup, make=lambda setup: LinearProbe(setup, strengths=(1.0, 0.3)))
labels = torch.randint(classes, (n + 5000,))
domains = (split.domain_of >= 0).nonzero()[:, 0][torch.arange(n + 5000) % len(pool)]
features = Features([torch.randn(n + 5000, width)]).normalized()
annotations = bank_problems.Annotations(labels, domains, domains)
few = dataclasses.replace(job, split=dataclasses.replace(split, train=tuple(rows[:200] for rows in pool)))
solve(few, features, annotations, Criteria(("train_val",), "accuracy"))  # what libraries set up once
memory = PeakMemory(torch.device("cpu"))
solve(job, features, annotations, Criteria(("train_val",), "accuracy"))
print(memory.peak / (4 * n * width))
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/training")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.3


@pytest.mark.slow
def test_the_optimum_is_scikit_learns() -> None:
    from sklearn.linear_model import LogisticRegression

    probe, z, batch = problem("sample")
    for candidate in probe.solve(z, batch):
        c = 1 / (len(z) * candidate.hparams["l2"])  # their penalty stands beside the sum of the losses
        theirs = LogisticRegression(C=c, tol=1e-6, max_iter=10_000).fit(z.double().numpy(), batch.y.numpy())
        weight, bias = candidate.head["weight"], candidate.head["bias"]
        ours = torch.softmax(z @ weight.T + bias, 1).numpy()
        np.testing.assert_allclose(ours, theirs.predict_proba(z.double().numpy()), atol=2e-3)
        scale = np.abs(theirs.coef_).max()
        np.testing.assert_allclose(weight.numpy(), theirs.coef_, atol=5e-3 * scale)


def test_class_weights_make_it_scikit_learns_balanced_optimum() -> None:
    from sklearn.linear_model import LogisticRegression

    plain, z, batch = problem("sample")
    kept = torch.cat([(batch.y == c).nonzero()[: 5 * (c + 1), 0] for c in range(CLASSES - 1)])  # nothing of the last
    z, batch = z[kept], Batch(z[kept], batch.y[kept], batch.domain[kept], batch.index[kept], batch.place[kept])
    setup = dataclasses.replace(plain.setup, class_weight=balanced_class_weight(batch.y, CLASSES))
    probe = LinearProbe(setup, strengths=STRENGTHS[:2], tolerance=1e-6)
    for candidate in probe.solve(z, batch):
        c = 1 / (len(z) * candidate.hparams["l2"])
        theirs = LogisticRegression(C=c, tol=1e-6, max_iter=10_000, class_weight="balanced")
        theirs.fit(z.double().numpy(), batch.y.numpy())
        logits = z @ candidate.head["weight"].T + candidate.head["bias"]
        # no penalty on the bias: that of the class that is not there falls without end
        ours = torch.softmax(logits[:, : CLASSES - 1], 1).numpy()
        np.testing.assert_allclose(ours, theirs.predict_proba(z.double().numpy()), atol=5e-3)


def test_the_default_tolerance_and_float32_reach_the_optimum() -> None:
    exact, z, batch = problem()
    fast = LinearProbe(exact.setup, strengths=STRENGTHS)
    for quick, slow in zip(fast.solve(z, batch), exact.solve(z, batch), strict=True):
        exactly = slow.head["weight"]
        torch.testing.assert_close(quick.head["weight"], exactly, rtol=0, atol=0.02 * float(exactly.abs().max()))


@pytest.mark.parametrize("scale", [1e-2, 30.0])
def test_the_path_is_the_same_for_every_scale_of_the_features(scale: float) -> None:
    probe, z, batch = problem()
    for here, there in zip(probe.solve(z, batch), probe.solve(z * scale, batch), strict=True):
        torch.testing.assert_close(there.head["weight"] * scale, here.head["weight"], rtol=1e-3, atol=1e-3)


def test_a_strength_given_twice() -> None:
    setup = problem()[0].setup
    first, second, third = LinearProbe(setup, strengths=(1e-2, 1e-2, 1e-3)).solve(*problem()[1:])
    torch.testing.assert_close(first.head["weight"], second.head["weight"], rtol=0, atol=1e-3)
    assert third.hparams["strength"] == 1e-3


def test_more_dimensions_than_images_and_a_constant_dimension() -> None:
    setup = problem()[0].setup
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(30, WIDTH, generator=generator)
    z[:, 0], z[:, 1] = 0, 5
    batch = Batch(z, torch.arange(30) % 3, torch.arange(30) % 2, torch.arange(30), torch.arange(30))
    for candidate in LinearProbe(setup, strengths=(1.0, 1e-6), tolerance=1e-6).solve(z, batch):
        assert gradient_norm(candidate, z, batch, "domain") < 2e-5


def test_stopping_early_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("xdm_ft.algorithms.linear_probe.MOST_ITERATIONS", 2)
    probe, z, batch = problem()
    with caplog.at_level(logging.WARNING, logger="xdm_ft"):
        list(probe.solve(z, batch))
    assert "linear_probe, strength 0.01: stopped at a gradient of" in caplog.text


def solved(job: Job, data: CachedData | None = None, metric: str = "accuracy") -> Trained:
    data = data or digits()
    return solve(job, data.features, data.annotations, Criteria(("train_val", "oracle"), metric))


def test_each_rule_picks_the_best_strength_on_its_images() -> None:
    strengths = (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4)
    trained = solved(job_of(LinearProbe, strengths=strengths), metric="nll")
    data = digits()
    assert trained.failure is None and trained.mixed_steps is None and trained.seconds > 0
    for rule, split in (("train_val", "train_val"), ("oracle", "test_val")):
        selected = trained.selected[rule]
        assert selected.state.keys() == {"head.weight", "head.bias"}
        assert selected.hparams["strength"] == strengths[selected.step]
        rows = trained.job.split.evaluation[split]
        losses = []
        for strength in strengths:
            alone = solved(job_of(LinearProbe, strengths=(strength,)), metric="nll").selected[rule].state
            losses.append(
                float(F.cross_entropy(head_logits(data.features, rows, alone), data.annotations.labels[rows]))
            )
        assert selected.step == int(np.argmin(losses))
    assert 0 < trained.selected["train_val"].step < len(strengths)


def test_of_equally_good_strengths_the_strongest_is_picked() -> None:
    job = job_of(LinearProbe, strengths=(1e-7, 3e-7, 1e-6))
    rows = job.split.evaluation["train_val"][:1]  # one image: every strength is all right or all wrong
    job = dataclasses.replace(
        job, split=dataclasses.replace(job.split, evaluation={"train_val": rows, "test_val": rows})
    )
    selected = solved(job).selected["train_val"]
    assert selected.step == 0 and selected.hparams["strength"] == 1e-6


def test_same_job_same_bits() -> None:
    first, second = (solved(job_of(LinearProbe, strengths=STRENGTHS)).selected["train_val"] for _ in range(2))
    assert first.step == second.step
    assert torch.equal(first.state["head.weight"], second.state["head.weight"])


def test_zero_shot_is_the_text_weight() -> None:
    text = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    job = job_of(ZeroShot, setup={"text_weight": text})
    selected = solved(job).selected["train_val"]
    assert selected.step == 0 and selected.hparams == {}
    rows = torch.tensor([3, 1, 4])
    assert torch.allclose(
        head_logits(digits().features, rows, selected.state), digits().features[rows] @ text.T, atol=1e-4
    )


def test_features_that_are_not_finite_are_a_failure_with_its_reason() -> None:
    data, job = digits(), job_of(LinearProbe)
    z = data.features[torch.arange(len(data.annotations.labels))].clone()
    z[job.split.train[1][2]] = math.inf
    trained = solved(job, CachedData(Features([z]), data.annotations))
    assert trained.selected == {}
    row = int(job.split.train[1][2])
    assert trained.failure == f"features of 1 training image hold NaN or ∞; the first is row {row}"


def test_validation_logits_that_are_not_finite_are_never_selected() -> None:
    data, job = digits(), job_of(LinearProbe, strengths=(1.0,))
    z = data.features[torch.arange(len(data.annotations.labels))].clone()
    z[job.split.evaluation["train_val"][0]] = math.nan
    trained = solved(job, CachedData(Features([z]), data.annotations))
    assert trained.selected == {}
    assert trained.failure is not None and "train_val" in trained.failure and "oracle" not in trained.failure


def test_a_long_search_shows_that_it_goes_on() -> None:
    """Other processes end a run whose work stands still: every evaluation counts, not every candidate alone."""
    probe, z, batch = problem()
    before = pulse.count
    candidates = list(probe.solve(z, batch))
    assert pulse.count - before > 3 * len(candidates) > 0
