"""Folds of whole sites: sizes, balance, the same on every machine; the test over sites that share models."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_up import MadeUp
from scipy import stats

from xdm_ft.evaluation.estimates import over_seeds, over_sets, over_sites
from xdm_ft.evaluation.intervals import new_site
from xdm_ft.protocol.folds import balanced_folds, power, recommend_folds
from xdm_ft.protocol.splits import Protocol, splits
from xdm_ft.runtime.errors import UserError

COUNTS = arrays(np.int64, st.tuples(st.integers(2, 14), st.integers(1, 4)), elements=st.integers(0, 60))


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.data())
def test_every_fold_has_its_share_of_sites_and_no_exchange_helps(counts, data):
    counts[:, 0] += 1  # every site has an image
    k = data.draw(st.integers(2, len(counts)))
    fold = balanced_folds(counts, k)
    sizes = np.bincount(fold, minlength=k)
    assert set(sizes) <= {len(counts) // k, -(-len(counts) // k)}
    assert [*dict.fromkeys(fold.tolist())] == [*range(k)], "numbered in the order of their first sites"
    assert np.array_equal(fold, balanced_folds(counts, k))

    def unevenness(fold):
        columns = np.concatenate([counts, counts.sum(1, keepdims=True)], 1)
        columns = columns[:, columns.sum(0) > 0] / columns.sum(0)[columns.sum(0) > 0]
        return sum(np.square(k * columns[fold == f].sum(0) - 1).sum() for f in range(k))

    least = unevenness(fold)
    for i in range(len(counts)):
        for j in range(i):
            other = fold.copy()
            other[[i, j]] = fold[[j, i]]
            # shares are rounded to whole parts in 2¹⁴
            assert unevenness(other) > least - 0.01


def test_the_folds_of_known_sites():
    counts = np.array([[30, 0], [0, 30], [15, 15], [15, 15], [30, 0], [0, 30], [15, 15]])
    fold = balanced_folds(counts, 3)
    assert fold[0] != fold[4] and fold[1] != fold[5], "classes are balanced"
    sums = np.array([counts[fold == f].sum(0) for f in range(3)])
    assert sorted(sums.sum(1)) == [60, 60, 90] and np.ptp(sums, axis=1).max() <= 15


def test_many_small_sites_of_rare_classes_are_no_empty_places():
    counts = np.ones((41, 2), np.int64)
    counts[0] = 1_000_000
    assert sorted(np.bincount(balanced_folds(counts, 4))) == [10, 10, 10, 11]


def sites(number=7, each=6):
    rows = np.arange(number * each)
    return MadeUp(rows % 2, rows // each)


def test_a_split_per_fold_tests_its_whole_sites():
    data = sites()
    made = splits(data, Protocol(folds=3), seed=0)
    assert [split.fold for split in made] == [1, 2, 3]
    assert sorted(name for split in made for name in split.test_domains) == sorted(data.domain_names)
    for split in made:
        assert not {*split.test_domains} & {*split.train_domains}
        of = split.sites(data)
        assert [*of] == [(name,) for name in split.test_domains]
        for (name,), rows in of.items():
            assert {data.domain_names[d] for d in data.domains[rows].tolist()} == {name} and len(rows) == 6
    assert "3 folds of whole domains held out together, each domain measured alone" in made[0].notes
    assert [s.test_domains for s in splits(data, Protocol(folds=3), seed=5)] == [s.test_domains for s in made]


def test_cross_domain_leaves_folds_out():
    protocol = Protocol(folds=3, selection="cross_domain").with_folds(sites())
    first = splits(sites(), protocol, 0)[0]
    assert len(protocol.sets_of(first.train_domains)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"folds": 8}, "8 folds need as many domains, and there are 7"), ({"folds": 7}, None), ({"folds": 2}, None)],
)
def test_as_many_folds_as_domains_and_no_more(changes, message):
    if message is None:
        assert len(splits(sites(), Protocol(**changes), 0)) == changes["folds"]
    else:
        with pytest.raises(UserError, match=message):
            splits(sites(), Protocol(**changes), 0)


@pytest.mark.parametrize("other", [{"test_domains": "a"}, {"together": [["a", "b"]]}, {"name": "official"}])
def test_folds_exclude_what_says_itself_what_is_held_out(other):
    assert [problem.key for problem in Protocol(folds=3, **other).problems()]


def test_a_fold_that_lacks_a_class_says_so():
    data = MadeUp([0, 0, 0, 0, 0, 1, 0, 1], np.arange(8) // 2)
    notes = [note for split in splits(data, Protocol(folds=4), 0) for note in split.notes]
    assert "fold 1 has no image of c1" in notes and "fold 2 has no image of c1" in notes
    assert not any("fold 3 has no image" in note for note in notes)


# The test on new domains, by hand


@given(arrays(np.float64, 9, elements=st.floats(-1, 1).map(lambda v: round(v, 3))))
def test_elsewhere_is_the_larger_p_of_sites_and_folds(values):
    folds = [[0, 3, 4, 8], [1, 2], [5, 6, 7]]
    means = [values[fold].mean() for fold in folds]
    estimate = over_sites(values, folds)
    if np.ptp(values) < 1e-6 or np.ptp(means) < 1e-6:
        return
    plain = stats.ttest_1samp(values, 0).pvalue, stats.ttest_1samp(means, 0).pvalue
    assert estimate.p() == pytest.approx(max(plain), rel=1e-6)
    number, freedom = (9, 8) if plain[0] >= plain[1] else (3, 2)
    assert estimate.freedom == freedom
    of = values if number == 9 else means
    assert estimate.error == pytest.approx(np.std(of, ddof=1) / number**0.5)
    assert over_sites(values, None) == over_sets(values)
    assert over_sites(values, [[*range(9)]]) is None, "one fold does not show what its sites have in common"


def test_folds_of_one_site_are_sites():
    values = np.random.default_rng(0).normal(size=6)
    assert over_sites(values, [[i] for i in range(6)]) == over_sets(values)
    first, second = np.random.default_rng(1).normal(size=(2, 6, 4))
    assert over_seeds(first, second, [[i] for i in range(6)]) == over_seeds(first, second)


def test_the_seed_terms_are_those_of_folds():
    """a_mf = s²_mf (N_f/N)²/S_m, s²_mf over seeds of the mean over the sites of the fold; b as without folds."""
    folds, rng = [[0, 1, 2], [3, 4]], np.random.default_rng(2)
    first, second = rng.normal(size=(5, 4)), rng.normal(size=(5, 3))
    a = b = 0.0
    for values in (first, second):
        seeds = values.shape[1]
        a += sum(np.var(values[fold].mean(0), ddof=1) * (len(fold) / 5) ** 2 / seeds for fold in folds)
        b += np.var(values.mean(0), ddof=1) / seeds
    assert over_seeds(first, second, folds).variance == pytest.approx(max(a, b))


def test_a_new_site_is_as_uncertain_as_folds_show():
    values = [np.array([v]) for v in (0.1, 0.12, 0.5, 0.52, 0.9, 0.92)]
    apart = new_site(values)
    together = new_site(values, folds=[[0, 1], [2, 3], [4, 5]])
    s, of_folds = np.std([v[0] for v in values], ddof=1), np.std([0.11, 0.51, 0.91], ddof=1)
    assert apart.spread == pytest.approx(s * (1 + 1 / 6) ** 0.5)
    assert together.spread == pytest.approx((s**2 + of_folds**2 / 3) ** 0.5) and together.freedom == 5


def test_the_recommendation():
    simulated = {3: 0.44, 5: 0.69, 10: 0.83, 30: 0.89}
    assert {k: round(power(30, k), 2) for k in simulated} == simulated
    assert not recommend_folds(12, None) and not recommend_folds(30, 10)
    [line] = recommend_folds(30, None)
    assert "in about 83% of runs, each domain alone in 89%" in line
    assert "3 folds in 44%" in recommend_folds(30, 3)[0]
