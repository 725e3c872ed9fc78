from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from xdm_ft.evaluation.comparison import Comparison, Estimate, HeldOut, compare, holm, over_seeds_and_images, verdicts


def test_an_estimate_is_that_of_scipy() -> None:
    values = [0.011, -0.004, 0.02, 0.007]
    expected = stats.ttest_1samp(values, 0)
    estimate = Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / 2), 3)
    assert estimate.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert estimate.p() == pytest.approx(expected.pvalue)
    assert Estimate(0.0, 0.0, 2).p() == 1 and Estimate(0.1, 0.0, 2).p() == 0


def test_degrees_of_freedom_are_those_of_the_fewer() -> None:
    many, few = HeldOut(np.array([0.1, 0.2, 0.3]), 0.01, 900.0), HeldOut(np.array([0.1, 0.2, 0.6]), 0.02, 2.5)
    only_many, with_few = over_seeds_and_images([many]), over_seeds_and_images([many, few])
    assert only_many and with_few
    assert (only_many.freedom, with_few.freedom) == (2, 1.5)
    assert only_many.error**2 == pytest.approx(0.01 + 0.01 / 3)
    assert with_few.error**2 == pytest.approx((0.01 + 0.02) / 4 + np.var([0.1, 0.2, 0.45], ddof=1) / 3)


def test_the_larger_p_counts() -> None:
    """Equal over domains and noisy over seeds, and the reverse."""
    seeds_differ = [HeldOut(np.array([0.0, 0.1, 0.2]) + d, 1e-9, 500.0) for d in (0.0, 1e-4, 2e-4)]
    domains_differ = [HeldOut(np.array([0.1, 0.1001, 0.1002]) * d, 1e-9, 500.0) for d in (-0.5, 1.0, 2.5)]
    assert compare(seeds_differ).p == pytest.approx(stats.ttest_1samp([0.0001, 0.1001, 0.2001], 0).pvalue, rel=1e-3)
    by_domain = [one.by_seed.mean() for one in domains_differ]
    assert compare(domains_differ).p == pytest.approx(stats.ttest_1samp(by_domain, 0).pvalue)


@pytest.mark.parametrize("variance", [None, 1e-4])
def test_what_is_not_estimated_is_no_test(variance: float | None) -> None:
    sets = [HeldOut(np.array([0.1, 0.11, 0.12]), 1e-4, 90.0), HeldOut(np.array([0.1, 0.13, 0.12]), variance, 90.0)]
    comparison = compare(sets)
    assert comparison.domains is not None
    assert (comparison.p is None) == (comparison.seeds_and_images is None) == (variance is None)


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])  # 3 × 0.01, 2 × 0.03, and no less than before
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("metric", "difference", "where", "expected"),
    [
        ("accuracy", 0.1, "", "better"),
        ("accuracy", -0.1, "on this domain", "worse on this domain"),
        ("nll", -0.1, "on these domains", "better on these domains"),
        ("ece", 0.1, "", "worse"),
    ],
)
def test_the_words_of_a_verdict(metric: str, difference: float, where: str, expected: str) -> None:
    rows = {
        "sure": Comparison(difference, None, None, 0.0249),
        "near": Comparison(difference, None, None, 0.05),
        "untested": Comparison(difference, None, None, None),
    }
    found = verdicts(metric, rows, where)
    assert found["sure"] == (0.0249, pytest.approx(0.0498), expected)
    assert found["near"] == (0.05, 0.05, "not distinguishable")
    assert found["untested"] == (None, None, "no verdict")


@pytest.mark.parametrize("groups", [900.0, 5.0])
def test_p_is_uniform_where_nothing_differs(groups: float) -> None:
    """Where one source dominates, p errs to no side: seeds with many groups, images of 5 groups with many seeds."""
    generator = np.random.default_rng(0)
    p = []
    for _ in range(2000):
        if groups > 5:
            one = HeldOut(generator.normal(size=3), 1e-6, groups)
        else:
            of_group = generator.normal(size=5)
            one = HeldOut(of_group.mean() + 1e-3 * generator.normal(size=10), of_group.var(ddof=1) / 5, groups)
        p.append(compare([one]).p)
    assert stats.kstest(p, "uniform").pvalue > 0.01
