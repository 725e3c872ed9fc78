from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from xdm_ft.evaluation import intervals
from xdm_ft.evaluation.intervals import Interval, bootstrap, percentile_interval, t_interval, verdict
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, metric, per_image
from xdm_ft.evaluation.predictions import Prediction


def run(
    name: str, seed: int, num_classes: int, grouped: bool, n: int = 120, method: str = "erm"
) -> tuple[Prediction, torch.Tensor]:
    """A made run and its logits. The images (labels, worst_of, groups) are the same for every `seed`."""
    images = np.random.default_rng(99)
    labels = images.integers(num_classes, size=n)
    worst_of, groups = images.integers(-1, 3, size=n), images.integers(25, size=n) + 100
    logits = np.random.default_rng(seed).normal(size=(n, num_classes)) * 1.5
    logits[np.arange(n), labels] += 1
    tensor = torch.from_numpy(logits).float()
    prediction = Prediction(
        method=method,
        test_domains=("a",),
        seed=seed,
        rule="train_val",
        rows=np.arange(n),
        labels=labels,
        predicted=tensor.argmax(1).numpy(),
        worst_of=worst_of,
        groups=groups if grouped else None,
        per_image=per_image(name, tensor, torch.from_numpy(labels)),
    )
    return prediction, tensor


def test_t_interval_is_that_of_scipy() -> None:
    values = [0.011, -0.004, 0.02, 0.007]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert t_interval(values) == pytest.approx((expected.low, expected.high))


def test_t_interval_needs_two_values() -> None:
    assert t_interval([0.1]) is None
    assert t_interval([0.1, 0.1]) == (pytest.approx(0.1), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("found", "name", "expected"),
    [
        ([Interval(0.1, 0.2), Interval(0.05, 0.3)], "accuracy", "better"),
        ([Interval(0.1, 0.2), Interval(0.05, 0.3)], "nll", "worse"),
        ([Interval(-0.2, -0.1), None], "accuracy", "worse"),
        ([Interval(-0.2, -0.1), None], "ece", "better"),
        ([Interval(-0.2, -0.1), Interval(-0.2, 0.0)], "accuracy", "not distinguishable"),
        ([Interval(0.1, 0.2), Interval(-0.3, -0.1)], "accuracy", "not distinguishable"),
        ([None, Interval(0.0, 0.0)], "accuracy", "not distinguishable"),
        ([None, None], "accuracy", "not distinguishable"),
    ],
)
def test_verdict(found: list[Interval | None], name: str, expected: str) -> None:
    assert verdict(name, found) == expected


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("name", [m for m in HIGHER_IS_BETTER if m != "auroc"])
def test_bootstrap_is_the_metric_of_the_repeated_images(
    name: str, num_classes: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intervals, "DRAWS", 12)
    runs = [run(name, seed, num_classes, grouped) for seed in range(3)]
    found = bootstrap(name, [prediction for prediction, _ in runs], key=1)
    assert found.shape == (12, 3)
    first = runs[0][0]
    weights = np.concatenate(list(intervals._image_weights(first.groups, len(first.rows), 1)))
    for draw, times in enumerate(weights.astype(int)):
        drawn = torch.from_numpy(np.repeat(np.arange(len(times)), times))
        labels, worst_of = torch.from_numpy(first.labels)[drawn], torch.from_numpy(first.worst_of)[drawn]
        expected = [metric(name, logits[drawn], labels, worst_of) for _, logits in runs]
        assert found[draw] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_linearised_auroc_follows_the_real_one(num_classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "DRAWS", 200)
    prediction, logits = run("auroc", 0, num_classes, grouped=False, n=600)
    labels, worst_of = torch.from_numpy(prediction.labels), torch.from_numpy(prediction.worst_of)
    plain = metric("auroc", logits, labels, worst_of)
    assert prediction.per_image is not None
    assert prediction.per_image.mean() == pytest.approx(plain)
    found = bootstrap("auroc", [prediction], key=0)[:, 0]
    weights = np.concatenate(list(intervals._image_weights(None, len(labels), 0))).astype(int)
    drawn = [torch.from_numpy(np.repeat(np.arange(len(labels)), times)) for times in weights]
    exact = np.array([metric("auroc", logits[d], labels[d], worst_of[d]) for d in drawn])
    assert np.corrcoef(found, exact)[0, 1] > 0.99
    assert found.std() == pytest.approx(exact.std(), rel=0.1)


def test_groups_are_drawn_whole_and_as_many_as_there_are() -> None:
    groups = np.array([7, 7, 3, 3, 3, 9])
    weights = np.concatenate(list(intervals._image_weights(groups, 6, 0)))
    assert weights.shape == (intervals.DRAWS, 6)
    assert (weights[:, 0] == weights[:, 1]).all() and (weights[:, 2:5] == weights[:, 2:3]).all()
    assert (weights[:, [0, 2, 5]].sum(1) == 3).all()
    assert weights.mean(0) == pytest.approx(np.ones(6), abs=0.1)


def test_draws_depend_on_the_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction, _ = run("accuracy", 0, 3, grouped=False)
    once = bootstrap("accuracy", [prediction], key=4)
    monkeypatch.setattr(intervals, "_WEIGHTS_AT_ONCE", 1000)  # chunks of 8 draws instead of one
    assert (bootstrap("accuracy", [prediction, prediction], key=4) == once).all()
    assert (bootstrap("accuracy", [prediction], key=5) != once).any()


def test_runs_on_other_images_are_refused() -> None:
    one, _ = run("accuracy", 0, 3, grouped=False, n=50)
    other, _ = run("accuracy", 0, 3, grouped=False, n=40, method="sam")
    with pytest.raises(ValueError, match="sam and erm were not tested on the same images"):
        bootstrap("accuracy", [one, other], key=0)


def test_a_metric_that_lacks_its_values_is_refused() -> None:
    with pytest.raises(ValueError, match="erm lack what the metric needs"):
        bootstrap("nll", [run("accuracy", 0, 3, grouped=False)[0]], key=0)


@pytest.mark.parametrize("groups", [None, 40])
def test_coverage(groups: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paired difference of known size is inside about 95% of the intervals, with correlated groups too."""
    monkeypatch.setattr(intervals, "DRAWS", 400)
    n, repeats, inside, true = 400, 150, 0, 0.06
    for repeat in range(repeats):
        made = np.random.default_rng(repeat)
        members = None if groups is None else np.repeat(np.arange(groups), n // groups)
        luck = made.random(n) if members is None else 0.8 * made.random(groups)[members] + 0.2 * made.random(n)
        labels = np.zeros(n, dtype=np.int64)
        # both methods are wrong on the hardest images, and erm also where the luck of image or group runs out
        hard = made.random(n) < 0.2
        extra = made.random(n) < 2 * true / 0.8 * luck  # E[luck] = ½
        runs = [
            Prediction(m, ("a",), 0, "train_val", np.arange(n), labels, wrong.astype(np.int64), labels, members)
            for m, wrong in (("erm", hard | extra), ("sam", hard))
        ]
        draws = bootstrap("accuracy", runs, key=repeat)
        low, high = percentile_interval(draws[:, 1] - draws[:, 0])
        inside += low <= true <= high
    assert 0.88 <= inside / repeats <= 0.99
