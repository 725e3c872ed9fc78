"""Distances to training features: against naive loops and scikit-learn, and what must hold for any features."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf

from xdm_ft.evaluation.neighbours import Blocks, Reference, fit, within_class_covariance

SEEDS = st.integers(0, 2**31)


def drawn(n: int, width: int, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features float32 [n,K] of classes with different means and one covariance, and labels [n] with every class."""
    source = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), source.integers(0, classes, n - classes)])
    shape = source.normal(size=(width, width)) + 3 * np.eye(width)
    means = 3 * source.normal(size=(classes, width))
    return (means[labels] + source.normal(size=(n, width)) @ shape).astype(np.float32), labels


def blocks(z: np.ndarray, labels: np.ndarray, size: int = 1000) -> Blocks:
    return lambda: ((z[i : i + size], labels[i : i + size]) for i in range(0, len(z), size))


def fitted(z: np.ndarray, labels: np.ndarray, unseen: np.ndarray | None = None, classes: int = 3) -> Reference:
    unseen = z if unseen is None else unseen
    return fit(blocks(z, labels), blocks(unseen, np.zeros(len(unseen), np.int64)), classes)


def naive(z: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
    means = {c: z[labels == c].mean(0, dtype=np.float64) for c in set(labels.tolist())}
    centred = np.stack([one - means[c] for one, c in zip(z.astype(np.float64), labels, strict=True)])
    precision = np.linalg.inv(ledoit_wolf(centred, assume_centered=True)[0])
    return np.array([min(np.sqrt((one - m) @ precision @ (one - m)) for m in means.values()) for one in new])


@pytest.mark.parametrize(("n", "width"), [(200, 5), (30, 40), (4, 12)])
def test_distances_are_those_of_a_naive_computation_in_any_blocks(n: int, width: int) -> None:
    z, labels = drawn(n, width)
    new = np.concatenate([z[:5], drawn(20, width, seed=1)[0]])
    for size in (3, 1000):
        distances = fit(blocks(z, labels, size), blocks(z, labels, size), 3).distance(new)
        assert distances.dtype == np.float32 and distances.shape == (len(new),)
        np.testing.assert_allclose(distances, naive(z, labels, new), rtol=1e-4, atol=1e-5)


@settings(max_examples=15)
@given(SEEDS, st.integers(2, 40), st.integers(1, 12), st.integers(1, 50))
def test_the_covariance_is_scikit_learns_in_any_blocks(seed: int, n: int, width: int, size: int) -> None:
    x = np.random.default_rng(seed).normal(size=(n, width))
    found = within_class_covariance(blocks(x, np.zeros(n, np.int64), size), np.zeros((1, width)))
    np.testing.assert_allclose(found, ledoit_wolf(x, assume_centered=True)[0], rtol=1e-7, atol=1e-9)


@settings(max_examples=15)
@given(SEEDS, st.integers(3, 20), st.integers(1, 8), st.floats(1e-6, 1e6))
def test_distances_are_finite_and_at_least_0_and_those_of_means_are_0(
    seed: int, n: int, width: int, scale: float
) -> None:
    z, labels = drawn(n, width, seed=seed)
    reference = fitted(scale * z, labels)
    found = reference.distance(np.concatenate([scale * z, -scale * z]))
    assert np.isfinite(found).all() and (found >= 0).all()
    assert reference.distance(reference.means).max() < 1e-2 * max(1.0, found.max())


def test_a_class_without_training_images_has_no_mean() -> None:
    z, labels = drawn(60, 4)
    one_less = labels != 1
    reference = fit(blocks(z[one_less], labels[one_less]), blocks(z, labels), classes=5)
    assert reference.means.shape == (2, 4)
    np.testing.assert_allclose(reference.distance(z), naive(z[one_less], labels[one_less], z), rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, 3e7])
def test_features_that_never_differ(value: float) -> None:
    z, labels = np.full((7, 3), value, np.float32), np.array([0, 1, 2, 0, 1, 2, 0])
    reference = fitted(z, labels)
    assert not reference.percentile(reference.distance(z)).any()
    far = reference.distance(z + max(1.0, 2 * abs(value)))
    assert np.isfinite(far).all() and (reference.percentile(far) == 100).all()


def test_a_feature_that_never_differs_in_training_is_far_when_it_does() -> None:
    z, labels = drawn(500, 4)
    z[:, 2] = 0
    reference, new = fitted(z, labels), z[:50].copy()
    new[:, 2] = 100
    assert reference.distance(new).min() > 10 * np.median(reference.distance(z))


def test_percentiles_are_shares_of_the_validation_images_that_are_nearer() -> None:
    z, labels = drawn(300, 5)
    unseen, new = drawn(1001, 5, seed=1)[0], drawn(400, 5, seed=2)[0] * 1.5
    reference = fitted(z, labels, unseen)
    of_unseen, found = reference.distance(unseen), reference.distance(new)
    shares = np.array([100 * (of_unseen < one).mean() for one in found])
    assert shares.min() < 40 and shares.max() == 100
    np.testing.assert_allclose(reference.percentile(found), shares, atol=1)
    assert reference.percentile(np.array([0.0, 1e9], np.float32)).tolist() == [0, 100]
    assert np.abs(reference.percentile(of_unseen).mean() - 50) < 1


def test_percentiles_where_distances_are_equal() -> None:
    quantiles = np.array([1.0] * 51 + [2.0] * 50, np.float32)
    reference = Reference(np.zeros((1, 1), np.float32), np.eye(1, dtype=np.float32), quantiles)
    assert reference.percentile(np.array([0.5, 1.0, 1.5, 2.0, 2.5])).tolist() == [0, 0, 50.5, 51, 100]


def test_what_is_stored_gives_the_same_distances() -> None:
    z, labels = drawn(40, 9)
    with pytest.raises(ValueError, match="there is no validation image"):
        fitted(z, labels, z[:0])
    with pytest.raises(ValueError, match="there is no training image"):
        fitted(z[:0], labels[:0])
    reference = fitted(z, labels)
    arrays = reference.arrays()
    stored = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
    shapes = {"means": (3, 9), "whitening": (45,), "quantiles": (101,)}
    assert stored == {name: (shape, "float32") for name, shape in shapes.items()}
    again = Reference.from_arrays(arrays)
    np.testing.assert_array_equal(again.distance(z), reference.distance(z))
    with pytest.raises(ValueError, match="do not fit"):
        Reference.from_arrays({**arrays, "means": arrays["means"][:, 1:]})
