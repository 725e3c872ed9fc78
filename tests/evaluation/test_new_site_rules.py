"""ExpectedAccuracy accuracy without labels, and few labels: by hand, by naive solvers, and in simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import binom, norm, t

from xdm_ft.evaluation.expected_site import (
    AccuracyEstimates,
    agreement,
    confidence_threshold,
    expect,
    on_the_line,
    past_skill,
    transported_confidence,
)
from xdm_ft.evaluation.few_labels import (
    choose_images,
    clopper_pearson,
    difference_estimate,
    fewest_answered,
    images_of_groups,
    paired_interval,
    spread_rows,
    threshold_for,
)


@pytest.mark.parametrize("seed", range(4))
def test_transport_is_the_linear_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(4, 0.5), 30), rng.dirichlet(np.ones(4))
    rows, columns = np.kron(np.eye(30), np.ones(4)), np.kron(np.ones(30), np.eye(4))
    plan = linprog(-p.ravel(), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([np.full(30, 1 / 30), q]))
    assert transported_confidence(p, q) == pytest.approx(-plan.fun, abs=2e-3)
    assert transported_confidence(p, q) >= -plan.fun - 1e-9, "any v gives an upper bound"


def test_the_line_recovers_accuracies_that_lie_on_it() -> None:
    a, b, accuracy = 0.8, -0.4, np.array([0.6, 0.7, 0.75, 0.8, 0.9])
    i, j = np.triu_indices(5, 1)
    there = norm.cdf(norm.ppf(accuracy[i]) / 2 + norm.ppf(accuracy[j]) / 2 + 0.1)
    here = norm.cdf(a * norm.ppf(there) + b)
    expected = norm.cdf(a * norm.ppf(0.9) + b)
    assert on_the_line(accuracy, there, here, (1000, 1000)) == pytest.approx(expected, abs=1e-9)
    assert on_the_line(accuracy, np.full(10, 0.7), here, (1000, 1000)) is None
    assert on_the_line(accuracy, there, np.ones(10), (1000, 1000)) is None
    predicted = np.array([[0, 1, 1], [0, 1, 2], [1, 1, 2]])
    assert agreement(predicted) == pytest.approx([2 / 3, 1 / 3, 2 / 3])


def test_the_threshold_leaves_as_many_below_as_are_wrong_in_domains_of_one_weight() -> None:
    confidence = [np.array([0.2, 0.4, 0.6, 0.8]), np.array([0.5, 0.9])]
    right = [np.array([False, True, True, True]), np.array([True, True])]
    # of the total weight 2, 1/4 is wrong: the image of 0.2 alone lies below
    threshold = confidence_threshold(confidence, right)
    assert threshold == 0.4 and np.mean([(c >= threshold).mean() for c in confidence]) == pytest.approx(7 / 8)
    assert confidence_threshold(confidence, [~one for one in right]) == pytest.approx(0.9)
    assert confidence_threshold(confidence, [one & False for one in right]) == math.inf


def test_the_interval_and_the_verdicts_by_hand() -> None:
    values, errors = {"a": 0.9, "b": 0.8, "c": 0.7}, {"a": -0.02, "b": 0.01, "c": 0.02}
    found = expect(AccuracyEstimates(0.75, 0.8, 0.7), errors, values, 100.0, n=400)
    half = t.ppf(0.975, 3) * math.sqrt((0.02**2 + 0.01**2 + 0.02**2) / 3 + 0.75 * 0.25 / 100)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.75, 0.75 - half, 0.75 + half))
    assert found.verdict == "unknown" and found.refused is None
    assert expect(AccuracyEstimates(0.69, 0.69, 0.69), errors, values, 1e9, n=400).verdict == "below"
    small = {"a": 1e-3, "b": 0.0, "c": -1e-3}
    assert expect(AccuracyEstimates(0.79, 0.79, 0.79), small, values, 1e9, n=400).verdict == "as_promised"
    assert past_skill(np.array([0.02, 0.01, 0.02]), np.array([0.9, 0.8, 0.7])) == pytest.approx(1 - 0.05 / 0.3)


@pytest.mark.parametrize(
    ("parts", "errors", "n", "reason"),
    [
        ((0.7, 0.7, 0.7), (0.01,), 400, "1 held-out domain; 3"),
        ((0.7, 0.7, 0.7), (0.01, 0.01), 400, "2 held-out domains; 3"),
        ((0.7, 0.7, 0.7), (0.01, 0.01, 0.01), 49, "49 images are too few"),
    ],
)
def test_refusals(parts: tuple[float, ...], errors: tuple[float, ...], n: int, reason: str) -> None:
    past = dict(zip("abc", errors, strict=False))
    found = expect(AccuracyEstimates(*parts), past, {name: 0.7 + 0.1 * k for k, name in enumerate(past)}, n, n=n)
    assert found.refused is not None and reason in found.refused


def test_estimates_that_disagree_or_had_no_use_warn() -> None:
    values, small, large = {"a": 0.7, "b": 0.8, "c": 0.9}, dict.fromkeys("abc", 0.01), dict.fromkeys("abc", 0.2)
    apart, useless = (
        expect(AccuracyEstimates(0.4, 0.5, 0.61), small, values, 400, n=400),
        expect(AccuracyEstimates(0.7, 0.7, 0.7), large, values, 400, n=400),
    )
    assert apart.refused is useless.refused is None and apart.verdict == "below", "all three are"
    assert "differ by 21 points" in apart.warnings[0] and "as good an estimate" in useless.warnings[0]
    assert expect(AccuracyEstimates(0.7, 0.7, 0.7), small, values, 400, n=400).warnings == ()


def test_labels_are_chosen_once_and_a_quarter_is_random() -> None:
    rng = np.random.default_rng(0)
    z, p = rng.normal(size=(300, 8)), rng.dirichlet(np.ones(3), 300)
    for budget in (1, 8, 40, 120, 299):
        chosen = choose_images(z, p, budget, np.random.default_rng(1))
        rows = np.concatenate(chosen)
        assert len(rows) == budget == len({*rows.tolist()}) and len(chosen.evaluate) == math.ceil(budget / 4)
        adapting = choose_images(z, p, budget, np.random.default_rng(1), measures=0)
        assert len(adapting.evaluate) == 0 and len({*adapting.adapt.tolist()}) == budget
    large = choose_images(z, p, 120, np.random.default_rng(1)).adapt
    margin = np.diff(np.sort(p, axis=1)[:, -2:], axis=1)[:, 0]
    assert margin[large].mean() < 0.8 * margin.mean()
    top = np.sort(p, axis=1)[:, -2:]  # is all that is read
    same = choose_images(z, p, 120, np.random.default_rng(1)), choose_images(z, top, 120, np.random.default_rng(1))
    assert np.array_equal(same[0].adapt, same[1].adapt) and not np.array_equal(large, np.sort(large))
    # second probabilities of e⁻³⁰ to e⁻⁹⁰, so that every margin is 1: 20 of 30 images are among the 70 least sure
    sure = np.exp(np.stack([-np.linspace(30, 90, 300), np.zeros(300)], 1)).astype(np.float32)[rng.permutation(300)]
    chosen = choose_images(z, sure, 30, np.random.default_rng(1), measures=0).adapt
    assert (sure[chosen, 0] >= np.sort(sure[:, 0])[-70]).sum() >= 20
    everything = choose_images(z, p, 1000, np.random.default_rng(1))
    assert (len(everything.evaluate), len(everything.adapt)) == (75, 225)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 400), st.integers(0, 5))
def test_each_part_has_images_of_several_groups_and_few_of_each(sizes: list[int], budget: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    z, p = rng.normal(size=(len(groups), 4)), rng.dirichlet(np.ones(3), len(groups))
    chosen = choose_images(z, p, budget, np.random.default_rng(seed), groups)
    rows, fewest, budget = np.concatenate(chosen), max(1, min(len(sizes) // 2, 5)), min(budget, len(groups))
    assert 0 < len(rows) == len({*rows.tolist()}) <= budget
    assert not {*groups[chosen.evaluate]} & {*groups[chosen.adapt]}
    for part, of_part in ((chosen.evaluate, math.ceil(budget / 4)), (chosen.adapt, budget - len(chosen.evaluate))):
        counts = np.unique_counts(groups[part]).counts
        assert len(counts) >= min(fewest, of_part) or len(sizes) == 1
        assert not len(counts) or counts.max() <= math.ceil(of_part / fewest)


@pytest.mark.parametrize(
    ("sizes", "budget"),
    [
        ([*range(1, 13)] * 7, 100),
        ([2] * 20 + [100] * 6, 100),
        ([82, 58, 49, 44, 30, 25, 25, 23, 22, 21, 18, 14, 13, 12] + [5] * 30, 100),
    ],
)
def test_the_mean_over_the_random_part_is_the_accuracy_of_the_site(sizes: list[int], budget: int) -> None:
    """Also where images of large groups are harder; and the part has about a quarter of the budget."""
    n_g, number = np.array(sizes), math.ceil(budget / 4)
    right = (n_g < n_g.mean()) | (np.arange(len(sizes)) % 3 == 0)
    draws = [images_of_groups(n_g, number, 5, budget - number, np.random.default_rng(seed)) for seed in range(400)]
    means = [float(drawn @ right / drawn.sum()) for drawn in draws]
    assert np.mean(means) == pytest.approx(n_g @ right / n_g.sum(), abs=max(3 * np.std(means) / 400**0.5, 1e-9))
    numbers = [drawn.sum() for drawn in draws]
    assert np.mean(numbers) == pytest.approx(number, rel=0.05) and max(numbers) < 1.2 * number


def test_k_means_finds_the_clusters() -> None:
    rng = np.random.default_rng(0)
    centres = np.eye(5, 16)
    z = np.concatenate([centre + 0.05 * rng.normal(size=(40, 16)) for centre in centres])
    chosen = spread_rows(z, np.arange(200), 5, rng)
    assert sorted(chosen // 40) == [0, 1, 2, 3, 4]
    assert len({*spread_rows(np.ones((30, 4)), np.arange(30), 7, rng).tolist()}) == 7, "equal images"


@pytest.mark.parametrize("share", [0.6, 0.9, 0.98])
def test_intervals_of_few_labels_cover(share: float) -> None:
    for n in (25, 50):
        covered = sum(
            binom.pmf(k, n, share) for k in range(n + 1) if (ends := clopper_pearson(k, n))[0] <= share <= ends[1]
        )
        assert covered >= 0.95


def test_the_difference_estimate_has_the_naive_mean_and_saves_labels() -> None:
    rng = np.random.default_rng(0)
    c = rng.uniform(0.3, 1, 5000)
    right = rng.random(5000) < c
    rows = rng.choice(5000, 200, replace=False)
    found = difference_estimate(c, c[rows], right[rows])
    assert found.value == pytest.approx(c.mean() + (right[rows] - c[rows]).mean())
    naive = c.var(ddof=1) / 5000 + (right[rows] - c[rows]).var(ddof=1) / 200
    assert found.error == pytest.approx(naive**0.5) and found.freedom == 199
    assert found.error < math.sqrt(right[rows].var(ddof=1) / 200) and abs(found.value - right.mean()) < 4 * found.error
    twice = difference_estimate(c, np.repeat(c[rows], 2), np.repeat(right[rows], 2), np.repeat(np.arange(200), 2))
    assert twice == pytest.approx(found), "images that are the same twice are one"
    assert difference_estimate(c, c[rows], right[rows], np.zeros(200)) is None


def test_intervals_of_what_two_heads_differ_by() -> None:
    """By hand: 3 of 10 become right and 1 wrong, so that (3 − 1)/12 ± t₁₁ s/√12 of the values with one more of each."""
    change = np.array([1, 1, 1, -1, 0, 0, 0, 0, 0, 0])
    spread = (6 / 12 - (2 / 12) ** 2) / 11
    half = float(t.ppf(0.975, 11)) * spread**0.5
    assert paired_interval(change) == pytest.approx((2 / 12 - half, 2 / 12 + half))
    low, high = paired_interval(np.zeros(25, int))
    assert -high == pytest.approx(low) and low < -0.05, "nothing changed is not nothing can change"
    assert paired_interval(np.repeat(change, 2), np.repeat(np.arange(10), 2)).low < low + half
    classes = np.repeat([0, 1], [8, 2])
    of_classes = [np.append(part, [1, -1]) for part in (change[:8], change[8:])]
    means = [part.mean() for part in of_classes]
    squares = sum(np.square((p - p.mean()) / len(p) / 2).sum() for p in of_classes)
    half = t.ppf(0.975, 13) * (squares * 14 / 13) ** 0.5
    assert paired_interval(change, None, classes) == pytest.approx((np.mean(means) - half, np.mean(means) + half))
    assert paired_interval(change, None, 0 * classes) == pytest.approx(paired_interval(change))
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        low, high = paired_interval(rng.choice([1, 0, -1], 25, p=[0.2, 0.72, 0.08]))
        covered += low <= 0.12 <= high
    assert covered >= 370


def test_thresholds_keep_their_risk() -> None:
    assert [fewest_answered(risk) for risk in (0.05, 0.1, 0.2)] == [45, 22, 11]
    rng, broken, found = np.random.default_rng(0), 0, 0
    for _ in range(300):
        c = rng.uniform(0, 1, 100)
        threshold = threshold_for(0.1, c, rng.random(100) < 0.5 + 0.5 * c)
        if threshold is not None:
            found += 1
            broken += (1 - (0.5 + 0.25 * (1 + threshold.value))) > 0.1  # true risk above the threshold
    assert found > 30 and broken <= 0.1 * 300
    sure = threshold_for(0.1, np.linspace(0, 1, 40), np.ones(40, bool))
    assert sure is not None and (sure.value, sure.answered, sure.wrong) == (0.0, 40, 0)
    assert threshold_for(0.05, np.linspace(0, 1, 40), np.ones(40, bool)) is None, "fewer than 45 answers"
    twice = threshold_for(0.1, np.repeat(np.linspace(0, 1, 40), 2), np.ones(80, bool), weight=0.5)
    assert twice is not None and (twice.value, twice.answered) == (0.0, 80)
    assert threshold_for(0.1, np.linspace(0, 1, 40), np.ones(40, bool), weight=0.5) is None
