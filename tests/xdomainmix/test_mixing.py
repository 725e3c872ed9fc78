"""Equations (4) to (7): parts that sum to z, partners by a naive loop, z̃ by hand and by golden numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xdm_ft.xdomainmix import Partners, autograd_scores, decompose, draw_partners, linear_scores, mix, specific_mask
from xdm_ft.xdomainmix.mixing import OtherPartner

FOLDER = Path(__file__).resolve().parents[1] / "golden"
DECOMPOSED, MIXED = (np.load(FOLDER / f"{name}.npz") for name in ("decomposition", "mixing"))
CHOICES: tuple[Any, ...] = get_args(OtherPartner)


def scores_of(z: Tensor, gradient: Tensor) -> Tensor:
    own_logit = lambda features: (gradient * features).flatten(1).sum(1, keepdim=True)  # noqa: E731
    return autograd_scores(z, own_logit, torch.zeros(len(z), dtype=torch.int64))


@pytest.mark.parametrize("kind", ["vec", "map"])
def test_golden_parts(kind: str) -> None:
    x, of_class, of_domain = (torch.tensor(DECOMPOSED[f"{kind}_{name}"]) for name in ("x", "class_grad", "domain_grad"))
    for which, quantile in enumerate(DECOMPOSED["quantiles"]):
        masks = specific_mask(scores_of(x, of_class), 0.5), specific_mask(scores_of(x, of_domain), float(quantile))
        threshold = torch.tensor(DECOMPOSED[f"{kind}_domain_thr"][which])[:, None]
        assert torch.equal(masks[1], scores_of(x, of_domain) > threshold)
        parts = torch.stack(tuple(decompose(x, *masks)), 1)  # [B,4,K,…]
        torch.testing.assert_close(parts, torch.tensor(DECOMPOSED[f"{kind}_out"][which]), atol=1e-6, rtol=0)


def test_parts_worked_out_by_hand() -> None:
    z = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    parts = decompose(z, torch.tensor([[True, True, False, False]]), torch.tensor([[True, False, True, False]]))
    assert [part.tolist() for part in parts] == [[[1, 0, 0, 0]], [[0, 2, 0, 0]], [[0, 0, 3, 0]], [[0, 0, 0, 4]]]


@settings(max_examples=40)
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


def valid(y: list[int], domain: list[int], row: int, same_class: bool, same_domain: bool) -> list[int]:
    pairs = enumerate(zip(y, domain, strict=True))
    return [i for i, (c, d) in pairs if (c == y[row]) == same_class and (d == domain[row]) == same_domain]


def naive(y: list[int], domain: list[int], noise: list[list[float]], other: str) -> list[tuple[int, int, bool, bool]]:
    """Row by row: lists of valid positions, the ⌊u·n⌋-th of them."""
    rows = []
    for row in range(len(y)):
        u_i, u_j = torch.tensor(noise[row], dtype=torch.float32).tolist()
        same = valid(y, domain, row, True, False)
        x_i = same[math.floor(u_i * len(same))] if same else row
        if other == "same_as_x_i":
            rows.append((x_i, x_i, bool(same), bool(same)))
            continue
        others = {
            "other_class_other_domain": valid(y, domain, row, False, False),
            "other_class_same_domain": valid(y, domain, row, False, True),
            "same_class_other_domain": [position for position in same if position != x_i] or same,
        }[other]
        rows.append((x_i, others[math.floor(u_j * len(others))] if others else row, bool(same), bool(others)))
    return rows


@settings(max_examples=60)
@given(st.data(), st.sampled_from(CHOICES))
def test_partners_equal_a_naive_loop(data: st.DataObject, other: Any) -> None:
    size = data.draw(st.integers(1, 14))
    y, domain = (data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)) for _ in range(2))
    # few bits, so that u·n is exact in float32 and in Python alike
    u = st.integers(0, 2**16 - 1).map(lambda k: k / 2**16)
    noise = data.draw(st.lists(st.tuples(u, u), min_size=size, max_size=size))
    drawn = draw_partners(torch.tensor(y), torch.tensor(domain), torch.tensor(noise), other)
    assert list(zip(*(column.tolist() for column in drawn), strict=True)) == naive(y, domain, noise, other)


def test_the_highest_u_is_the_last_valid_sample() -> None:
    """Also where float32 rounds u·n up to n, and for a u of 1, which no stream draws."""
    y, domain = torch.zeros(1000, dtype=torch.int64), torch.arange(1000) % 2
    for u in (1 - 2**-24, 1.0):
        drawn = draw_partners(y, domain, torch.full((1000, 2), u))
        assert drawn.same[0] == 999 and drawn.same[1] == 998


def test_partners_of_one_domain_or_one_class_and_an_unknown_choice() -> None:
    noise, y, domain = torch.rand(6, 2), torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 0, 1, 0, 1])
    alone = draw_partners(y, torch.zeros(6, dtype=torch.int64), noise)
    assert not alone.has_same.any() and not alone.has_other.any()
    assert alone.same.tolist() == alone.other.tolist() == list(range(6))
    one_class = draw_partners(torch.zeros(6, dtype=torch.int64), domain, noise)
    assert one_class.has_same.all() and not one_class.has_other.any()
    assert one_class.other.tolist() == list(range(6))
    with pytest.raises(ValueError, match="nobody"):
        draw_partners(y, domain, noise, "nobody")  # type: ignore[arg-type]


def golden(name: str) -> Tensor:
    return torch.tensor(MIXED[name])


def golden_mix(kind: str, quantile: float, call: int, z: Tensor) -> Tensor:
    of_class = specific_mask(scores_of(z, golden(f"{kind}_class_grad")), 0.5)
    of_domain = specific_mask(scores_of(z, golden(f"{kind}_domain_grad")), quantile)
    everyone = torch.ones(len(z), dtype=torch.bool)
    partners = Partners(golden("same")[call], golden("diff")[call], everyone, everyone)
    keep = everyone & bool(MIXED["p"][call] > MIXED["p_discard"])  # one p for the whole batch
    return mix(decompose(z, of_class, of_domain), partners, golden("lam")[call], keep)


@pytest.mark.parametrize("kind", ["vec", "map"])
def test_golden_mixing_and_its_gradient(kind: str) -> None:
    """The gradient flows through partners and not through masks."""
    for call in (0, 1):
        for quantile in (0.9, 0.5):
            mixed = golden_mix(kind, quantile, call, golden(f"{kind}_x"))
            torch.testing.assert_close(mixed, golden(f"{kind}_out_q{quantile}")[call], atol=1e-6, rtol=0)
    z = golden("map_x").requires_grad_()
    mixed = golden_mix("map", 0.9, 0, z)
    (gradient,) = torch.autograd.grad((mixed * golden("map_upstream_grad")).sum(), z)
    torch.testing.assert_close(gradient, golden("map_grad_wrt_x"), atol=1e-6, rtol=0)


def test_mixing_worked_out_by_hand() -> None:
    z = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [100.0, 200.0, 300.0, 400.0]])
    class_mask = torch.tensor([[True, True, False, False], [True, False, False, False], [False, False, True, False]])
    domain_mask = torch.tensor([[True, False, True, False], [True, True, False, False], [False, True, True, False]])
    yes = torch.tensor([True, True, True])
    partners = Partners(torch.tensor([1, 0, 2]), torch.tensor([2, 2, 0]), yes, torch.tensor([True, True, False]))
    lam = torch.tensor([[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]])
    mixed = mix(decompose(z, class_mask, domain_mask), partners, lam, keep=torch.tensor([True, False, True]))
    assert mixed.tolist() == [
        # ½(Z_c,d + its partner's), ¼ Z_¬c,d + ¾ of its partner's own (dimension 1 of row 2), the generic parts
        [0.5 * 1 + 0.5 * 10, 2 + 0.75 * 200, 0.25 * 3, 4],
        [0, 0.25 * 20 + 0.75 * 200, 30, 40],  # Z_c,d dropped
        [100, 200, 300, 400],  # partner of itself, no x_j: nothing changes
    ]


def test_maps_and_pooled_features_are_one_function() -> None:
    """Scores, masks, mixing and discard on maps, then pooled, equal the same on the pooled features."""
    torch.manual_seed(0)
    maps = torch.relu(torch.randn(24, 32, 7, 7)) * (torch.rand(24, 32, 1, 1) > 0.3)  # with dead channels: ties
    weight, domain_weight = torch.randn(5, 32), torch.randn(3, 32)
    y, domain = torch.arange(24) % 5, torch.arange(24) % 3
    partners = draw_partners(y, domain, torch.rand(24, 2))
    lam, keep = torch.rand(24, 2), torch.rand(24) > 0.2

    def augmented(z: Tensor) -> Tensor:
        class_mask = specific_mask(linear_scores(z, weight, y), 0.5)
        domain_mask = specific_mask(linear_scores(z, domain_weight, domain), 0.7)
        return mix(decompose(z, class_mask, domain_mask), partners, lam, keep)

    torch.testing.assert_close(augmented(maps).mean((2, 3)), augmented(maps.mean((2, 3))), atol=1e-6, rtol=0)
