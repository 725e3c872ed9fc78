"""Images of no class: the score, its threshold at held-out domains, and the share of such images at a site."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdm_ft.evaluation.expected_site import Rates, Unknown, energy, threshold, unknown_of
from xdm_ft.evaluation.few_labels import clopper_pearson


def unknown(*rates, auroc=0.8):
    domains = {str(i): Rates(auroc=auroc, false_alarms=f, detections=t) for i, (f, t) in enumerate(rates)}
    return Unknown(threshold=0.0, domains=domains)


def test_energy_by_hand():
    logits = np.log([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]])
    assert energy(logits) == pytest.approx([-math.log(8), -math.log(3)])


def test_the_threshold_by_hand():
    """Of 20 images of a domain one may lie above, whichever class was left out; a domain counts as much as another."""
    twenty = np.arange(20.0), np.zeros(0)
    assert threshold([[twenty]]) == 18
    assert threshold([[twenty, (np.arange(20.0) + 100, np.zeros(0))]]) == 117  # two of the second class
    assert threshold([[twenty], [(np.full(1000, -5.0), np.zeros(0))]]) == 17  # two of 20, and none of the others


scores = st.lists(st.floats(-9, 9), min_size=1, max_size=30).map(np.array)


@given(st.lists(st.lists(st.tuples(scores, scores), min_size=1, max_size=3), min_size=1, max_size=4))
def test_false_alarms_are_at_most_5_percent_and_no_lower_threshold_has_so_few(domains):
    tau = threshold(domains)

    def false_alarms(of):
        return np.mean([np.mean([(known > of).mean() for known, _ in pairs]) for pairs in domains])

    assert false_alarms(tau) <= 0.05 + 1e-6
    lower = [s for pairs in domains for known, _ in pairs for s in known if s < tau]
    assert not lower or false_alarms(max(lower)) > 0.05 - 1e-6


def test_rates_of_a_domain_come_from_the_threshold_of_the_others():
    low, high = np.arange(20.0), np.arange(20.0) + 10
    found = unknown_of({"low": [(low, np.array([29.0, 0.0]))], "high": [(high, np.array([19.0, 30.0, 31.0, 40.0]))]})
    at = found.domains
    assert (at["low"].false_alarms, at["low"].detections) == (0, 0.5)  # above 28
    assert (at["high"].false_alarms, at["high"].detections) == (11 / 20, 1)  # above 18
    assert at["low"].auroc == pytest.approx((20 + 0.5) / 40)
    assert found.threshold == 27 and found.auroc == pytest.approx((at["low"].auroc + at["high"].auroc) / 2)


def test_the_share_by_hand():
    share = unknown((0.04, 0.5), (0.08, 0.7)).share(0.2, 200)
    low, high = clopper_pearson(40, 200)
    assert share.value == pytest.approx((0.2 - 0.06) / (0.6 - 0.06))
    assert share.low == pytest.approx((low - 0.08) / (0.7 - 0.08))
    assert share.high == pytest.approx((high - 0.04) / (0.5 - 0.04))
    assert unknown((0.04, 0.5), (0.08, 0.7)).share(0.02, 200)[:2] == (0, 0)
    assert unknown((0.04, 0.5), (0.08, 0.7)).share(0.0, 200) is None  # even known images are flagged at other sites
    assert unknown((0.04, 0.5), (0.08, 0.7)).share(1.0, 200) == (1, 1, 1)
    assert unknown((0.04, 0.3), (0.3, 0.7)).share(0.2, 200) is None  # no better than false alarms elsewhere


@given(st.floats(0, 1), st.integers(1, 5000), st.lists(st.tuples(st.floats(0, 0.3), st.floats(0.4, 1)), min_size=1))
def test_the_share_lies_in_its_interval_and_fewer_images_say_less(flagged, n, rates):
    of = unknown(*rates)
    share, fewer = of.share(round(flagged * n) / n, n), of.share(round(flagged * n) / n, 1)
    if share is None:
        assert flagged < min(f for f, _ in rates)
        return
    assert 0 <= share.low <= share.value + 1e-9 and share.value <= share.high + 1e-9 <= 1 + 1e-9
    assert fewer.high - fewer.low >= share.high - share.low - 1e-9


def test_it_works_from_an_auroc_of_70_percent():
    assert unknown((0, 1), auroc=0.7).works and not unknown((0, 1), auroc=0.69).works
