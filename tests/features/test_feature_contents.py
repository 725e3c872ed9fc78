"""Images are found by their hashes, also where halves of them agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xdm_ft.features.shards import ContentIndex, Contents


def contents(*hashes: bytes) -> Contents:
    return np.array(hashes, "S16")


def by_hand(wanted: Contents, asked: Contents) -> list[int]:
    places = {content: number for number, content in enumerate(wanted.tolist())}
    return [places.get(content, -1) for content in asked.tolist()]


def test_contents_are_found() -> None:
    generator = np.random.default_rng(0)
    every = generator.integers(0, 256, (500, 16), dtype=np.uint8).view("S16")[:, 0]
    wanted, asked = generator.permutation(every)[:300], generator.permutation(every)[:400]
    found = ContentIndex(wanted).find(asked).tolist()
    assert found == by_hand(wanted, asked) and 0 < found.count(-1) < 400


@pytest.mark.parametrize("half", ["first", "second"])
def test_contents_that_share_a_half_are_different(half: str) -> None:
    halves = [bytes([number]) * 8 for number in (9, 3, 7, 1)]
    join = (lambda own: b"a" * 8 + own) if half == "first" else (lambda own: own + b"a" * 8)
    wanted, asked = contents(*map(join, halves[:3])), contents(*map(join, reversed(halves)), b"b" * 16)
    assert ContentIndex(wanted).find(asked).tolist() == by_hand(wanted, asked) == [-1, 2, 1, 0, -1]


SOME = [bytes([first]) * 8 + bytes([second]) * 8 for first in range(1, 4) for second in range(3)]  # halves agree


@given(
    wanted=st.lists(st.sampled_from(SOME), unique=True),
    parts=st.lists(st.lists(st.sampled_from(SOME), unique=True, max_size=4), max_size=4),
    runs=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4),
)
@example(wanted=SOME, parts=[], runs=[(0, 4), (4, 8)])
@example(wanted=SOME[:3], parts=[SOME[2:5]], runs=[(0, 2)])  # a part that goes on behind the last one
def test_parts_are_found_as_their_contents_are(
    wanted: list[bytes], parts: list[list[bytes]], runs: list[tuple[int, int]]
) -> None:
    index = ContentIndex(contents(*wanted))
    every = [contents(*part) for part in [*parts, *(wanted[first:end] for first, end in runs)]]
    assert [found.tolist() for found in index.find_each(every)] == [by_hand(index.contents, part) for part in every]


def test_hashes_may_end_with_zeros() -> None:
    wanted = contents(b"a" * 15 + b"\0", b"a" * 16)
    assert ContentIndex(wanted).find(wanted[::-1]).tolist() == [1, 0]


def test_nothing_is_found_among_nothing() -> None:
    nothing = contents()
    assert ContentIndex(nothing).find(contents(b"a" * 16)).tolist() == [-1]
    assert ContentIndex(contents(b"a" * 16)).find(nothing).tolist() == []
