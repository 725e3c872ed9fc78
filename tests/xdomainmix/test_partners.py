"""Equation (5)'s partners against a naive loop, valid and uniform."""

import math
from collections import Counter
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xdm_ft.xdomainmix import draw_partners
from xdm_ft.xdomainmix.mixing import OtherPartner

CHOICES = get_args(OtherPartner)


def valid_places(y: list[int], domain: list[int], row: int, same_class: bool, same_domain: bool) -> list[int]:
    return [
        place
        for place in range(len(y))
        if (y[place] == y[row]) == same_class and (domain[place] == domain[row]) == same_domain
    ]


def naive(y: list[int], domain: list[int], noise: list[list[float]], other: str) -> list[tuple[int, int, bool, bool]]:
    """Row by row: lists of valid places, the ⌊u·n⌋-th of them."""
    rows = []
    for row in range(len(y)):
        u_i, u_j = torch.tensor(noise[row], dtype=torch.float32).tolist()
        same = valid_places(y, domain, row, True, False)
        x_i = same[math.floor(u_i * len(same))] if same else row
        if other == "same_as_x_i":
            rows.append((x_i, x_i, bool(same), bool(same)))
            continue
        valid = {
            "other_class_other_domain": valid_places(y, domain, row, False, False),
            "other_class_same_domain": valid_places(y, domain, row, False, True),
            "same_class_other_domain": [place for place in same if place != x_i] or same,
        }[other]
        rows.append((x_i, valid[math.floor(u_j * len(valid))] if valid else row, bool(same), bool(valid)))
    return rows


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(CHOICES))
def test_equals_a_naive_loop(data: st.DataObject, other: str) -> None:
    size = data.draw(st.integers(1, 14))
    y = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    domain = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    # few bits, so that u·n is exact in float32 and in Python alike
    u = st.integers(0, 2**16 - 1).map(lambda k: k / 2**16)
    noise = data.draw(st.lists(st.tuples(u, u), min_size=size, max_size=size))
    drawn = draw_partners(torch.tensor(y), torch.tensor(domain), torch.tensor(noise), other)
    assert list(zip(*(column.tolist() for column in drawn), strict=True)) == naive(y, domain, noise, other)


@pytest.mark.parametrize("other", CHOICES)
def test_every_valid_sample_is_equally_likely(other: str) -> None:
    """n evenly spaced u hit each of the n valid samples once."""
    y, domain = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]), torch.tensor([0, 1, 1, 2, 0, 1, 2, 2])
    steps = 60  # divisible by every n here
    seen_same, seen_other = Counter(), Counter()
    for k in range(steps):
        noise = torch.full((8, 2), (k + 0.5) / steps)
        drawn = draw_partners(y, domain, noise, other)
        seen_same[int(drawn.same[0])] += 1
        seen_other[int(drawn.other[0])] += 1
    assert seen_same == {1: 20, 2: 20, 3: 20}
    expected = {
        "other_class_other_domain": {5: 20, 6: 20, 7: 20},
        "other_class_same_domain": {4: 60},
        "same_as_x_i": {1: 20, 2: 20, 3: 20},
    }
    if other in expected:
        assert seen_other == expected[other]
    else:  # x_i moves with u: whatever it is, x_j is another one
        assert set(seen_other) == {1, 2, 3}


def test_the_highest_u_is_the_last_valid_sample() -> None:
    """Also where float32 rounds u·n up to n, and for a u of 1, which no stream draws."""
    y, domain = torch.zeros(1000, dtype=torch.int64), torch.arange(1000) % 2
    for u in (1 - 2**-24, 1.0):
        drawn = draw_partners(y, domain, torch.full((1000, 2), u))
        assert drawn.same[0] == 999 and drawn.same[1] == 998


def test_one_domain_or_one_class() -> None:
    noise = torch.rand(6, 2)
    y, domain = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 0, 1, 0, 1])
    alone = draw_partners(y, torch.zeros(6, dtype=torch.int64), noise)
    assert not alone.has_same.any() and not alone.has_other.any()
    assert alone.same.tolist() == alone.other.tolist() == list(range(6))
    one_class = draw_partners(torch.zeros(6, dtype=torch.int64), domain, noise)
    assert one_class.has_same.all() and not one_class.has_other.any()
    assert one_class.other.tolist() == list(range(6))


def test_unknown_choice() -> None:
    with pytest.raises(ValueError, match="nobody"):
        draw_partners(torch.tensor([0]), torch.tensor([0]), torch.rand(1, 2), "nobody")
