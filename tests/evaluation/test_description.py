"""The error of a method's own mean: by hand, and its coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, t

from xdm_ft.evaluation.intervals import HeldOut, interval_of, over_seeds_and_groups


def test_several_sets_by_hand() -> None:
    sets = [HeldOut(np.array([0.5, 0.6, 0.7]), 0.0004, 50.0), HeldOut(np.array([0.9, 0.8, 0.85]), 0.0009, 20.0)]
    found = over_seeds_and_groups(sets)
    of_seeds = np.array([0.7, 0.7, 0.775]).var(ddof=1) / 3
    total = 0.0001 + 0.000225 + of_seeds
    freedom = total**2 / (0.0001**2 / 49 + 0.000225**2 / 19 + of_seeds**2 / 2)
    assert found is not None and found.value == pytest.approx(0.725)
    assert found.error == pytest.approx(total**0.5) and found.freedom == pytest.approx(freedom)
    half = t.ppf(0.975, freedom) * total**0.5
    assert interval_of("accuracy", found, 70.0) == pytest.approx((0.725 - half, 0.725 + half))


def test_one_seed_leaves_the_images() -> None:
    found = over_seeds_and_groups([HeldOut(np.array([0.5]), 0.0004, 50.0)])
    assert found is not None and tuple(found) == pytest.approx((0.5, 0.02, 49))


@pytest.mark.parametrize("unknown", [HeldOut(np.array([0.5]), None, 50.0), HeldOut(np.array([0.5]), 0.1, 1.5)])
def test_without_a_variance_over_images_there_is_none(unknown: HeldOut) -> None:
    assert over_seeds_and_groups([HeldOut(np.array([0.5]), 0.0004, 50.0), unknown]) is None
    assert over_seeds_and_groups([]) is None and interval_of("accuracy", None, 10.0) is None


def test_all_images_right_is_no_certainty() -> None:
    every = over_seeds_and_groups([HeldOut(np.ones(3), 0.0, 20.0)])
    found = interval_of("accuracy", every, 20.0)
    assert found == pytest.approx(tuple(binomtest(20, 20).proportion_ci(0.95)))
    assert interval_of("nll", every, 20.0) is None
