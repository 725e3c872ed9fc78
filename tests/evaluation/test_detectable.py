"""The smallest difference that a table finds, and its forecasts, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from example_runs import comparison
from scipy import stats

from xdm_ft.evaluation.verdicts import Comparison, Family, PValue, judge, more_seeds, smallest


def by_hand(alpha: float, comparisons: int, freedom: float, error: float) -> float:
    return float(stats.t.ppf(1 - alpha / (2 * comparisons), freedom) + stats.t.ppf(0.8, freedom)) * error


def family(*rows: Comparison, alpha: float = 0.05) -> Family:
    found = Family.of(rows, alpha)
    assert found is not None
    return found


def of(*changes: dict[str, Any], **common: Any) -> Family:
    return family(*(comparison(f"m{i}", **common | own) for i, own in enumerate(changes)))


def test_by_hand() -> None:
    assert smallest(0.05, 13, 4.5, 0.01) == pytest.approx(by_hand(0.05, 13, 4.5, 0.01))
    # a normal test of one comparison at 5% finds 2.8 errors in four of five cases
    assert smallest(0.05, 1, 1e9, 1.0) == pytest.approx(1.959964 + 0.841621, abs=1e-4)


def test_medians_of_variance_and_freedom_count() -> None:
    found = of(*({"error": e, "freedom": f} for e, f in ((0.01, 9.0), (0.02, 3.0), (0.05, 5.0), (0.03, 40.0))))
    variance = median([0.01**2, 0.02**2, 0.05**2, 0.03**2])
    assert found.here() == pytest.approx(by_hand(0.05, 4, 7.0, variance**0.5))
    assert family(*found.rows, alpha=0.0125).here() == pytest.approx(by_hand(0.0125, 4, 7.0, variance**0.5))


def test_only_tested_rows_of_the_family_count() -> None:
    rows = [
        comparison("m"), comparison("none", here="no verdict"), comparison("not declared", p_here=PValue(0.2, None)),
        comparison("equal", error=0.0, freedom=None),
    ]  # fmt: skip
    found = family(*rows)
    assert (found.rows, found.count) == (rows[:1], 2), "Holm's correction counts equal predictions too"
    assert found.here() == pytest.approx(by_hand(0.05, 2, 5.0, 0.02))
    assert Family.of(rows[1:], 0.05) is None and Family.of([], 0.05) is None


def forecast(row: Comparison, seeds: int) -> tuple[float, float]:
    """V_S·S/S' + V_I; its degrees of freedom from f_S·(S' − 1)/(S − 1), which are the most that it has on two sets."""
    assert row.error is not None and row.share_seeds is not None and row.seeds is not None
    assert row.freedom_seeds is not None and row.freedom_images is not None
    of_seeds = row.error**2 * row.share_seeds * row.seeds / seeds
    of_images = row.error**2 * (1 - row.share_seeds)
    f_seeds = row.freedom_seeds * (seeds - 1) / (row.seeds - 1)
    total = of_seeds + of_images
    slack = (total / of_seeds) ** 0.5 if row.sets == 1 and not row.paired else 1
    return total, min(total / (of_seeds / f_seeds + of_images / row.freedom_images), f_seeds * slack)


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("seeds", [3, 5, 10, 20])
def test_a_forecast_below_ten_seeds_is_not_paired(seeds: int, sets: int) -> None:
    """Also to ten seeds and above."""
    one = comparison("m", seeds=3, sets=sets, share_seeds=0.9, share_images=0.1, freedom_seeds=4.0, freedom_images=30.0)
    variance, freedom = forecast(one, seeds)
    assert freedom > seeds - 1, "paired, it would be less"
    assert family(one).here(seeds) == pytest.approx(by_hand(0.05, 1, freedom, variance**0.5))


def test_a_forecast_of_paired_seeds() -> None:
    shares = {"share_seeds": 0.4, "share_images": 0.6, "freedom_seeds": 9.0, "freedom_images": 500.0}
    one = comparison("m", seeds=10, sets=1, paired=True, **shares)
    variance, freedom = forecast(one, 20)
    assert freedom == 19, "the seeds' own"
    assert family(one).here(20) == pytest.approx(by_hand(0.05, 1, 19, variance**0.5))
    assert forecast(replace(one, paired=False), 20)[1] > 19


def test_deterministic_sides_gain_nothing_from_seeds() -> None:
    sides = {"seeds": None, "share_seeds": 0.0, "share_images": 1.0, "freedom_seeds": None}
    found = family(comparison("m", freedom=50.0, **sides))
    assert found.seeds is None and found.here(20) == pytest.approx(found.here())
    mixed = family(comparison("m", **sides), comparison("o", seeds=5), comparison("p", seeds=4))
    assert mixed.seeds == 4, "the smaller number of the sides that vary"


@pytest.mark.parametrize(("shares", "limit"), [([0.2, 0.4, 0.9], False), ([0.2, 0.6, 0.9], True), ([0.5], False)])
def test_what_limits(shares: Sequence[float], limit: bool) -> None:
    assert of(*({"share_images": share, "share_seeds": 1 - share} for share in shares)).images_limit == limit


def test_elsewhere() -> None:
    found = of(*({"error_elsewhere": e} for e in (0.03, 0.04, 0.09)), sets=4, domains=4)
    assert found.elsewhere() == pytest.approx(by_hand(0.05, 3, 3, 0.04))
    assert found.elsewhere(1) == pytest.approx(by_hand(0.05, 1, 3, 0.04))
    assert of({}, sets=2).elsewhere() is None and of({}, sets=1, error_elsewhere=None).elsewhere() is None


def test_the_other_regime() -> None:
    found = of(*({"other_error": e, "other_freedom": f} for e, f in ((0.01, 9.0), (0.03, 5.0))), {}, seeds=9)
    assert found.other == pytest.approx(by_hand(0.05, 3, 7.0, ((0.01**2 + 0.03**2) / 2) ** 0.5))
    assert of({}).other is None


def test_it_is_what_holm_finds() -> None:
    """A difference that is larger by t of 80% than Holm's first step needs has a p at the level of its look."""
    row = comparison("m", error=0.01, freedom=6.0)
    needed = family(*[row] * 4).here() - float(stats.t.ppf(0.8, 6)) * 0.01
    rows = [
        replace(row, difference=difference, p_here=PValue(float(2 * stats.t.sf(difference / 0.01, 6)), None))
        for difference in (0.999 * needed, 1.001 * needed)
    ]
    others = [comparison("o", p_here=PValue(0.9, None))] * 3
    assert [judge("accuracy", [own, *others], [True] * 4)[0].here for own in rows] == ["no clear difference", "better"]


def test_how_many_seeds_are_forecast() -> None:
    assert [more_seeds(seeds) for seeds in (3, 9, 10, 20)] == [10, 10, 20, 40]
