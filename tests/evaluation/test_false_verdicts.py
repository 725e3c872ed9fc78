"""How often a table says something if no method differs, and if one does, on the accuracies of trained models.

`pacs_pool.json` is a summary of 40 seeds of five methods on frozen features of PACS, the run of `benchmarks/verdicts.py
pool`. It has, by held-out domain, the number n of test `images`, and by method and held-out domain

    accuracy     of each seed
    luck         variance over seeds of being right on an image, mean over images, over n
    interaction  variance over images of the difference to ERM, means over all seeds, less what luck adds to it, over n

For two methods, each the mean of S seeds, the jackknife of the difference estimates interaction + (luck + luck)/S.
"""

from __future__ import annotations

import json
import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from xdm_ft.evaluation.estimates import over_images
from xdm_ft.results.table import Comparison

POOL = json.loads(Path(__file__).with_name("pacs_pool.json").read_text())
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/verdicts.py"))
DOMAINS = list(POOL["images"])
METHODS = list(POOL["accuracy"])
ACCURACY = {m: np.array([of[d] for d in DOMAINS]) for m, of in POOL["accuracy"].items()}  # [D,R] each
LUCK = {m: np.array([of[d] for d in DOMAINS]) for m, of in POOL["luck"].items()}  # [D] each
INTERACTION = {"erm": np.zeros(len(DOMAINS))} | {
    m: np.array([of[d] for d in DOMAINS]) for m, of in POOL["interaction"].items()
}
TABLES = 200
COMPARISONS = (1, 6, 13)


@cache
def tables(centred: bool, seeds: int) -> list[list[Comparison]]:
    """The comparisons of tables whose methods have the same mean on each domain.

    Each method is ERM with other seeds; or, `centred`, all methods in turn, of which the first ones share ERM's seeds.
    """
    generator, found = np.random.default_rng([centred, seeds]), []
    for _ in range(TABLES):
        names = ["erm", *generator.permutation(METHODS[1:]).tolist()] if centred else ["erm"]
        models = generator.integers(0, ACCURACY["erm"].shape[1], (14, seeds))
        # these test images are others than the pool's: a method is better on them than on all, or worse
        shift = {name: INTERACTION[name] ** 0.5 * generator.normal(size=len(DOMAINS)) for name in names}
        mean_as_erm = {
            name: ACCURACY[name] - (ACCURACY[name] - ACCURACY["erm"]).mean(1, keepdims=True) for name in names
        }
        rows = list[Comparison]()
        for row in range(1, 14):
            name = names[row % len(names)]
            own = mean_as_erm[name][:, models[row // len(names)]] + shift[name][:, None]  # [D,S]
            variances = INTERACTION[name] + (LUCK[name] + LUCK["erm"]) / seeds
            images = over_images(variances.tolist(), list(POOL["images"].values()))
            rows.append(SCRIPT["compared"](own, ACCURACY["erm"][:, models[0]], images))
        found.append(rows)
    return found


def wilson(count: int) -> tuple[float, float]:
    interval = stats.binomtest(count, TABLES).proportion_ci(0.99, method="wilson")
    return interval.low, interval.high


@pytest.mark.slow
@pytest.mark.parametrize(("centred", "seeds"), [(False, 3), (False, 5), (False, 10), (True, 3)])
def test_at_most_5_percent_of_tables_have_a_false_verdict(centred: bool, seeds: int) -> None:
    for comparisons in COMPARISONS:
        here, elsewhere = sum(SCRIPT["any_verdict"](rows[:comparisons]) for rows in tables(centred, seeds))
        assert wilson(here)[0] <= 0.05, f"{here} of {TABLES} tables of {comparisons} have a verdict"
        assert wilson(elsewhere)[0] <= 0.05


def test_the_tables_could_have_a_verdict() -> None:
    assert sum(SCRIPT["any_verdict"](rows)[0] for rows in tables(False, 5)) > 0


@pytest.mark.parametrize(("seeds", "low", "high"), [(3, 0.18, 0.45), (5, 0.7, 0.95), (10, 0.95, 1.0)])
def test_three_points_among_13_comparisons_are_found(seeds: int, low: float, high: float) -> None:
    found = sum(SCRIPT["found_better"](rows, 0.03) for rows in tables(False, seeds))
    assert low <= found / TABLES <= high


def test_with_ten_seeds_two_points_are_the_smallest_difference() -> None:
    """80% of tables find it."""
    smallest = [SCRIPT["smallest_found"](rows, False) for rows in tables(False, 10)[::5]]
    assert np.quantile(smallest, 0.8) == pytest.approx(0.021, abs=0.004)
