"""GroupDRO against the recorded training, a loop over domains, and what it promises of q."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from recorded import DOMAINS, SETUP, WIDTH, Recorded, close
from torch import Tensor

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.groupdro import GroupDRO
from xdm_ft.runtime.tensors import Batch


def batch(domain: Tensor) -> Batch:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(len(domain), WIDTH, generator=generator)
    return Batch(
        z,
        torch.randint(0, 3, domain.shape, generator=generator),
        domain,
        torch.arange(len(domain)),
        torch.arange(len(domain)),
    )


def test_recorded_training() -> None:
    recorded = Recorded("groupdro.npz")
    assert torch.equal(recorded["q_init"], torch.ones(DOMAINS))  # normalised from the first step on: as if uniform
    algorithm = GroupDRO(SETUP, eta=float(recorded["eta"]))
    for step, _, losses in recorded.steps(algorithm):
        close(losses.total.detach(), recorded["loss"][step], f"loss of step {step}")
        close(losses.buffers["q"], recorded["q"][step], f"q after step {step}")
    assert step == 3


def test_loop_over_domains() -> None:
    algorithm, q = GroupDRO(SETUP, eta=0.5), [1.0] * DOMAINS
    for step, domain in enumerate(([0, 0, 1, 2, 2, 2], [2, 0, 1, 1, 1, 0], [1, 1, 1, 2, 1, 2])):  # the last without 0
        given = batch(torch.tensor(domain))
        losses, per_domain = algorithm(given.x, given, step), {}
        for d in sorted(set(domain)):
            own = given.domain == d
            per_domain[d] = F.cross_entropy(algorithm.head(given.x[own]), given.y[own])
            q[d] *= math.exp(0.5 * per_domain[d].item())
        q = [value / sum(q) for value in q]
        weighted = sum(q[d] * loss for d, loss in per_domain.items())
        torch.testing.assert_close(losses.total, weighted)
        torch.testing.assert_close(losses.buffers["q"], torch.tensor(q))
        gradients = (torch.autograd.grad(loss, algorithm.head.weight)[0] for loss in (losses.total, weighted))
        torch.testing.assert_close(*gradients)  # none through q
        algorithm.q.copy_(losses.buffers["q"])


def test_second_pass_keeps_the_weights_of_the_first() -> None:
    algorithm, given = GroupDRO(SETUP, eta=1.0), batch(torch.tensor([0, 0, 1, 1, 2, 2]))
    first = algorithm(given.x, given, 0)
    with torch.no_grad():
        algorithm.head.weight.mul_(-3)
    second = algorithm(given.x, given, 0, first.first_pass_draws)
    assert torch.equal(second.buffers["q"], first.buffers["q"])
    assert not torch.equal(algorithm(given.x, given, 0).buffers["q"], first.buffers["q"])
    by_hand = sum(
        q * F.cross_entropy(algorithm.head(given.x[2 * d : 2 * d + 2]), given.y[2 * d : 2 * d + 2])
        for d, q in enumerate(first.first_pass_draws["q"])
    )
    torch.testing.assert_close(second.total, by_hand)


def test_without_a_step_it_is_erm() -> None:
    algorithm, erm, given = GroupDRO(SETUP, eta=0.0), ERM(SETUP), batch(torch.tensor([0, 0, 0, 0, 1, 2]))
    torch.testing.assert_close(algorithm(given.x, given, 0).total, erm(given.x, given, 0).total)


def test_a_batch_of_one_domain_counts_with_that_domains_weight() -> None:
    algorithm, given = GroupDRO(SETUP, eta=0.1), batch(torch.tensor([1, 1, 1]))
    losses = algorithm(given.x, given, 0)
    mean = F.cross_entropy(algorithm.head(given.x), given.y)
    torch.testing.assert_close(losses.total, losses.buffers["q"][1] * mean)
    assert losses.buffers["q"][1] > losses.buffers["q"][0] == losses.buffers["q"][2]


def test_a_huge_loss_does_not_overflow() -> None:
    algorithm, given = GroupDRO(SETUP, eta=1.0), batch(torch.tensor([0, 0, 1, 1, 2, 2]))
    losses = algorithm(1e4 * given.x, given, 0)
    assert losses.total.isfinite() and losses.buffers["q"].isfinite().all()
    torch.testing.assert_close(losses.buffers["q"].sum(), torch.tensor(1.0))
