"""Near copies: planted ones at three strengths, families of copies, and none among random features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xdm_ft.audit.copies import NearCopies, near_copies, straddling
from xdm_ft.evaluation.neighbours import directions, neighbours


def drawn(n: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def pairs_of(z: torch.Tensor) -> list[NearCopies]:
    rows = torch.arange(len(z))
    domains = np.zeros(len(z), np.int64)
    return near_copies(neighbours(directions(z, rows, str), rows, domains), domains)


def test_the_score_by_hand():
    # three images in a plane, at 0°, 60° and 180°
    [pair] = pairs_of(torch.tensor([[1.0, 0.0], [0.5, 3**0.5 / 2], [-1.0, 0.0]]))
    # 1 − r: of the first image (0.5 + 2) / 2, of the second (0.5 + 1.5) / 2
    assert (pair.first, pair.second, pair.sure) == (0, 1, False)  # of three images nothing is sure
    assert pair.cosine == pytest.approx(0.5, abs=1e-5) and pair.score == pytest.approx((1.25 * 1.0) ** 0.5 / 0.5)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(0, 40), width=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_pairs_are_those_of_a_loop(n, width, seed):
    z = drawn(n, width, seed)
    pairs = pairs_of(z)
    cosines = torch.nn.functional.normalize(z.double(), dim=1) @ torch.nn.functional.normalize(z.double(), dim=1).T
    gaps = (1 - cosines.fill_diagonal_(-torch.inf)).numpy()
    spread = np.sort(gaps, axis=1)[:, : min(10, n - 1)].mean(1) if n > 1 else np.zeros(n)
    assert [pair.score for pair in pairs] == sorted((pair.score for pair in pairs), reverse=True)
    assert len({(pair.first, pair.second) for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert pair.first < pair.second
        if gaps[pair.first, pair.second] > 1e-2:  # below, float32 rounds it
            expected = (spread[pair.first] * spread[pair.second]) ** 0.5 / gaps[pair.first, pair.second]
            assert pair.score == pytest.approx(expected, rel=1e-3)
    listed = {(pair.first, pair.second) for pair in pairs}
    for i in range(n if n > 2 else 0):  # mutual nearest neighbours are listed, unless float32 cannot tell which it is
        j = int(gaps[i].argmin())
        clear = all(np.diff(np.sort(gaps[of])[:2])[0] > 1e-4 for of in (i, j))
        assert not clear or gaps[j].argmin() != i or (min(i, j), max(i, j)) in listed


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_planted_copies_come_first(noise):
    z = drawn(500, 128, 0)
    copies = z[:30] + noise * drawn(30, 128, 1)
    first = pairs_of(torch.cat([z, copies]))[:30]
    assert all(pair.sure for pair in first)
    assert {(pair.first, pair.second) for pair in first} == {(i, 500 + i) for i in range(30)}


@pytest.mark.parametrize("size", [3, 10])
def test_all_of_a_family_of_copies_are_found(size):
    z, noise = drawn(300, 128, 0), 0.2 * drawn(300, 128, 1)
    z[:size] = z[0] + noise[:size]
    sure = [pair for pair in pairs_of(z) if pair.sure]
    assert {(pair.first, pair.second) for pair in sure} == {(i, j) for j in range(size) for i in range(j)}


def test_exact_copies_have_a_score_that_is_finite():
    z = drawn(40, 16, 0)
    z[20:] = z[:20]
    assert {(pair.first, pair.second) for pair in pairs_of(z)[:20]} == {(i, 20 + i) for i in range(20)}
    assert all(np.isfinite(pair.score) for pair in pairs_of(z))
    assert all(np.isfinite(pair.score) for pair in pairs_of(torch.ones(30, 4)))


def test_images_without_a_direction_are_in_no_pair():
    z = drawn(30, 16, 0)
    z[[3, 4, 5]] = 0
    assert not {3, 4, 5} & {row for pair in pairs_of(z) for row in (pair.first, pair.second)}
    assert pairs_of(torch.zeros(5, 4)) == []


@pytest.mark.parametrize("width", [3, 64])
def test_random_features_have_no_sure_pair(width):
    found = sum(any(pair.sure for pair in pairs_of(drawn(300, width, seed))) for seed in range(100))
    assert found <= 5


def test_a_pair_straddles_where_one_trains_and_the_other_is_tested():
    def pair(first: int, second: int) -> NearCopies:
        return NearCopies(first, second, 0.9, 3.0, True)

    def roles(*rows: list[int]) -> dict[str, np.ndarray]:
        return dict(zip(("training", "validation", "test"), (np.array(of, np.int64) for of in rows), strict=True))

    splits = [roles([0, 1], [2], [3, 4]), roles([3], [4], [0, 1, 2])]
    pairs = [pair(0, 3), pair(0, 1), pair(2, 4), pair(3, 4), pair(2, 3), pair(1, 5)]
    assert straddling(pairs, splits, 6) == [True, False, False, False, True, False]
    assert straddling([], splits, 6) == [] and straddling(pairs, [], 6) == [False] * 6
