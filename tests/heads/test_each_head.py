"""Heads against their equations, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.runtime.randomness import Stream, uniform


def features(n: int = 6, width: int = 16) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(3))


def test_linear_by_hand_and_its_start_as_torchs_linear_layers() -> None:
    head, z = Linear(16, 4, 0, Stream.INIT), features()
    for mode in (head.train(), head.eval()):
        torch.testing.assert_close(mode(z), z @ head.weight.T + head.bias)
    large = Linear(400, 50, 0, Stream.INIT)
    draws = (2 * uniform(0, 0, Stream.INIT, torch.arange(50 * 401)) - 1) * 400**-0.5
    assert torch.equal(torch.cat([large.weight.detach().flatten(), large.bias.detach()]), draws)
    torch.testing.assert_close(large.weight.var(), torch.tensor(1 / 400 / 3), rtol=0.03, atol=0)


def test_cosine_by_hand() -> None:
    head, z = Cosine(16, 4, 0, Stream.INIT, scale=10.0), features()
    logits = head(z).detach()
    for i in range(len(z)):
        for c in range(4):
            w = head.weight[c].detach()
            assert float(logits[i, c]) == pytest.approx(10 * float(z[i] @ w / z[i].norm() / w.norm()), abs=1e-5)
    torch.testing.assert_close(head(7 * z).detach(), logits)
    assert math.exp(Cosine(16, 4, 0, Stream.INIT).log_scale.item()) == pytest.approx(1 / 0.07)
    (gradient,) = torch.autograd.grad(head(z).sum(), [head.log_scale])
    torch.testing.assert_close(gradient, logits.sum())  # ∂v/∂log s = v


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_mlp_by_hand(activation: str) -> None:
    head, z = MLP(16, 4, 0, Stream.INIT, hidden_width=8, activation=activation), features()
    hidden = z @ head.hidden.weight.T + head.hidden.bias
    hidden = hidden.relu() if activation == "relu" else hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    torch.testing.assert_close(head(z), F.linear(hidden, head.output.weight, head.output.bias))


def test_mlp_draws_each_weight_for_itself() -> None:
    head = MLP(400, 50, 0, Stream.INIT, hidden_width=100)
    assert head.hidden.weight.abs().max() <= 1 / 20 and head.output.weight.abs().max() <= 1 / 10
    for weight, bound in ((head.hidden.weight, 1 / 20), (head.output.weight, 1 / 10)):
        torch.testing.assert_close(weight.var(), torch.tensor(bound**2 / 3), rtol=0.05, atol=0)
    values = torch.cat([head.hidden.weight.flatten() * 20, head.output.weight.flatten() * 10])
    assert len(values.unique()) > 0.99 * len(values), "no draw serves two weights"
