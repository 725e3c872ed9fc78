"""By hand: the smallest difference that a table finds, its forecasts, and the error of a method's own mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from example_runs import comparison
from scipy import stats

from xdm_ft.evaluation.intervals import HeldOutValues, interval_of, over_seeds_and_groups
from xdm_ft.results.table import Comparison, PValue
from xdm_ft.results.verdicts import Family, judge, more_seeds, smallest


def by_hand(alpha: float, comparisons: int, freedom: float, error: float) -> float:
    return float(stats.t.ppf(1 - alpha / (2 * comparisons), freedom) + stats.t.ppf(0.8, freedom)) * error


def family(*rows: Comparison, alpha: float = 0.05) -> Family:
    made = Family.of(rows, alpha)
    assert made is not None
    return made


def changed(*changes: dict[str, Any], **common: Any) -> Family:
    """The family of rows that differ in these values."""
    return family(*(comparison(f"m{i}", **common | change) for i, change in enumerate(changes)))


def test_medians_of_variance_and_freedom_count_here_and_in_the_other_regime() -> None:
    errors, freedoms = (0.01, 0.02, 0.05, 0.03), (9.0, 3.0, 5.0, 40.0)
    rows = [{"error": e, "freedom": f} for e, f in zip(errors, freedoms, strict=True)]
    expected = [by_hand(alpha, 4, 7.0, median(e**2 for e in errors) ** 0.5) for alpha in (0.05, 0.0125)]
    made = changed(*rows)
    assert [made.detectable_here(), family(*made.rows, alpha=0.0125).detectable_here()] == pytest.approx(expected)
    other = changed(*({"other_error": e, "other_freedom": f} for e, f in ((0.01, 9.0), (0.03, 5.0))), {}, seeds=9)
    assert other.detectable_if_pairing_changed == pytest.approx(by_hand(0.05, 3, 7.0, ((0.01**2 + 0.03**2) / 2) ** 0.5))
    assert changed({}).detectable_if_pairing_changed is None


def test_only_tested_rows_of_the_family_count() -> None:
    rows = [
        comparison("m"), comparison("none", here="no verdict"), comparison("not declared", p_here=PValue(0.2, None)),
        comparison("equal", error=0.0, freedom=None),
    ]  # fmt: skip
    made = family(*rows)
    assert (made.rows, made.count) == (rows[:1], 2), "Holm's correction counts equal predictions too"
    assert made.detectable_here() == pytest.approx(by_hand(0.05, 2, 5.0, 0.02))
    assert Family.of(rows[1:], 0.05) is None and Family.of([], 0.05) is None


@pytest.mark.parametrize(
    ("before", "seeds", "sets"),
    [(3, 3, 1), (3, 5, 2), (3, 10, 1), (3, 20, 2), (10, 20, 1)],
    ids=lambda number: str(number),
)
def test_a_forecast_by_hand(before: int, seeds: int, sets: int) -> None:
    """V_S·S/S' + V_I with f_S·(S' − 1)/(S − 1); from below ten seeds to above, rows are not paired."""
    paired, v, f_seeds, f_images = before >= 10, 0.02**2, 9.0 if before >= 10 else 4.0, 500.0
    row = comparison(
        "m", seeds=before, sets=sets, paired=paired, share_seeds=0.4, share_images=0.6, freedom_seeds=f_seeds,
        freedom_images=f_images,
    )  # fmt: skip
    v_seeds, v_images, f_seeds = v * 0.4 * before / seeds, v * 0.6, f_seeds * (seeds - 1) / (before - 1)
    total = v_seeds + v_images
    slack = (total / v_seeds) ** 0.5 if sets == 1 and not paired else 1
    freedom = min(total / (v_seeds / f_seeds + v_images / f_images), f_seeds * slack)
    assert (freedom == 19) == paired, "that of the paired seeds"
    assert family(row).detectable_here(seeds) == pytest.approx(by_hand(0.05, 1, freedom, total**0.5))


def test_deterministic_sides_gain_nothing_from_seeds() -> None:
    sides = {"seeds": None, "share_seeds": 0.0, "share_images": 1.0, "freedom_seeds": None}
    fixed = family(comparison("m", freedom=50.0, **sides))
    assert fixed.seeds is None and fixed.detectable_here(20) == pytest.approx(fixed.detectable_here())
    mixed = family(comparison("m", **sides), comparison("o", seeds=5), comparison("p", seeds=4))
    assert mixed.seeds == 4, "the smaller number of the sides that vary"


@pytest.mark.parametrize(("shares", "limit"), [([0.2, 0.4, 0.9], False), ([0.2, 0.6, 0.9], True), ([0.5], False)])
def test_what_limits(shares: Sequence[float], limit: bool) -> None:
    assert changed(*({"share_images": share, "share_seeds": 1 - share} for share in shares)).images_limit == limit


def test_elsewhere() -> None:
    made = changed(*({"error_elsewhere": e} for e in (0.03, 0.04, 0.09)), sets=4, domains=4)
    assert made.elsewhere() == pytest.approx(by_hand(0.05, 3, 3, 0.04))
    assert made.elsewhere(1) == pytest.approx(by_hand(0.05, 1, 3, 0.04))
    assert changed({}, sets=2).elsewhere() is None and changed({}, sets=1, error_elsewhere=None).elsewhere() is None


def test_it_is_what_holm_finds() -> None:
    """A difference that is larger by t of 80% than Holm's first step needs has a p at the level of its look."""
    # a normal test of one comparison at 5% finds 2.8 errors in four of five cases
    assert smallest(0.05, 1, 1e9, 1.0) == pytest.approx(1.959964 + 0.841621, abs=1e-4)
    row, others = comparison("m", error=0.01, freedom=6.0), [comparison("o", p_here=PValue(0.9, None))] * 3
    needed = family(*[row] * 4).detectable_here() - float(stats.t.ppf(0.8, 6)) * 0.01
    for factor, verdict in ((0.999, "no clear difference"), (1.001, "better")):
        p = float(2 * stats.t.sf(factor * needed / 0.01, 6))
        tested = replace(row, difference=factor * needed, p_here=PValue(p, None))
        assert judge("accuracy", [tested, *others], [True] * 4)[0].here == verdict
    assert [more_seeds(seeds) for seeds in (3, 9, 10, 20)] == [10, 10, 20, 40]


