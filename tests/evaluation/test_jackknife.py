from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from xdm_ft.evaluation import predictions
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, metric, per_image
from xdm_ft.evaluation.predictions import (
    HeldOutImages,
    Prediction,
    check_same_images,
    effective_number,
    jackknife_variance,
    without_each_group,
)


def run(
    name: str, seed: int, num_classes: int, grouped: bool, n: int = 120, method: str = "erm"
) -> tuple[Prediction, torch.Tensor]:
    """A made run and its logits. The images (labels, worst_of, groups) are the same for every `seed`."""
    source = np.random.default_rng(99)
    labels = source.integers(num_classes, size=n)
    worst_of, groups = source.integers(-1, 3, size=n), source.integers(25, size=n) + 100
    images = HeldOutImages(np.arange(n), labels, worst_of, groups if grouped else None)
    logits = np.random.default_rng(seed).normal(size=(n, num_classes)) * 1.5
    logits[np.arange(n), labels] += 1
    tensor = torch.from_numpy(logits).float()
    values = per_image(name, tensor, torch.from_numpy(labels))
    return Prediction(method, ("a",), seed, "train_val", images, tensor.argmax(1).numpy(), values), tensor


def left_out(name: str, prediction: Prediction, logits: torch.Tensor) -> np.ndarray:
    """The metric without each group, computed anew."""
    images, values = prediction.images, []
    members = images.rows if images.groups is None else images.groups
    for g in np.unique(members):
        left = torch.from_numpy(np.flatnonzero(members != g))
        labels, worst_of = (torch.from_numpy(of_all)[left] for of_all in (images.labels, images.worst_of))
        values.append(metric(name, logits[left], labels, worst_of))
    return np.array(values)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("name", [m for m in HIGHER_IS_BETTER if m != "auroc"])
def test_it_is_the_metric_of_the_other_images(name: str, num_classes: int, grouped: bool) -> None:
    prediction, logits = run(name, 3, num_classes, grouped)
    values = without_each_group(name, prediction)
    assert len(values) == len(prediction.images.sizes)
    np.testing.assert_allclose(values, left_out(name, prediction, logits), rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_linearised_auroc_follows_the_real_one(num_classes: int) -> None:
    prediction, logits = run("auroc", 0, num_classes, grouped=True, n=600)
    values, exact = without_each_group("auroc", prediction), left_out("auroc", prediction, logits)
    assert np.corrcoef(values, exact)[0, 1] > 0.99
    assert jackknife_variance(values) == pytest.approx(jackknife_variance(exact), rel=0.2)


def test_of_a_mean_over_images_it_is_the_textbook_variance() -> None:
    prediction, _ = run("nll", 0, 3, grouped=False)
    assert prediction.per_image is not None
    expected = prediction.per_image.var(ddof=1) / len(prediction.per_image)
    assert jackknife_variance(without_each_group("nll", prediction)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["macro_f1", "ece"])
def test_blocks_of_many_images_estimate_the_same_variance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [run(name, seed, 5, grouped=False, n=3000)[0] for seed in range(2)]
    found = [without_each_group(name, prediction) for prediction in pair]
    assert [len(values) for values in found] == [1000, 1000]
    monkeypatch.setattr(predictions, "BLOCKS", 3000)
    each = [without_each_group(name, dataclasses.replace(p, images=dataclasses.replace(p.images))) for p in pair]
    assert [len(values) for values in each] == [3000, 3000]
    blocks, exact = jackknife_variance(found[1] - found[0]), jackknife_variance(each[1] - each[0])
    assert blocks == pytest.approx(exact, rel=0.2)


@pytest.mark.parametrize(
    ("groups", "number"),
    [
        (None, 100),
        (np.arange(100) % 4, 4),
        (np.repeat([5, 7, 9], [80, 10, 10]), 100**2 / 6600),
        (np.zeros(100, int), 1),
    ],
)
def test_effective_number_of_groups(groups: np.ndarray | None, number: float) -> None:
    prediction, _ = run("accuracy", 0, 3, grouped=False, n=100)
    images = dataclasses.replace(prediction.images, groups=groups)
    assert effective_number(images.sizes) == pytest.approx(number)
    variance = jackknife_variance(without_each_group("accuracy", dataclasses.replace(prediction, images=images)))
    assert (variance is None) == (number == 1)


def test_a_metric_that_needs_a_group_has_no_variance() -> None:
    prediction, _ = run("worst_domain_accuracy", 0, 3, grouped=False, n=100)
    only = np.where(np.arange(100) < 20, 0, -1)  # all that have a domain are in one group
    for worst_of, groups in ((only, np.arange(100) // 20), (np.full(100, -1), None)):
        images = dataclasses.replace(prediction.images, worst_of=worst_of, groups=groups)
        values = without_each_group("worst_domain_accuracy", dataclasses.replace(prediction, images=images))
        assert jackknife_variance(values) is None


def test_what_is_refused() -> None:
    one, _ = run("accuracy", 0, 3, grouped=False, n=50)
    other, _ = run("accuracy", 0, 3, grouped=False, n=40, method="sam")
    with pytest.raises(ValueError, match="sam and erm were not tested on the same images"):
        check_same_images(one, other)
    with pytest.raises(ValueError, match="erm: its predictions have no values per image"):
        without_each_group("nll", one)
