"""CORAL against the recorded training and against covariances written out."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from recorded import SETUP, Recorded, close
from torch import Tensor

from xdm_ft.algorithms.coral import CORAL, mean_distance
from xdm_ft.algorithms.erm import ERM
from xdm_ft.runtime.tensors import Batch


def test_recorded_training() -> None:
    recorded = Recorded("coral_train.npz")
    algorithm = CORAL(SETUP, gamma=float(recorded["gamma"]))
    for step, _, losses in recorded.steps(algorithm):
        close(losses.logs["risk"].detach(), recorded["loss"][step], f"risk of step {step}")
        close(losses.logs["penalty"].detach(), recorded["penalty"][step], f"penalty of step {step}")
        torch.testing.assert_close(losses.total, losses.logs["risk"] + algorithm.gamma * losses.logs["penalty"])
    assert step == 2


def by_hand(z: Tensor, domain: Tensor) -> Tensor:
    """Mean over pairs, with every covariance made."""
    groups = [z[domain == d] for d in domain.unique() if (domain == d).sum() > 1]
    distances = [
        (a.mean(0) - b.mean(0)).square().mean() + (a.T.cov() - b.T.cov()).square().mean()
        for a, b in combinations(groups, 2)
    ]
    return torch.stack(distances).mean()


@pytest.mark.parametrize("domain", [[0, 0, 0, 1, 1, 2, 2, 2, 2], [2, 0, 2, 0, 1, 0, 2, 2, 0]])  # 1: one sample only
@pytest.mark.parametrize("width", [5, 300])
def test_covariances_written_out(domain: list[int], width: int) -> None:
    of = torch.tensor(domain)
    z = torch.randn(len(domain), width, generator=torch.Generator().manual_seed(0)) + 0.3 * of[:, None]
    z.requires_grad_()
    distance, expected = mean_distance(z, of, 4), by_hand(z, of)
    torch.testing.assert_close(distance, expected)
    torch.testing.assert_close(torch.autograd.grad(distance, z), torch.autograd.grad(expected, z), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("domain", [[1, 1, 1, 1], [0, 1, 2, 2]])
def test_without_a_pair_it_is_erm(domain: list[int]) -> None:
    z = torch.randn(4, SETUP.width, generator=torch.Generator().manual_seed(0))
    batch = Batch(z, torch.tensor([0, 1, 2, 0]), torch.tensor(domain), torch.arange(4), torch.arange(4))
    losses = CORAL(SETUP)(z, batch, 0)
    assert losses.logs["penalty"] == 0 and losses.total == ERM(SETUP)(z, batch, 0).total


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3])
def test_precision_of_near_equal_domains(distance: float) -> None:
    """Covariances are subtracted before they are squared: the error is small beside the distance itself."""
    generator = torch.Generator().manual_seed(0)
    one = torch.relu(torch.randn(32, 512, generator=generator))
    z = torch.cat([one, one + distance * torch.randn(32, 512, generator=generator)]).requires_grad_()
    domain, exact = torch.arange(2).repeat_interleave(32), z.detach().double().requires_grad_()
    found, expected = mean_distance(z, domain, 2), by_hand(exact, domain)
    assert found.dtype == torch.float32 and abs(found.double() - expected) < 1e-6 * expected
    gradients = torch.autograd.grad(found, z)[0].double(), torch.autograd.grad(expected, exact)[0]
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[1].norm()


def test_equal_domains_are_no_distance_apart_and_features_that_are_not_finite_give_nan() -> None:
    z = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).repeat(3, 1).requires_grad_()
    domain = torch.arange(3).repeat_interleave(16)
    distance = mean_distance(z, domain, 3)
    assert distance < 1e-25 and torch.autograd.grad(distance, z)[0].abs().max() < 1e-12
    assert mean_distance(z.detach().index_fill(1, torch.tensor([3]), torch.inf), domain, 3).isnan()
