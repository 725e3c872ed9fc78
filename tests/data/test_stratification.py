"""A stratified part: exact fractions for independent rows, approximate ones for whole groups."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xdm_ft.runtime.randomness import validation_part

strata = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(lambda values: np.array(values, np.int64))
fractions = st.sampled_from([0.05, 0.2, 0.5, 0.9])
seeds = st.integers(0, 1000)


@given(stratum=strata, fraction=fractions, seed=seeds)
@settings(max_examples=40)
def test_every_stratum_gives_its_fraction(stratum: np.ndarray, fraction: float, seed: int) -> None:
    rows = np.arange(len(stratum)) * 3 + 1
    part = validation_part(rows, stratum, None, fraction, seed)
    assert np.array_equal(part, np.unique(part))
    assert np.isin(part, rows).all()
    taken = stratum[np.isin(rows, part)]
    for s in np.unique(stratum):
        n, got = (stratum == s).sum(), (taken == s).sum()
        if n == 1:
            assert got == 0
        else:
            assert 1 <= got < n
            assert abs(got - fraction * n) <= max(0.5, 1 - fraction * n, fraction * n - n + 1)


@given(stratum=strata, fraction=fractions, seed=seeds)
@settings(max_examples=25)
def test_groups_of_one_row_are_rows(stratum: np.ndarray, fraction: float, seed: int) -> None:
    rows = np.arange(len(stratum))
    alone = validation_part(rows, stratum, None, fraction, seed)
    assert np.array_equal(alone, validation_part(rows, stratum, rows, fraction, seed))


@given(stratum=strata, fraction=fractions, seed=seeds, data=st.data())
@settings(max_examples=40)
def test_groups_stay_whole_and_every_stratum_keeps_a_row(
    stratum: np.ndarray, fraction: float, seed: int, data: st.DataObject
) -> None:
    n = len(stratum)
    group = np.array(data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)), np.int64)
    part = validation_part(np.arange(n), stratum, group, fraction, seed)
    taken = np.isin(np.arange(n), part)
    assert not np.isin(group[taken], group[~taken]).any()
    assert set(stratum[~taken]) == set(stratum)


def test_many_groups_approach_the_fraction_in_every_stratum() -> None:
    draws = np.random.default_rng(0)
    group = np.sort(draws.integers(0, 300, 6000))  # about 20 rows each
    stratum = (group % 3) * 4 + draws.integers(0, 4, 6000)  # three domains, classes mixed within a group
    taken = np.isin(np.arange(6000), validation_part(np.arange(6000), stratum, group, 0.2, seed=1))
    share = np.bincount(stratum, taken) / np.bincount(stratum)
    assert np.abs(share - 0.2).max() < 0.04
    assert abs(taken.mean() - 0.2) < 0.01


def test_seeds_differ_and_rows_do_not_depend_on_other_rows() -> None:
    rows, stratum = np.arange(100), np.arange(100) // 50
    first, second = (validation_part(rows, stratum, None, 0.2, seed) for seed in (0, 1))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, validation_part(rows, stratum, None, 0.2, seed=0))
    alone = validation_part(rows[50:], stratum[50:], None, 0.2, seed=0)
    assert np.array_equal(alone, first[first >= 50])
