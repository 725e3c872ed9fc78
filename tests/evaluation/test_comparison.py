"""Comparisons of two methods from their models' predictions, against their definition in loops; and verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from itertools import product as every_pair
from typing import Any

import numpy as np
import pytest
from scipy import stats

from xdm_ft.core import ModelKey, Score
from xdm_ft.evaluation.estimates import (
    Estimate,
    Term,
    estimate_here,
    harmonic,
    holm,
    over_images,
    over_paired_seeds,
    over_seeds,
    over_sets,
    welch,
)
from xdm_ft.evaluation.predictions import BLOCKS, HeldOutImages, Prediction, jackknife_variance, without_each_group
from xdm_ft.results import runs_by_method
from xdm_ft.results.model import Pick, Record
from xdm_ft.results.table import EQUAL, NO_VERDICT, UNKNOWN, Comparison, PValue
from xdm_ft.results.verdicts import Pair, WithoutGroups, compared, judge

VIT: dict[str, Any] = {"encoder": "vit", "trainable": False}  # of a record

Right = dict[tuple[str, str, int], np.ndarray]  # {(method, domain, seed): which images are right}
SIZES = {"a": [9, 8, 7, 3, 2, 1], "b": [5, 5, 5, 5], "c": [12, 4, 4, 4], "d": [6, 6, 6, 2, 2, 2]}


def groups_of(domain: str, grouped: bool) -> np.ndarray:
    sizes = SIZES[domain]
    return np.repeat(np.arange(len(sizes)), sizes) if grouped else np.arange(sum(sizes))


def trained(seeds: dict[str, Sequence[int]], domains: str) -> Right:
    """Made models: one that is right on more images with some seeds, and on some images with all."""
    generator, right = np.random.default_rng(0), Right()
    for domain in domains:
        ease = generator.normal(size=sum(SIZES[domain]))
        for m, (method, own) in enumerate(seeds.items()):
            for seed in own:
                score = ease + 0.4 * m + 0.3 * generator.normal() + generator.normal(size=len(ease))
                right[method, domain, seed] = score > 0
    return right


def product(
    right: Right,
    domains: str,
    grouped: bool = False,
    deterministic: Collection[str] = (),
    lost: tuple[str, str, int] | None = None,
    no_verdict: str = "",
) -> Comparison | None:
    """The comparison of the package; `lost`: a model without predictions."""
    predictions, records = list[Prediction](), list[Record]()
    for key, own in right.items():
        method, domain, seed = key
        score = Score(float(own.mean()), 0.0, 0.0, None, None, 0.0, 0.0, len(own), {}, {})
        picked = {"rule": Pick(1, "", {"test": score})}
        records.append(Record(ModelKey(method, (domain,), seed, 0), {}, "ok", selected=picked, **VIT))
        labels = np.zeros(len(own), np.int64)
        images = HeldOutImages(np.arange(len(own)), labels, labels, groups_of(domain, True) if grouped else None)
        if key != lost:
            predictions.append(Prediction(method, (domain,), seed, "rule", images, 1 - own.astype(np.int64)))
    pair = Pair(*runs_by_method(records, ["m", "r"], "rule", "accuracy", deterministic).values())
    return compared(pair, WithoutGroups("accuracy", [pair], predictions), no_verdict)


def made(right: Right, domains: str, grouped: bool = False, **settings: Any) -> Comparison:
    comparison = product(right, domains, grouped, **settings)
    assert comparison is not None
    return comparison


def variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def naive(
    right: Right, domains: str, grouped: bool, deterministic: Collection[str] = (), other_regime: bool = False
) -> tuple[float, float, float | None, float | None, float | None]:
    """Difference, √V, its degrees of freedom, p here and p elsewhere: the definitions, in loops."""
    seeds = {}
    for method in ("m", "r"):
        ever = sorted({s for name, _, s in right if name == method})
        seeds[method] = [s for s in ever if all((method, d, s) in right for d in domains)]
    common = [s for s in seeds["m"] if s in seeds["r"]]
    paired = (len(common) >= 10 and not deterministic) != other_regime
    if paired:
        seeds = {"m": common, "r": common}
    y = {(m, d, s): right[m, d, s].mean() for m in seeds for d in domains for s in seeds[m]}
    number = len(domains)
    delta = [
        sum(y["m", d, s] for s in seeds["m"]) / len(seeds["m"])
        - sum(y["r", d, s] for s in seeds["r"]) / len(seeds["r"])
        for d in domains
    ]

    images, below = 0.0, 0.0  # V_I, Σ (V_d/D²)²/(G_d − 1)
    for d in domains:
        groups = groups_of(d, grouped)
        without = []
        for g in np.unique(groups):
            sides = {m: [right[m, d, s][groups != g].mean() for s in seeds[m]] for m in seeds}
            without.append(sum(sides["m"]) / len(sides["m"]) - sum(sides["r"]) / len(sides["r"]))
        count, mean = len(without), sum(without) / len(without)
        v = (count - 1) / count * sum((value - mean) ** 2 for value in without) / number**2
        sizes = [(groups == g).sum() for g in np.unique(groups)]
        images += v
        below += v**2 / (sum(sizes) ** 2 / sum(size**2 for size in sizes) - 1)
    f_images = images**2 / below if below else math.inf

    if paired:
        of_seeds = variance([sum(y["m", d, s] - y["r", d, s] for d in domains) / number for s in common]) / len(common)
        f_seeds = len(common) - 1.0
    else:
        a, b, a_below, b_below = 0.0, 0.0, 0.0, 0.0
        for m in seeds:
            if m in deterministic:
                continue
            n = len(seeds[m])
            for d in domains:
                one = variance([y[m, d, s] for s in seeds[m]]) / (n * number**2)
                a, a_below = a + one, a_below + one**2 / (n - 1)
            one = variance([sum(y[m, d, s] for d in domains) / number for s in seeds[m]]) / n
            b, b_below = b + one, b_below + one**2 / (n - 1)
        of_seeds, f_seeds = max(a, b), math.inf
        if a:
            f_a, f_b = a**2 / a_below, b**2 / b_below
            f_seeds = of_seeds / (a / f_a + (of_seeds - a) / f_b)
    total, quotient = of_seeds + images, of_seeds / f_seeds + images / f_images
    mean = sum(delta) / number
    if total == 0:
        return mean, 0.0, None, 1.0 if mean == 0 else None, None
    freedom = total / quotient
    if of_seeds > 0:  # the limit: what seeds have, and a little more with one domain and no pairs
        freedom = min(freedom, f_seeds * ((total / of_seeds) ** 0.5 if number == 1 and not paired else 1))
    p = 2 * stats.t.cdf(-abs(mean) / total**0.5, freedom)
    if number < 3:
        return mean, total**0.5, freedom, p, None
    elsewhere = 2 * stats.t.cdf(-abs(mean) * number**0.5 / variance(delta) ** 0.5, number - 1)
    return mean, total**0.5, freedom, p, elsewhere


CASES = {
    "three seeds": (range(3), range(3)),
    "other seeds": (range(3), range(10, 17)),
    "nine common seeds": (range(9), range(9)),
    "ten common seeds": (range(10), range(10)),
    "ten of eleven and twelve seeds": (range(11), range(1, 13)),
}


@pytest.mark.parametrize("grouped", [False, True], ids=["images", "groups"])
@pytest.mark.parametrize("domains", ["a", "ab", "abcd"])
@pytest.mark.parametrize("case", CASES)
def test_a_comparison_is_the_definition(case: str, domains: str, grouped: bool) -> None:
    first, second = CASES[case]
    right = trained({"m": first, "r": second}, domains)
    expected, row = naive(right, domains, grouped), made(right, domains, grouped)
    assert (row.paired, row.sets, row.domains) == ("ten" in case, len(domains), len(domains))
    assert (row.difference, row.error, row.freedom) == pytest.approx(expected[:3])
    assert row.p_here == (pytest.approx(expected[3]), None)
    assert row.p_elsewhere == (None if len(domains) < 3 else (pytest.approx(expected[4]), None))
    assert (row.error_elsewhere is None) == (len(domains) == 1)
    assert ("new domains: two held-out domains are too few" in row.note) == (len(domains) == 2)
    assert row.share_seeds is not None and row.share_images is not None
    assert row.share_seeds + row.share_images == pytest.approx(1)
    other = None, None
    if case in ("nine common seeds", "ten common seeds", "ten of eleven and twelve seeds"):
        common = {key: own for key, own in right.items() if key[2] in {*first} & {*second}}
        other = naive(common, domains, grouped, other_regime=True)[1:3]
    assert (row.other_error, row.other_freedom) == pytest.approx(other)


@pytest.mark.parametrize("deterministic", ["m", "r", "mr"])
def test_a_deterministic_side_is_the_definition(deterministic: str) -> None:
    right = trained({"m": range(12), "r": range(12)}, "abcd")
    for (method, domain, seed), _ in list(right.items()):
        if method in deterministic:
            right[method, domain, seed] = right[method, domain, 0]
    expected = naive(right, "abcd", True, deterministic)
    once = {key: own for key, own in right.items() if key[0] not in deterministic or key[2] == 0}
    for kept in right, once:
        row = made(kept, "abcd", True, deterministic=deterministic)
        assert (row.paired, row.seeds) == (False, None if deterministic == "mr" else 12)
        assert (row.difference, row.error, row.freedom) == pytest.approx(expected[:3])
        assert (row.share_seeds == 0) == (deterministic == "mr")


def test_only_complete_seeds_count() -> None:
    right = trained({"m": range(11), "r": range(11)}, "ab")
    for lost in (("m", "a", 4), ("r", "b", 7)):
        del right[lost]
    expected, row = naive(right, "ab", False), made(right, "ab")
    assert (row.paired, row.seeds) == (False, 10), "9 are common"
    assert (row.difference, row.p_here) == (pytest.approx(expected[0]), (pytest.approx(expected[3]), None))
    few = trained({"m": range(2), "r": range(3)}, "ab")
    assert product({key: own for key, own in few.items() if key not in (("m", "a", 0), ("m", "b", 1))}, "ab") is None


@pytest.mark.parametrize("seeds", [4, 12])
def test_seeds_that_give_the_same_model_have_no_variance(seeds: int) -> None:
    """Accuracies such as 0.1 have a mean over seeds that is rounded: that is no variance over seeds."""
    right = trained({"m": range(seeds), "r": range(seeds)}, "abcd")
    row = made({key: right[key[0], key[1], 0] for key in right}, "abcd", True)
    assert (row.share_seeds, row.freedom_seeds) == (0, None)
    assert row.freedom == row.freedom_images != seeds - 1


def test_predictions_without_any_variance() -> None:
    nothing, everything = ({("mr"[i], d, s): np.full(20, i == 0) for d in "abc" for s in range(3)} for i in (0, 1))
    equal = made(nothing | {("r", d, s): own for (_, d, s), own in nothing.items()}, "abc")
    assert (equal.difference, equal.error, equal.freedom, equal.share_seeds) == (0, 0, None, None)
    assert equal.p_here == (1, None) and equal.p_elsewhere is None
    apart = made(nothing | everything, "abc")
    assert (apart.difference, apart.error, apart.p_here, apart.p_elsewhere) == (1, 0, None, None)
    assert apart.note.startswith("no verdict: nothing varies, so there is no error to compare with")


@pytest.mark.parametrize("values", [(0.61 - 0.6, 0.7 - 0.69, 0.23 - 0.22), (0.0, 0.0, 0.0), (0.01, 0.01, 0.0100001)])
def test_equal_differences_say_nothing_of_other_domains(values: tuple[float, ...]) -> None:
    on_others = over_sets(values)
    assert on_others is not None and (on_others.error > 0) == (values[2] == 0.0100001)


@pytest.mark.parametrize(
    ("seeds", "settings", "reason"),
    [
        (1, {}, "it needs 3 seeds, and 1 is complete"),
        (2, {}, "it needs 3 seeds, and 2 are complete"),
        (3, {"lost": ("m", "b", 1)}, "predictions are missing"),
        (3, {"no_verdict": "a reason"}, "a reason"),
        (3, {}, ""),
    ],
)
def test_no_verdict_has_its_reason(seeds: int, settings: dict[str, Any], reason: str) -> None:
    row = made(trained({"m": range(seeds), "r": range(5)}, "abcd"), "abcd", **settings)
    assert (row.p_here is None) == (row.p_elsewhere is None) == bool(reason)
    assert row.note == (f"no verdict: {reason}; " if reason else "") + "images assumed independent"
    assert (row.error is None) == (seeds == 1 or "lost" in settings), "an error needs two seeds and all predictions"
    assert row.error_elsewhere is not None


@pytest.mark.parametrize(
    ("sizes", "note"),
    [
        ([19, 1], "has effectively 1.1 groups, and it needs 2; only 2 groups in a test domain"),
        ([5, 5, 5, 5], "only 4 groups in a test domain, effectively 4.0"),
        ([2] * 10, "new domains: two held-out domains are too few"),
    ],
)
def test_few_groups_are_noted(sizes: list[int], note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "a", [2] * 10)
    monkeypatch.setitem(SIZES, "b", sizes)
    row = made(trained({"m": range(3), "r": range(3)}, "ab"), "ab", True)
    assert note in row.note and (row.p_here is None) == (sizes == [19, 1])
    assert ("only" in row.note) == (len(sizes) < 10) and "independent" not in row.note


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1"])
def test_blocks_bound_the_number_of_groups(metric: str) -> None:
    """A metric that is not a mean over images is jackknifed over blocks of images."""
    generator, count = np.random.default_rng(0), 1500
    images = HeldOutImages(np.arange(count), generator.integers(0, 2, count), np.zeros(count, int))
    predictions, records = list[Prediction](), list[Record]()
    for (method, skill), seed in every_pair((("m", 0.9), ("r", 0.6)), range(3)):
        predicted = np.where(generator.random(count) < skill, images.labels, 1 - images.labels)
        predictions.append(Prediction(method, ("a",), seed, "rule", images, predicted))
        value = skill + seed / 50
        picked = Pick(1, "", {"test": Score(value, 0.0, value, None, None, 0.0, 0.0, count, {}, {})})
        records.append(Record(ModelKey(method, ("a",), seed, 0), {}, "ok", selected={"rule": picked}, **VIT))
    pair = Pair(*runs_by_method(records, ["m", "r"], "rule", metric).values())
    row = compared(pair, WithoutGroups(metric, [pair], predictions))
    assert row is not None and row.error is not None and row.share_images is not None
    assert row.freedom_images == pytest.approx((count if metric == "accuracy" else BLOCKS) - 1)
    first, second = (np.mean([without_each_group(metric, p) for p in predictions if p.method == m], 0) for m in "mr")
    assert row.error**2 * row.share_images == pytest.approx(jackknife_variance(first - second))


def test_an_estimate_is_that_of_scipy() -> None:
    values = [0.011, -0.004, 0.02, 0.007]
    expected = stats.ttest_1samp(values, 0)
    estimate = over_sets(values)
    assert estimate is not None
    assert estimate.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert estimate.p() == pytest.approx(expected.pvalue)
    assert Estimate(0.0, 0.0, 2).p() == 1
    assert Estimate(0.1, 0.0, 2).p() is None


def test_one_domain_is_the_test_of_welch() -> None:
    """With one held-out set Σ a = b, and without a variance over images."""
    first, second = np.array([[0.71, 0.74, 0.78]]), np.array([[0.6, 0.64, 0.69, 0.61]])
    no_images, seeds = Term(0.0, math.inf), over_seeds(first, second)
    found = estimate_here(float(first.mean() - second.mean()), seeds, no_images, sets=1, paired=False)
    expected = stats.ttest_ind(first[0], second[0], equal_var=False)
    assert (found.p(), found.freedom) == (pytest.approx(expected.pvalue), pytest.approx(expected.df))


def test_sums_of_variances_by_hand() -> None:
    terms = [Term(3.0, 2.0), Term(1.0, 8.0), Term(0.0, 0.5)]
    assert welch(terms) == (4.0, pytest.approx(16 / (9 / 2 + 1 / 8)))
    assert harmonic(terms) == (4.0, pytest.approx(4 / (3 / 2 + 1 / 8)))
    assert welch([]) == harmonic([Term(0.0, 3.0)]) == (0.0, math.inf)
    assert over_images([8.0, 4.0], [5.0, 3.0]) == (3.0, pytest.approx(9 / (4 / 4 + 1 / 2)))


def test_pairing_by_hand_and_values_that_are_equal() -> None:
    assert over_paired_seeds(np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]])) == (pytest.approx(1 / 3), 2)  # means 0, 2, 1
    equal = np.full((2, 3), 0.1)  # the mean of three is rounded, which is no variance
    assert over_paired_seeds(equal) == over_seeds(equal, equal) == (0, math.inf)


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])  # 3 × 0.01, 2 × 0.03, and no less than before
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def comparison(difference: float, error: float, p: float | None, elsewhere: float | None = None) -> Comparison:
    p_here, p_elsewhere = (None if value is None else PValue(value, None) for value in (p, elsewhere))
    return Comparison(
        selection="rule", first="m", second="r", sets=4, domains=4, paired=False, difference=difference, error=error,
        freedom=1e9, p_here=p_here, p_elsewhere=p_elsewhere, note="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "difference", "expected"),
    [("accuracy", 0.1, "better"), ("accuracy", -0.1, "worse"), ("nll", -0.1, "better"), ("ece", 0.1, "worse")],
)
def test_the_words_of_a_verdict(metric: str, difference: float, expected: str) -> None:
    rows = [comparison(difference, 0.1, p) for p in (0.0249, 0.05, None)]
    sure, near, untested = judge(metric, rows, [True] * 3)
    assert (sure.here, sure.p_here) == (expected, (0.0249, pytest.approx(0.0498)))
    assert (near.here, near.p_here) == (EQUAL, (0.05, 0.05))
    assert (untested.here, untested.p_here) == (NO_VERDICT, None)
    turned = sure.swapped()
    assert turned.here == {"better": "worse", "worse": "better"}[expected]
    assert (turned.first, turned.second, turned.difference) == ("r", "m", -difference)
    assert Comparison.from_json(json.loads(json.dumps(sure.to_json()))) == sure
    (later,) = judge(metric, [comparison(difference, 0.05, 0.02)], [True], alpha=0.0125, look=2)
    assert (later.here, later.look) == (EQUAL, 2), "a later look has its own level"


def test_elsewhere_needs_both_tests() -> None:
    """Holm runs over both; the larger of both values counts."""
    rows = [comparison(0.1, 0.01, 0.001, 0.001), comparison(0.1, 0.01, 0.001, 0.03), comparison(0.1, 0.01, 0.04, 0.001)]
    rows.append(comparison(0.1, 0.01, 0.001, None))
    both, not_there, not_here, unknown = judge("accuracy", rows, [True] * 4)
    assert (both.here, both.elsewhere, both.p_elsewhere) == ("better", "better", (0.001, 0.004))
    assert (not_there.here, not_there.elsewhere) == ("better", UNKNOWN)
    assert not_there.p_elsewhere == (0.03, pytest.approx(0.06))  # 2 × 0.03, as the one without a p counts as 1
    assert (not_here.here, not_here.p_elsewhere) == ("better", (0.001, pytest.approx(0.04)))
    assert (unknown.here, unknown.elsewhere, unknown.p_elsewhere) == ("better", UNKNOWN, None)


@pytest.mark.parametrize(("comparisons", "quantile"), [(1, 1.645), (2, 1.960), (13, 2.665)])
def test_equal_within_a_margin(comparisons: int, quantile: float) -> None:
    """Two one-sided tests at 0.05/M: the interval ends at the normal quantile of 1 − 0.05/M."""
    rows = [comparison(0.003, (0.01 - 0.003) / quantile * factor, 0.5) for factor in (0.999, 1.001)]
    others = [comparison(0.003, 0.1, 0.5)] * (comparisons - 1)
    judged = [judge("accuracy", [row, *others], [True] * comparisons, margin=0.01)[0] for row in rows]
    assert [row.equal_within for row in judged] == [0.01, None]
