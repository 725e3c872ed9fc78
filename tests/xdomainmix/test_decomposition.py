"""Equations (3) and (4): masks against sorting, torch.quantile and the golden numbers; parts that sum to z."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xdm_ft.xdomainmix import autograd_scores, decompose, specific_mask

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "decomposition.npz")
TENTHS = [tenth / 10 for tenth in range(11)]


def rank_of(quantile: float, size: int) -> int:
    return math.floor(Fraction(str(quantile)) * (size - 1))


def sorted_mask(scores: torch.Tensor, quantile: float) -> torch.Tensor:
    return scores > scores.sort(-1).values[..., rank_of(quantile, scores.shape[-1]), None]


few_values = st.sampled_from([-1.5, -0.0, 0.0, 0.0, 0.0, 0.25, 2.0])
any_values = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(few_values, any_values), min_size=1, max_size=60), st.sampled_from(TENTHS))
def test_mask_is_the_sorted_order_statistics(row: list[float], quantile: float) -> None:
    scores = torch.tensor([row], dtype=torch.float32)
    assert torch.equal(specific_mask(scores, quantile), sorted_mask(scores, quantile))


@pytest.mark.parametrize("quantile", TENTHS)
@pytest.mark.parametrize("size", [1, 2, 3, 10, 11, 101, 512, 1280])
def test_mask_for_every_quantile(size: int, quantile: float) -> None:
    torch.manual_seed(size)
    for scores in (torch.randn(9, size), torch.relu(torch.randn(9, size)) * torch.randn(9, size)):
        assert torch.equal(specific_mask(scores, quantile), sorted_mask(scores, quantile))


def test_mask_against_torch_quantile() -> None:
    """They differ only in scores between the exact interpolated τ and its float32 value, a rounding apart."""
    torch.manual_seed(0)
    differing = 0
    for size in (11, 64, 1280):
        for scores in (torch.randn(200, size), 1 + torch.randint(0, 64, (200, size)) * 2**-23):
            for quantile in TENTHS:
                rounded = torch.quantile(scores, quantile, dim=1, keepdim=True)
                different = specific_mask(scores, quantile) != (scores > rounded)
                differing += int(different.sum())
                exact = exact_quantile(scores, quantile)
                low, high = torch.minimum(exact, rounded.double()), torch.maximum(exact, rounded.double())
                assert ((low <= scores) & (scores <= high))[different].all()
                # float32 rounds the rank q(K−1) and the interpolation
                widest_gap = scores.sort(1).values.diff(dim=1).amax(1, keepdim=True)
                assert (high - low <= 1e-4 * widest_gap + 2e-7 * exact.abs()).all()
    assert differing > 0, "the made-up scores were meant to hold neighbours a rounding apart"


def exact_quantile(scores: torch.Tensor, quantile: float) -> torch.Tensor:
    rank = Fraction(str(quantile)) * (scores.shape[1] - 1)
    ordered = scores.double().sort(1).values
    low, high = ordered[:, math.floor(rank), None], ordered[:, math.ceil(rank), None]
    return low + (high - low) * float(rank - math.floor(rank))


def test_torch_quantile_rounds_onto_a_neighbour() -> None:
    scores = torch.tensor([[1.0, 1.0 + 2**-23]])
    assert specific_mask(scores, 0.7).tolist() == [[False, True]]
    assert torch.quantile(scores, 0.7, dim=1) == 1.0 + 2**-23  # so `scores > τ` would hold nowhere


def test_ties_are_generic() -> None:
    assert specific_mask(torch.tensor([[0.0, 0.0, 0.0, -1.0, 5.0]]), 0.5).tolist() == [[False] * 4 + [True]]
    assert not specific_mask(torch.zeros(3, 7), 0.5).any()


@pytest.mark.parametrize("rows", [3, 500])
def test_a_sample_with_a_nan_is_generic_throughout(rows: int) -> None:
    scores = torch.relu(torch.randn(rows, 40, generator=torch.Generator().manual_seed(0)))
    clean = specific_mask(scores, 0.9)
    broken = scores.clone()
    broken[1, 3] = torch.nan
    mask = specific_mask(broken, 0.9)
    assert not mask[1].any() and clean[1].any()
    others = torch.arange(rows) != 1
    assert torch.equal(mask[others], clean[others])


@pytest.mark.parametrize("quantile", [-0.1, 1.1, math.nan])
def test_quantile_out_of_range(quantile: float) -> None:
    with pytest.raises(ValueError, match="is not in"):
        specific_mask(torch.zeros(1, 2), quantile)


def test_parts_worked_out_by_hand() -> None:
    z = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    parts = decompose(z, torch.tensor([[True, True, False, False]]), torch.tensor([[True, False, True, False]]))
    assert parts.csds.tolist() == [[1, 0, 0, 0]]
    assert parts.csdg.tolist() == [[0, 2, 0, 0]]
    assert parts.cgds.tolist() == [[0, 0, 3, 0]]
    assert parts.cgdg.tolist() == [[0, 0, 0, 4]]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_parts_sum_to_z_bit_for_bit(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 20))
    row = data.draw(st.lists(st.floats(width=32, allow_nan=False), min_size=size, max_size=size))
    masks = [data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) for _ in range(2)]
    z = torch.tensor([row], dtype=torch.float32)
    parts = decompose(z, *(torch.tensor([mask]) for mask in masks))
    for order in (parts, parts[::-1]):
        total = order[0] + order[1] + order[2] + order[3]
        assert torch.equal(total.view(torch.int32), z.view(torch.int32))  # signed zeros and infinities included


def test_gradient_of_every_part_is_its_mask() -> None:
    torch.manual_seed(0)
    z = torch.randn(4, 6, 2, 2, requires_grad=True)
    class_mask, domain_mask = torch.rand(4, 6) > 0.5, torch.rand(4, 6) > 0.5
    parts = decompose(z, class_mask, domain_mask)
    (gradient,) = torch.autograd.grad(parts.cgds.sum(), z)
    assert torch.equal(gradient, (~class_mask & domain_mask).float()[:, :, None, None].expand_as(z))


@pytest.mark.parametrize("which", range(len(GOLDEN["quantiles"])))
@pytest.mark.parametrize("kind", ["vec", "map"])
def test_golden(kind: str, which: int) -> None:
    z, class_gradient, domain_gradient = (
        torch.tensor(GOLDEN[f"{kind}_{name}"]) for name in ("x", "class_grad", "domain_grad")
    )

    def scores(gradient: torch.Tensor) -> torch.Tensor:
        own_logit = lambda features: (gradient * features).flatten(1).sum(1, keepdim=True)  # noqa: E731
        return autograd_scores(z, own_logit, torch.zeros(len(z), dtype=torch.int64))

    quantile = float(GOLDEN["quantiles"][which])
    class_mask, domain_mask = (
        specific_mask(scores(class_gradient), 0.5),
        specific_mask(scores(domain_gradient), quantile),
    )
    recorded = torch.tensor(GOLDEN[f"{kind}_domain_thr"][which])[:, None]
    assert torch.equal(domain_mask, scores(domain_gradient) > recorded)
    parts = torch.stack(tuple(decompose(z, class_mask, domain_mask)), 1)  # [B,4,K,…]
    torch.testing.assert_close(parts, torch.tensor(GOLDEN[f"{kind}_out"][which]), atol=1e-6, rtol=0)
