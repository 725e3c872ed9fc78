"""Equation (3): masks against sorting, torch.quantile and rationals; the cycle of τ_d."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xdm_ft.xdomainmix import domain_quantile, specific_mask
from xdm_ft.xdomainmix.masks import as_tensor, exceeds, exceeds_by_sorting

RECORDED = json.loads((Path(__file__).resolve().parents[1] / "golden" / "threshold_schedule.json").read_text())
TENTHS = [tenth / 10 for tenth in range(11)]
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


def by_sorting(scores: Tensor, rank: int) -> Tensor:
    return exceeds_by_sorting(scores, torch.tensor([rank]))


@pytest.mark.parametrize("find", [exceeds, by_sorting])
def test_every_kind_of_scores(find: Callable[[Tensor, int], Tensor]) -> None:
    for kind, scores in SCORES.items():
        ordered = scores.sort(-1).values
        for rank in (0, 1, 64, 128, 230, SIZE - 2, SIZE - 1):
            assert torch.equal(find(scores, rank), scores > ordered[:, rank, None]), (kind, rank)
    for dtype in (torch.float64, torch.bfloat16):
        scores = SCORES["normal"].to(dtype)
        assert torch.equal(find(scores, 100), scores > scores.sort(-1).values[:, 100, None])


@settings(max_examples=60)
@given(st.data())
def test_any_scores(data: st.DataObject) -> None:
    """Ties, zeros of both signs, infinities, subnormals; and a NaN makes its row generic, whatever the others are."""
    size, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    value = st.one_of(st.sampled_from(SPECIAL), st.integers(-3, 3).map(float), st.floats(width=32))
    lists = data.draw(st.lists(st.lists(value, min_size=size, max_size=size), min_size=rows, max_size=rows))
    scores, rank = torch.tensor(lists, dtype=torch.float32), data.draw(st.integers(0, size - 1))
    of_numbers = ~scores.isnan().any(1, keepdim=True)
    expected = (scores > scores.sort(-1).values[:, rank, None]) & of_numbers  # NaN is sorted last
    before = scores.clone()
    for find in (exceeds, by_sorting):
        assert torch.equal(find(scores, rank), expected)
        assert torch.equal(scores.view(torch.int32), before.view(torch.int32)), "inputs stay as they are"


def test_any_number_of_leading_dimensions_and_vmap() -> None:
    scores = SCORES["normal"][:396].reshape(4, 11, 9, SIZE)
    flat = specific_mask(scores.reshape(-1, SIZE), 0.9).reshape(scores.shape)
    assert torch.equal(specific_mask(scores, 0.9), flat)
    assert torch.equal(torch.func.vmap(torch.func.vmap(lambda s: specific_mask(s, 0.9)))(scores), flat)
    stacked_last = torch.func.vmap(lambda s: specific_mask(s, 0.9), in_dims=-1, out_dims=-1)(scores.movedim(0, -1))
    assert torch.equal(stacked_last.movedim(-1, 0), flat)


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


@pytest.mark.parametrize("size", [1, 3, 11, 512])
def test_mask_for_every_quantile(size: int) -> None:
    torch.manual_seed(size)
    for quantile in TENTHS:
        rank = math.floor(Fraction(str(quantile)) * (size - 1))
        for scores in (torch.randn(9, size), torch.relu(torch.randn(9, size)) * torch.randn(9, size)):
            assert torch.equal(specific_mask(scores, quantile), scores > scores.sort(-1).values[..., rank, None])


def test_ties_are_generic_and_quantiles_are_in_range() -> None:
    neighbours = torch.tensor([[1.0, 1.0 + 2**-23]])
    assert specific_mask(neighbours, 0.7).tolist() == [[False, True]]
    assert torch.quantile(neighbours, 0.7, dim=1) == 1.0 + 2**-23, "so `scores > τ` would hold nowhere"
    assert specific_mask(torch.tensor([[0.0, 0.0, 0.0, -1.0, 5.0]]), 0.5).tolist() == [[False] * 4 + [True]]
    assert not specific_mask(torch.zeros(3, 7), 0.5).any()
    for quantile in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="is not in"):
            specific_mask(torch.zeros(1, 2), quantile)


def test_five_stages_of_n_steps_then_again() -> None:
    cycle = [0.9, 0.9, 0.9, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5]
    assert [domain_quantile(step, 3) for step in range(45)] == cycle * 3
    # the last stage is `stop` even where `drop` does not divide
    assert [domain_quantile(step, 1, drop=0.25) for step in range(4)] == [0.9, 0.65, 0.5, 0.9]
    assert [domain_quantile(step, 1, start=0.5, stop=0.5) for step in range(2)] == [0.5, 0.5]


def test_the_published_code_holds_a_half_twice_and_other_recorded_schedules_agree() -> None:
    """It lowers a float and compares it with 0.5: after 0.5000000000000001 comes 0.5, a sixth stage. The paper has
    five, and so have we."""
    assert len(RECORDED) == 4
    for key, recorded in RECORDED.items():
        start, stop, drop, every = (float(part.split("=")[1]) for part in key.split())
        ours = [domain_quantile(step, int(every), start, stop, drop) for step in range(len(recorded))]
        if key == "start=0.9 floor=0.5 change=0.1 every=3":
            assert recorded[12:18] == [0.5000000000000001] * 3 + [0.5] * 3
            assert ours[15:18] == [0.9] * 3 != recorded[15:18]
            ours, recorded = ours[:15], recorded[:15]
        assert ours == pytest.approx(recorded, abs=1e-12), key


@pytest.mark.parametrize(
    "arguments", [{"step": -1, "every": 1}, {"step": 0, "every": 0}, {"step": 0, "every": 1, "stop": 0.95}]
)
def test_refused(arguments: dict) -> None:
    with pytest.raises(ValueError):
        domain_quantile(**arguments)
