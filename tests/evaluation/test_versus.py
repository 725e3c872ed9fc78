"""Comparisons of two methods, from their models' predictions; `test_comparison` has the plain cases."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from test_summary import prediction, record

from xdm_ft.evaluation.jackknife import jackknife_variance, without_each_group
from xdm_ft.evaluation.predictions import BLOCKS, HeldOutImages, Prediction
from xdm_ft.evaluation.records import runs_by_method
from xdm_ft.evaluation.verdicts import Comparison, Pair, WithoutGroups, compared

Right = dict[str, dict[int, list[int]]]  # {method: {seed: images that are right of 50, by held-out set}}


def models(right: Right) -> list[tuple[str, tuple[str, ...], int, int]]:
    by_seed = [(m, s, own) for m, seeds in right.items() for s, own in seeds.items()]
    return [(m, (f"d{d}",), s, n) for m, s, own in by_seed for d, n in enumerate(own)]


def versus(right: Right, *, fixed: Iterable[str] = (), lost: int | None = None, no_verdict: str = "") -> Comparison:
    """Compares the first method with the second one; `lost`: the place of a model without predictions."""
    made = models(right)
    runs = runs_by_method([record(*one) for one in made], list(right), "train_val", "accuracy", [*fixed])
    pair = Pair(*runs.values())
    predictions = [prediction(*one) for place, one in enumerate(made) if place != lost]
    found = compared(pair, WithoutGroups("accuracy", [pair], predictions), no_verdict)
    assert found is not None
    return found


def image_variance(first: list[list[int]], second: list[list[int]]) -> float:
    """V_I: on each set, the images are nested, so a mean over models is right on a share of each image."""
    total, place = 0.0, np.arange(50)
    for d in range(len(first[0])):
        sides = [np.mean([place < own[d] for own in side], 0) for side in (first, second)]
        total += (sides[0] - sides[1]).var(ddof=1) / 50
    return total / len(first[0]) ** 2


UP = {s: [30 + s % 3, 24 + s % 5, 33 - s % 2] for s in range(12)}
LOW = {s: [22 + s % 4, 20 + s % 2, 29 - s % 3] for s in range(12)}


def test_other_seeds_on_both_sides() -> None:
    """Nothing is paired, and each side has the mean over all its seeds."""
    first, second = ({s: UP[s] for s in (0, 1, 2, 3)}, {s: LOW[s] for s in (2, 3, 4, 5, 6, 7)})
    found = versus({"m": first, "r": second})
    a, b = (np.array([*side.values()]) / 50 for side in (first, second))
    assert found.difference == pytest.approx(a.mean() - b.mean())
    assert (found.paired, found.seeds) == (False, 4)
    within = a.var(0, ddof=1).sum() / (4 * 9) + b.var(0, ddof=1).sum() / (6 * 9)
    between = a.mean(1).var(ddof=1) / 4 + b.mean(1).var(ddof=1) / 6
    images = image_variance([*first.values()], [*second.values()])
    assert found.error == pytest.approx((max(within, between) + images) ** 0.5)
    assert found.share_images == pytest.approx(images / (max(within, between) + images))
    assert found.p_here is not None and found.freedom is not None
    assert found.p_here.plain == pytest.approx(2 * stats.t.sf(found.difference / found.error, found.freedom))
    elsewhere = stats.ttest_1samp(a.mean(0) - b.mean(0), 0)
    assert found.p_elsewhere == (pytest.approx(elsewhere.pvalue), None)


def test_ten_common_seeds_are_paired_and_count_alone() -> None:
    found = versus({"m": {s: UP[s] for s in range(11)}, "r": {s: LOW[s] for s in range(1, 12)}})
    a, b = (np.array([of[s] for s in range(1, 11)]) / 50 for of in (UP, LOW))
    by_seed = (a - b).mean(1)
    assert (found.paired, found.seeds) == (True, 10)
    assert found.difference == pytest.approx(by_seed.mean())
    images = image_variance([UP[s] for s in range(1, 11)], [LOW[s] for s in range(1, 11)])
    assert found.error == pytest.approx((by_seed.var(ddof=1) / 10 + images) ** 0.5)
    assert found.freedom_seeds == 9
    assert found.freedom is not None and found.freedom <= 9


@pytest.mark.parametrize("seeds", [8, 9, 10, 11])
def test_both_regimes_at_nine_and_ten_seeds(seeds: int) -> None:
    found = versus({"m": {s: UP[s] for s in range(seeds)}, "r": {s: LOW[s] for s in range(seeds)}})
    a, b = (np.array([of[s] for s in range(seeds)]) / 50 for of in (UP, LOW))
    paired = (a - b).mean(1).var(ddof=1) / seeds
    within = sum(one.var(0, ddof=1).sum() / 9 for one in (a, b))
    not_paired = max(within, sum(one.mean(1).var(ddof=1) for one in (a, b)))
    images = image_variance([UP[s] for s in range(seeds)], [LOW[s] for s in range(seeds)])
    errors = [(v + images) ** 0.5 for v in (not_paired / seeds, paired)]
    assert found.error == pytest.approx(errors[seeds >= 10])
    assert found.other_error == (pytest.approx(errors[seeds < 10]) if seeds in (9, 10) else None)
    assert (found.other_freedom is None) == (seeds not in (9, 10))


def test_a_deterministic_side_is_never_paired() -> None:
    text = {0: [26, 24, 30]}
    one = versus({"zero": text, "r": LOW}, fixed=["zero"])
    r = np.array([*LOW.values()]) / 50
    seeds = max(r.var(0, ddof=1).sum() / 9, r.mean(1).var(ddof=1)) / 12
    images = image_variance([*text.values()], [*LOW.values()])
    assert (one.paired, one.seeds, one.error) == (False, 12, pytest.approx((seeds + images) ** 0.5))
    same = versus({"zero": {s: text[0] for s in LOW}, "r": LOW}, fixed=["zero"])
    assert (same.paired, same.error, same.freedom) == (False, pytest.approx(one.error), pytest.approx(one.freedom))
    two = versus({"zero": text, "one": {0: [24, 24, 29]}}, fixed=["zero", "one"])
    images = image_variance([text[0]], [[24, 24, 29]])
    assert (two.seeds, two.share_seeds, two.share_images) == (None, 0, 1)
    assert (two.error, two.freedom) == (pytest.approx(images**0.5), pytest.approx(two.freedom_images))
    assert two.p_here is not None and two.freedom is not None
    assert two.p_here.plain == pytest.approx(2 * stats.t.sf(1 / 50 / images**0.5, two.freedom))


def test_equal_predictions_have_no_error() -> None:
    same = {s: [25, 30, 30] for s in range(3)}
    equal = versus({"m": same, "r": dict(same)})
    assert (equal.difference, equal.error, equal.freedom, equal.share_seeds) == (0, 0, None, None)
    assert equal.p_here == (1, None) and equal.p_elsewhere is None
    none, every = {s: [0, 0, 0] for s in range(3)}, {s: [50, 50, 50] for s in range(3)}
    apart = versus({"m": every, "r": none})
    assert (apart.difference, apart.error, apart.p_here, apart.p_elsewhere) == (1, 0, None, None)
    assert apart.note.startswith("no verdict: nothing varies, so there is no error to compare with")


@pytest.mark.parametrize(
    ("seeds", "lost", "given", "reason"),
    [
        (1, None, "", "it needs 3 seeds, and 1 is complete"),
        (2, None, "", "it needs 3 seeds, and 2 are complete"),
        (3, 4, "", "predictions are missing"),
        (3, None, "a reason", "a reason"),
        (3, None, "", ""),
    ],
)
def test_no_verdict_has_its_reason(seeds: int, lost: int | None, given: str, reason: str) -> None:
    right = {"m": {s: UP[s] for s in range(seeds)}, "r": {s: LOW[s] for s in range(3)}}
    found = versus(right, lost=lost, no_verdict=given)
    assert (found.p_here is None) == (found.p_elsewhere is None) == bool(reason)
    assert found.note == (f"no verdict: {reason}; " if reason else "") + "images assumed independent"
    assert (found.error is None) == (seeds == 1 or lost is not None), "an interval needs two seeds and all predictions"
    assert found.error_elsewhere is not None


def test_a_side_without_a_complete_seed_is_not_compared() -> None:
    made = models({"m": {0: [30, 30], 1: [30, 30]}, "r": {0: [20, 20]}})
    records = [record(*one) for one in made if one[:3] not in (("m", ("d0",), 0), ("m", ("d1",), 1))]
    pair = Pair(*runs_by_method(records, ["m", "r"], "train_val", "accuracy").values())
    assert compared(pair, WithoutGroups("accuracy", [pair], [])) is None


@pytest.mark.parametrize("sets", [1, 2, 3])
def test_how_many_sets_say_something_of_others(sets: int) -> None:
    found = versus({"m": {s: UP[s][:sets] for s in range(3)}, "r": {s: LOW[s][:sets] for s in range(3)}})
    assert found.p_here is not None and (found.p_elsewhere is None) == (sets < 3)
    assert (found.error_elsewhere is None) == (sets == 1)
    assert ("new domains: two held-out domains are too few" in found.note) == (sets == 2)


def test_the_same_difference_everywhere_says_nothing_of_others() -> None:
    right = {"m": {s: [30 + s] * 3 for s in range(3)}, "r": {s: [20 + s] * 3 for s in range(3)}}
    found = versus(right)
    assert found.error_elsewhere == 0 and found.p_elsewhere is None and found.p_here is not None


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1"])
def test_blocks_bound_the_number_of_groups(metric: str) -> None:
    """A metric that is not a mean over images is jackknifed over blocks of images."""
    drawn, images = np.random.default_rng(0), 1500
    held = HeldOutImages(np.arange(images), drawn.integers(0, 2, images), np.zeros(images, int))
    made, runs = [], []
    for method, skill in (("m", 0.9), ("r", 0.6)):
        for seed in range(3):
            right = drawn.random(images) < skill
            predicted = np.where(right, held.labels, 1 - held.labels)
            made.append(Prediction(method, ("d0",), seed, "train_val", held, predicted))
            one = record(method, ("d0",), seed, int(50 * skill) + seed)
            score = replace(one.selected["train_val"].metrics["test"], macro_f1=skill + seed / 50)
            one.selected["train_val"].metrics["test"] = score
            runs.append(one)
    pair = Pair(*runs_by_method(runs, ["m", "r"], "train_val", metric).values())
    found = compared(pair, WithoutGroups(metric, [pair], made))
    assert found is not None and found.error is not None and found.share_images is not None
    assert found.freedom_images == pytest.approx((images if metric == "accuracy" else BLOCKS) - 1)
    sides = [np.mean([without_each_group(metric, one) for one in made if one.method == m], 0) for m in ("m", "r")]
    variance = jackknife_variance(sides[0] - sides[1])
    assert found.error**2 * found.share_images == pytest.approx(variance)
    assert math.isclose(found.difference, 0.3, abs_tol=1e-9)
