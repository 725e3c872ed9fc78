"""BMA's weights against values worked out by hand and scipy's density; its mean against the sum over all steps."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import beta as beta_distribution

from xdm_ft.averaging.bma import BMA, beta_density
from xdm_ft.training.selection import Averages


def test_the_weights_by_hand() -> None:
    # Beta(0.5, 0.5) has the density 1 / (π √(x (1 − x))); with T = 3 steps, x = 1/8, 3/8, 5/8, 7/8
    end, middle = 8 / (math.pi * math.sqrt(7)), 8 / (math.pi * math.sqrt(15))
    found = [BMA().weight(step, 3) for step in range(4)]
    assert found == pytest.approx([end, middle, middle, end])
    assert [BMA(beta=1).weight(step, 7) for step in range(8)] == pytest.approx([1.0] * 8)


@pytest.mark.parametrize("beta", [0.01, 0.3, 0.5, 1.0, 2.5, 10.0])
@pytest.mark.parametrize("x", [5e-7, 0.2, 0.5, 1 - 5e-7])
def test_the_density_is_scipys(beta: float, x: float) -> None:
    assert beta_density(x, beta) == pytest.approx(beta_distribution.pdf(x, beta, beta), rel=1e-6)
    assert beta_density(x, beta) > 0


@pytest.mark.parametrize("every", [1, 3, 4, 12])
def test_the_mean_is_the_weighted_sum_over_all_steps_and_the_start(every: int) -> None:
    """However the evaluations cut the training into segments; every head by its own β."""
    betas, steps = (0.5, 1.0, 0.1), 12
    weights = torch.randn(steps + 1, 3, 2, 5, generator=torch.Generator().manual_seed(0))  # steps, heads
    averages = Averages([BMA(beta=beta) for beta in betas], first_step=7, steps=steps)
    for taken in range(steps + 1):
        averages.add(taken, {"w": weights[taken]})
        if taken and taken % every == 0:
            averages.evaluated(taken, [math.nan] * 3)
    for head, beta in enumerate(betas):
        factors = [beta_distribution.pdf((step + 0.5) / (steps + 1), beta, beta) for step in range(steps + 1)]
        expected = sum(factor * weights[step, head] for step, factor in enumerate(factors)) / sum(factors)
        selected = averages.selected(head, lambda mean: mean, ("train_val",))["train_val"]
        assert (selected.step, selected.hparams) == (steps, {"averaged_from": 0})
        torch.testing.assert_close(selected.state["w"], expected, rtol=1e-5, atol=1e-6)
    one, other = (averages.selected(head, lambda mean: mean, ("train_val",))["train_val"] for head in (0, 2))
    assert not torch.allclose(one.state["w"], other.state["w"], atol=1e-3)
