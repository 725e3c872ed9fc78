"""Domain and class: Cramér's V by hand and under the null, and what cannot be told apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from made_up import MadeUp
from scipy.stats import chi2_contingency

from xdm_ft.protocol.site_class import cramers_v, images_per_class, site_class, site_class_of


def of(counts):
    counts = np.array(counts)
    return site_class(counts, [f"d{d}" for d in range(len(counts))], [f"c{c}" for c in range(counts.shape[1])])


def test_by_hand():
    """φ² = 0.36 of n = 100: less 1/99, over the corrected number of sides 2 − 1/99."""
    value, interval = cramers_v(np.array([[40, 10], [10, 40]]), 100)
    assert value == pytest.approx(((0.36 - 1 / 99) / (1 - 1 / 99)) ** 0.5)
    assert interval.low == pytest.approx(0.404, abs=0.005) and interval.high == pytest.approx(0.796, abs=0.005)


def test_equal_shares_and_one_class_per_domain():
    assert cramers_v(np.full((4, 7), 50), 1400)[0] == 0
    value, interval = cramers_v(np.diag([30, 30, 30]), 90)
    assert value == 1 and interval.high == 1 and interval.low < 1


@given(arrays.arrays(np.int64, (3, 4), elements=st.integers(0, 60)))
def test_v_lies_in_its_interval_and_no_order_matters(counts):
    value, interval = cramers_v(counts, int(counts.sum()))
    other, _ = cramers_v(counts[::-1].T, int(counts.sum()))
    if value is None:
        assert other is None
        return
    assert other == pytest.approx(value) and 0 <= value <= 1
    assert interval is None or 0 <= interval.low <= value <= interval.high <= 1
    table = counts[counts.sum(1) > 0][:, counts.sum(0) > 0]
    plain = (chi2_contingency(table, correction=False).statistic / table.sum() / (min(table.shape) - 1)) ** 0.5
    assert value <= plain + 1e-9


@pytest.mark.parametrize("strength", [0.1, 0.6])
def test_the_interval_holds_a_planted_association(strength):
    draws = np.random.default_rng(1)
    shares = (1 - strength) / 16 * np.ones((4, 4)) + strength / 4 * np.eye(4)  # V is the strength
    intervals = [cramers_v(draws.multinomial(500, shares.ravel()).reshape(4, 4), 500)[1] for _ in range(200)]
    assert np.mean([interval.low <= strength <= interval.high for interval in intervals]) > 0.9


def test_images_of_a_group_count_as_one():
    labels, domains = np.tile([0, 1], 100), np.repeat([0, 1], 100)
    labels[:30] = 0
    alone = site_class_of(MadeUp(labels, domains))
    grouped = site_class_of(MadeUp(labels, domains, groups=np.arange(200) // 10))
    assert grouped.interval.high - grouped.interval.low > alone.interval.high - alone.interval.low
    assert grouped.counts.tolist() == alone.counts.tolist()
    one_patient = site_class_of(MadeUp(labels, domains, groups=np.zeros(200)))
    assert one_patient.cramers_v is not None and one_patient.interval is None and "(" not in one_patient.line


def test_counts_are_those_of_a_loop_and_of_rows():
    data = MadeUp([0, 1, 1, 2, 0], [0, 0, 1, 1, 1])
    assert images_per_class(data).tolist() == [[1, 1, 0], [1, 1, 1]]
    assert images_per_class(data, np.array([0, 1, 2])).tolist() == [[1, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[5, 5], [5, 5]], []),
        ([[9, 9, 9]], []),  # a single domain
        ([[9], [9]], []),  # a single class
        ([[9, 0], [0, 0]], []),
        ([[5, 5], [5, 0]], ['all images in d1 are of "c0"', 'all images of "c1" are in d0']),
        ([[5, 5, 0], [5, 5, 5]], ['all images of "c2" are in d1']),
        (
            [[5, 0], [0, 5]],
            [f'all images in d{i} are of "c{i}", and no other domain has such images' for i in range(2)],
        ),
        (
            [[5, 5, 0, 0], [5, 5, 0, 0], [0, 0, 5, 5]],
            [
                'all images in d0, d1 are of "c0", "c1", and no other domain has such images',
                'all images in d2 are of "c2", "c3", and no other domain has such images',
            ],
        ),
    ],
)
def test_what_cannot_be_told_apart(counts, expected):
    assert list(of(counts).confounded) == expected


def test_words_and_json():
    result = of([[50, 50, 0], [20, 60, 20]])
    assert result.lacking == (("d0", "c2"),) and result.line.startswith("Cramér's V 0.")
    text = " ".join(result.sentences)
    assert 'no image of "c2" in d0' in text and "55% of the images" in text and "for 55%" in text
    assert result.to_json()["lacking"] == [{"domain": "d0", "class": "c2"}]
    assert result.to_json()["counts"] == [[50, 50, 0], [20, 60, 20]]
    alone = of([[5, 5]])
    assert alone.line == "" and alone.cramers_v is None and len(alone.sentences) == 1
    assert len(of(np.full((50, 3), 4)).sentences) == 2
