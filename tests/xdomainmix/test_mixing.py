"""Equations (5) to (7): against the golden numbers, by hand, and on maps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from xdm_ft.xdomainmix import Partners, autograd_scores, decompose, draw_partners, linear_scores, mix, specific_mask
from xdm_ft.xdomainmix.mixing import Parts

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "mixing.npz")


def golden(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[name])


def golden_mix(kind: str, quantile: float, call: int, z: torch.Tensor) -> torch.Tensor:
    def mask(gradient: torch.Tensor, at: float) -> torch.Tensor:
        own_logit = lambda features: (gradient * features).flatten(1).sum(1, keepdim=True)  # noqa: E731
        return specific_mask(autograd_scores(z, own_logit, torch.zeros(len(z), dtype=torch.int64)), at)

    parts = decompose(z, mask(golden(f"{kind}_class_grad"), 0.5), mask(golden(f"{kind}_domain_grad"), quantile))
    everyone = torch.ones(len(z), dtype=torch.bool)
    partners = Partners(golden("same")[call], golden("diff")[call], everyone, everyone)
    keep = everyone & bool(GOLDEN["p"][call] > GOLDEN["p_discard"])  # one p for the whole batch
    return mix(parts, partners, golden("lam")[call], keep)


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("quantile", [0.9, 0.5])
@pytest.mark.parametrize("kind", ["vec", "map"])
def test_golden(kind: str, quantile: float, call: int) -> None:
    mixed = golden_mix(kind, quantile, call, golden(f"{kind}_x"))
    torch.testing.assert_close(mixed, golden(f"{kind}_out_q{quantile}")[call], atol=1e-6, rtol=0)


def test_golden_gradient_flows_through_partners_and_not_through_masks() -> None:
    z = golden("map_x").requires_grad_()
    mixed = golden_mix("map", 0.9, 0, z)
    (gradient,) = torch.autograd.grad((mixed * golden("map_upstream_grad")).sum(), z)
    torch.testing.assert_close(gradient, golden("map_grad_wrt_x"), atol=1e-6, rtol=0)


def test_worked_out_by_hand() -> None:
    z = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [100.0, 200.0, 300.0, 400.0]])
    class_mask = torch.tensor([[True, True, False, False], [True, False, False, False], [False, False, True, False]])
    domain_mask = torch.tensor([[True, False, True, False], [True, True, False, False], [False, True, True, False]])
    parts = decompose(z, class_mask, domain_mask)
    yes = torch.tensor([True, True, True])
    partners = Partners(torch.tensor([1, 0, 2]), torch.tensor([2, 2, 0]), yes, torch.tensor([True, True, False]))
    lam = torch.tensor([[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]])
    mixed = mix(parts, partners, lam, keep=torch.tensor([True, False, True]))
    assert mixed.tolist() == [
        # ½(Z_c,d + its partner's), ¼ Z_¬c,d + ¾ of its partner's own (place 1 of row 2), the generic parts as they were
        [0.5 * 1 + 0.5 * 10, 2 + 0.75 * 200, 0.25 * 3, 4],
        [0, 0.25 * 20 + 0.75 * 200, 30, 40],  # Z_c,d dropped
        [100, 200, 300, 400],  # partner of itself, no x_j: nothing changes
    ]


def test_lambda_one_and_everything_kept_is_z() -> None:
    torch.manual_seed(0)
    z = torch.randn(6, 8)
    parts = decompose(z, torch.rand(6, 8) > 0.5, torch.rand(6, 8) > 0.5)
    partners = draw_partners(torch.arange(6) % 2, torch.arange(6) // 2, torch.rand(6, 2))
    assert partners.has_same.all() and partners.has_other.all()
    assert torch.equal(mix(parts, partners, torch.ones(6, 2), torch.ones(6, dtype=torch.bool)), z)


def test_without_partners_lambda_is_one() -> None:
    z = torch.randn(4, 5)
    parts = decompose(z, torch.rand(4, 5) > 0.5, torch.rand(4, 5) > 0.5)
    none = torch.zeros(4, dtype=torch.bool)
    partners = Partners(torch.arange(4), torch.arange(4), none, none)
    assert torch.equal(mix(parts, partners, torch.zeros(4, 2), ~none), z)


def test_maps_and_pooled_features_are_one_function() -> None:
    """Scores, masks, mixing and discard on maps, then pooled, equal the same on the pooled features."""
    torch.manual_seed(0)
    maps = torch.relu(torch.randn(24, 32, 7, 7)) * (torch.rand(24, 32, 1, 1) > 0.3)  # with dead channels: ties
    weight, domain_weight = torch.randn(5, 32), torch.randn(3, 32)
    y, domain = torch.arange(24) % 5, torch.arange(24) % 3
    partners = draw_partners(y, domain, torch.rand(24, 2))
    lam, keep = torch.rand(24, 2), torch.rand(24) > 0.2

    def augmented(z: torch.Tensor) -> torch.Tensor:
        class_mask = specific_mask(linear_scores(z, weight, y), 0.5)
        domain_mask = specific_mask(linear_scores(z, domain_weight, domain), 0.7)
        return mix(decompose(z, class_mask, domain_mask), partners, lam, keep)

    torch.testing.assert_close(augmented(maps).mean((2, 3)), augmented(maps.mean((2, 3))), atol=1e-6, rtol=0)


def test_commutes_with_a_linear_map() -> None:
    torch.manual_seed(0)
    z, weight = torch.randn(12, 20), torch.randn(4, 20)
    parts = decompose(z, torch.rand(12, 20) > 0.5, torch.rand(12, 20) > 0.5)
    partners = draw_partners(torch.arange(12) % 3, torch.arange(12) % 4, torch.rand(12, 2))
    lam, keep = torch.rand(12, 2), torch.rand(12) > 0.3
    after = mix(Parts(*(part @ weight.T for part in parts)), partners, lam, keep)
    torch.testing.assert_close(after, mix(parts, partners, lam, keep) @ weight.T, atol=1e-5, rtol=1e-5)


def test_inputs_stay_as_they_are() -> None:
    z = torch.randn(4, 5)
    parts = decompose(z, torch.rand(4, 5) > 0.5, torch.rand(4, 5) > 0.5)
    before = [part.clone() for part in parts]
    partners = draw_partners(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.rand(4, 2))
    mix(parts, partners, torch.rand(4, 2), torch.zeros(4, dtype=torch.bool))
    assert all(torch.equal(part, copy) for part, copy in zip(parts, before, strict=True))
