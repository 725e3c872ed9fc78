"""Searching by counting separates the scores as sorting does, whatever they look like."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xdm_ft.xdomainmix import masks, specific_mask
from xdm_ft.xdomainmix.masks import as_tensor

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-42, -1e-42, 3e38, -3e38]
torch.manual_seed(0)
ROWS, SIZE = 400, 257
SCORES = {
    "normal": torch.randn(ROWS, SIZE),
    "half zeros": torch.relu(torch.randn(ROWS, SIZE)) * torch.randn(SIZE),
    "zeros and positive": torch.relu(torch.randn(ROWS, SIZE)),
    "all positive": torch.rand(ROWS, SIZE) + 3,
    "all negative": -torch.rand(ROWS, SIZE) - 3,
    "heavy tails": torch.randn(ROWS, SIZE).exp() ** 4 * torch.randn(ROWS, SIZE),
    "ties away from zero": torch.randint(-2, 3, (ROWS, SIZE)) + 0.5,
    "constant": torch.full((ROWS, SIZE), 2.5),
    "neighbouring floats": 1 + torch.randint(0, 300, (ROWS, SIZE)) * 2**-23,
    "subnormal": torch.randn(ROWS, SIZE) * 1e-42,
    "huge": torch.randn(ROWS, SIZE) * 1e38,
    "infinite": torch.where(torch.rand(ROWS, SIZE) > 0.5, torch.inf, torch.randn(ROWS, SIZE)),
    "both infinities": torch.where(torch.rand(ROWS, SIZE) > 0.3, torch.inf, -torch.inf),
}


def plain(scores: torch.Tensor, rank: int) -> torch.Tensor:
    return masks.exceeds_by_sorting(scores, torch.tensor([rank]))


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("find", [masks.exceeds, plain])
def test_every_kind_of_scores(kind: str, find) -> None:
    scores = SCORES[kind]
    ordered = scores.sort(-1).values
    for rank in (0, 1, 64, 128, 230, SIZE - 2, SIZE - 1):
        assert torch.equal(find(scores, rank), scores > ordered[:, rank, None]), rank


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_scores(data: st.DataObject) -> None:
    """Ties, zeros of both signs, infinities, subnormals; and a NaN makes its row generic, whatever the others are."""
    size, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    value = st.one_of(st.sampled_from(SPECIAL), st.integers(-3, 3).map(float), st.floats(width=32))
    scores = torch.tensor(
        data.draw(st.lists(st.lists(value, min_size=size, max_size=size), min_size=rows, max_size=rows)),
        dtype=torch.float32,
    )
    rank = data.draw(st.integers(0, size - 1))
    of_numbers = ~scores.isnan().any(1, keepdim=True)
    expected = (scores > scores.sort(-1).values[:, rank, None]) & of_numbers  # NaN is sorted last
    assert torch.equal(masks.exceeds(scores, rank), expected)
    assert torch.equal(plain(scores, rank), expected)


def test_rows_with_a_nan_and_inputs_untouched() -> None:
    scores = SCORES["half zeros"].clone()
    scores[5, 5] = torch.nan
    before = scores.clone()
    for find in (masks.exceeds, plain):
        mask = find(scores, 100)
        assert not mask[5].any() and mask.any(1).sum() == ROWS - 1
    assert torch.equal(scores.nan_to_num(9), before.nan_to_num(9))


def test_any_number_of_leading_dimensions_and_vmap() -> None:
    scores = SCORES["normal"][:396].reshape(4, 11, 9, SIZE)
    flat = specific_mask(scores.reshape(-1, SIZE), 0.9).reshape(scores.shape)
    assert torch.equal(specific_mask(scores, 0.9), flat)
    assert torch.equal(torch.func.vmap(lambda s: specific_mask(s, 0.9))(scores), flat)
    stacked_last = torch.func.vmap(lambda s: specific_mask(s, 0.9), in_dims=-1, out_dims=-1)(scores.movedim(0, -1))
    assert torch.equal(stacked_last.movedim(-1, 0), flat)
    twice = torch.func.vmap(torch.func.vmap(lambda s: specific_mask(s, 0.9)))(scores)
    assert torch.equal(twice, flat)


def test_other_floats() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        scores = SCORES["normal"].to(dtype)
        expected = scores > scores.sort(-1).values[:, 100, None]
        assert torch.equal(masks.exceeds(scores, 100), expected)


def test_ranks_as_tensors() -> None:
    """One for all, or one for each head of a stack; quantiles as fractions have the ranks of the floats."""
    scores = SCORES["normal"][:390].reshape(5, 78, SIZE)
    quantiles = [0.9, 0.5, Fraction(1, 3), 0.0, 1.0]
    stacked = torch.func.vmap(specific_mask)(scores, as_tensor(quantiles))
    for head, quantile in enumerate(quantiles):
        expected = specific_mask(scores[head], quantile)
        assert torch.equal(stacked[head], expected)
        assert torch.equal(specific_mask(scores[head], as_tensor([quantile])[0]), expected)
    shared = torch.func.vmap(specific_mask, in_dims=(0, None))(scores, as_tensor([0.9])[0])
    assert torch.equal(shared, specific_mask(scores, 0.9))
