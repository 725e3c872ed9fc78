"""Counter-based random numbers: the documented hash, uniform, independent between keys, the same under `vmap`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.func import vmap

from xdm_ft.runtime.randomness import (
    BETA_KNOTS,
    Stream,
    beta,
    beta_quantiles,
    bits,
    folds,
    integers,
    normal,
    permutation,
    sample,
    uniform,
)

WORD = (1 << 64) - 1


def splitmix(x):
    """splitmix64's finaliser, written with Python's integers."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & WORD
    return x ^ x >> 31


def reference(seed, step, stream, index):
    x = 0
    for key in (seed, stream, step, index):
        x = splitmix(((x ^ (key & WORD)) + 0x9E3779B97F4A7C15) & WORD)
    return x


key = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(key, key, st.sampled_from(Stream), key)
def test_is_the_documented_hash(seed, step, stream, index):
    drawn = int(bits(torch.tensor(seed), torch.tensor(step), stream, torch.tensor(index)))
    assert drawn & WORD == reference(seed, step, stream, index)
    u = float(uniform(torch.tensor(seed), torch.tensor(step), stream, torch.tensor(index)))
    assert u == ((drawn & WORD) >> 40) / 2**24


def test_pinned():
    """Every published result depends on these numbers and on the numbers of the streams."""
    drawn = bits(7, 5, Stream.LAMBDA, torch.arange(3))
    assert [hex(word & WORD) for word in drawn.tolist()] == [
        "0x120fc317f93fa4c",
        "0x65e17604cf0d5a7a",
        "0x21021b0643b9b62d",
    ]
    assert [stream.value for stream in (Stream.INIT, Stream.BATCH, Stream.PARTNERS, Stream.DISCARD)] == [0, 1, 3, 5]


def test_uniform_is_uniform():
    u = uniform(3, torch.arange(200)[:, None], Stream.LAMBDA, torch.arange(500)).flatten().double()
    assert u.min() >= 0 and u.max() < 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 0.01
    counts = torch.histc(u, 64, 0, 1)
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


@pytest.mark.parametrize("which", ["seed", "step", "stream", "index"])
def test_neighbouring_keys_are_independent(which):
    keys = {"seed": 5, "step": 7, "stream": int(Stream.PARTNERS), "index": torch.arange(20_000)}
    other = {**keys, which: keys[which] + 1}
    a, b = uniform(**keys).double(), uniform(**other).double()
    if which == "index":
        b = b.flip(0)
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.03
    assert ((a - b) % 1 < 0.5).double().mean() == pytest.approx(0.5, abs=0.02)


def test_every_use_has_its_own_stream():
    assert len({int(stream) for stream in Stream}) == len(Stream)


def test_integers_are_in_range_and_even():
    drawn = integers(0, 1, Stream.BATCH, torch.arange(60_000), 7)
    assert stats.chisquare(torch.bincount(drawn, minlength=7).numpy()).pvalue > 0.01
    high = torch.tensor([1, 2, 1000])
    each = integers(0, torch.arange(500)[:, None], Stream.BATCH, torch.arange(3), high)
    assert (each >= 0).all() and (each < high).all() and each[:, 2].max() > 900


def test_permutations():
    order = permutation(0, 0, Stream.PERMUTATION, 1000)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, permutation(0, 0, Stream.PERMUTATION, 1000))
    assert not torch.equal(order, permutation(0, 1, Stream.PERMUTATION, 1000))
    firsts = torch.stack([permutation(seed, 0, Stream.PERMUTATION, 5) for seed in range(4000)])
    for place in range(5):
        assert stats.chisquare(torch.bincount(firsts[:, place], minlength=5).numpy()).pvalue > 0.001
    assert len(permutation(0, 0, Stream.PERMUTATION, 0)) == 0


def test_same_numbers_alone_and_under_vmap():
    seeds, index = torch.arange(6), torch.randint(0, 10**9, (6, 50), generator=torch.Generator().manual_seed(0))
    together = vmap(lambda seed, index: uniform(seed, 9, Stream.PARTNERS, index))(seeds, index)
    for head in range(6):
        assert torch.equal(together[head], uniform(int(seeds[head]), 9, Stream.PARTNERS, index[head]))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 2.0, 8.0])
def test_beta(alpha):
    """Exact at the knots; between them the distribution function is off by less than one step between knots.

    Checked below ½ only, because float32 rounds draws close to 1.
    """
    knots = torch.arange(BETA_KNOTS) / BETA_KNOTS
    exact = stats.beta(alpha, alpha)
    quantiles = beta_quantiles(alpha)
    at_knots = torch.tensor(exact.ppf(knots.numpy()))
    torch.testing.assert_close(beta(knots, quantiles).double(), at_knots, rtol=1e-6, atol=0)
    draws = beta(uniform(3, 0, Stream.LAMBDA, torch.arange(200_000)), quantiles)
    assert draws.min() >= 0 and draws.max() <= 1
    lower = draws[draws < 0.5].double().numpy()
    assert abs(len(lower) / len(draws) - 0.5) < 0.005
    assert stats.kstest(lower, lambda x: 2 * exact.cdf(x)).statistic < 0.006
    u = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) / 2
    assert abs(exact.cdf(beta(u, quantiles).double().numpy()) - u.double().numpy()).max() < 1 / BETA_KNOTS
    torch.testing.assert_close(beta(1 - u, quantiles), 1 - beta(u, quantiles), atol=1e-4, rtol=0)
    assert beta(torch.tensor(1 - 2.0**-24), quantiles) <= 1  # the largest draw of `uniform`


def test_normal():
    draws = normal(3, 0, Stream.STYLE_NOISE, torch.arange(200_000))
    assert draws.isfinite().all() and draws.dtype == torch.float32
    assert stats.kstest(draws.double().numpy(), "norm").statistic < 0.004
    pairs = draws.view(-1, 2)
    assert abs(float(torch.corrcoef(pairs.T)[0, 1])) < 0.01
    seeds = torch.arange(5)
    stacked = vmap(lambda seed: normal(seed, 1, Stream.STYLE_NOISE, torch.arange(9)))(seeds)
    for seed in range(5):
        assert torch.equal(stacked[seed], normal(seed, 1, Stream.STYLE_NOISE, torch.arange(9)))


def test_folds_divide_no_group_and_have_equal_shares():
    stratum = np.tile([0, 1, 2, 3], 50)
    fold_of = folds(stratum, None, 5)
    assert [np.bincount(fold_of[stratum == s]).tolist() for s in range(4)] == [[10] * 5] * 4
    groups = np.random.default_rng(0).integers(0, 12, 200)
    fold_of = folds(stratum, groups, 5)
    assert all(len(set(fold_of[groups == group])) == 1 for group in range(12)) and set(fold_of) == set(range(5))
    assert folds(stratum, stratum, 5) is None  # fewer groups than folds
    assert set(folds(np.arange(5), None, 5)) == set(range(5))


def test_a_sample_has_the_same_share_of_every_stratum():
    stratum = np.random.default_rng(0).choice(4, 9000, p=[0.7, 0.1, 0.1, 0.1])
    rows = np.arange(500, 9000)
    got = sample(rows, stratum[rows], 850)
    assert len({*got}) == 850 and got.min() >= 500 and (np.diff(got) > 0).all()
    assert np.abs(np.bincount(stratum[got]) - np.bincount(stratum[rows]) / 10).max() <= 1
    assert (sample(rows[::-1], stratum[rows[::-1]], 8500) == rows).all()