def test_the_error_of_a_mean_by_hand() -> None:
    first = HeldOutValues(np.array([0.5, 0.6, 0.7]), 0.0004, 50.0)
    estimate = over_seeds_and_groups([first, HeldOutValues(np.array([0.9, 0.8, 0.85]), 0.0009, 20.0)])
    v_seeds = np.array([0.7, 0.7, 0.775]).var(ddof=1) / 3
    total = 0.0001 + 0.000225 + v_seeds
    freedom = total**2 / (0.0001**2 / 49 + 0.000225**2 / 19 + v_seeds**2 / 2)
    assert estimate is not None and tuple(estimate) == pytest.approx((0.725, total**0.5, freedom))
    half = stats.t.ppf(0.975, freedom) * total**0.5
    assert interval_of("accuracy", estimate, 70.0) == pytest.approx((0.725 - half, 0.725 + half))
    one_seed = HeldOutValues(np.array([0.5]), 0.0004, 50.0)
    alone = over_seeds_and_groups([one_seed])
    assert alone is not None and tuple(alone) == pytest.approx((0.5, 0.02, 49))
    for unknown in (one_seed._replace(variance=None), one_seed._replace(groups=1.5)):
        assert over_seeds_and_groups([one_seed, unknown]) is None
    assert over_seeds_and_groups([]) is None and interval_of("accuracy", None, 10.0) is None


def test_all_images_right_is_no_certainty() -> None:
    every = over_seeds_and_groups([HeldOutValues(np.ones(3), 0.0, 20.0)])
    expected = tuple(stats.binomtest(20, 20).proportion_ci(0.95))
    assert interval_of("accuracy", every, 20.0) == pytest.approx(expected)
    assert interval_of("nll", every, 20.0) is None
