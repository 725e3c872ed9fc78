"""Fish: the recorded training and meta step, and what the paper has otherwise."""

from __future__ import annotations

import torch
from recorded import golden
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.fish import Fish, meta_step
from xdm_ft.core import Batch, Task

RECORDED = golden("fish.npz")
TASK = Task(tuple("abc"), tuple("xyz"))


class InFixedOrder(Fish):
    """As the recorded code takes the domains: the paper's Algorithm 1 permutes them, and so do we."""

    def order(self, step: int) -> list[int]:
        return list(range(self.task.num_domains))


def trained(algorithm: Fish) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias after every update, with one Adam whose state is carried on."""
    head = algorithm.head
    with torch.no_grad():
        head.weight.copy_(RECORDED["W_init"])
        head.bias.copy_(RECORDED["b_init"])
    optimizer = torch.optim.Adam(head.parameters(), lr=float(RECORDED["lr"]))
    after = []
    for step in range(len(RECORDED["W"])):
        for domain in algorithm.update(dict(head.named_parameters()), dict(algorithm.named_buffers()), step):
            assert domain is not None
            x, y = RECORDED["X"][domain], RECORDED["y"][domain]
            batch = Batch(x, y, torch.full_like(y, domain), torch.arange(len(y)), torch.arange(len(y)))
            optimizer.zero_grad()
            algorithm(x, batch, step).total.backward()
            optimizer.step()
        after.append((head.weight.detach().clone(), head.bias.detach().clone()))
    return after


def test_training_is_the_recorded_one_in_its_order_and_differs_in_ours() -> None:
    setup = Setup(TASK, 6, len(RECORDED["W"]), seed=0)
    meta_lr = float(RECORDED["meta_lr"])
    for step, (weight, bias) in enumerate(trained(InFixedOrder(setup, meta_lr=meta_lr))):
        torch.testing.assert_close(weight, RECORDED["W"][step], atol=1e-5, rtol=0)
        torch.testing.assert_close(bias, RECORDED["b"][step], atol=1e-5, rtol=0)
    ours = trained(Fish(setup, meta_lr=meta_lr))[-1][0]
    assert 1e-4 < (ours - RECORDED["W"][-1]).abs().max() < 0.2
    assert Fish(setup).meta_lr == meta_lr == 0.5


def test_meta_step_is_the_recorded_one() -> None:
    for name in ("a", "b"):
        moved = meta_step(RECORDED[f"meta_{name}"], RECORDED[f"inner_{name}"], RECORDED["step_meta_lr"].float())
        torch.testing.assert_close(moved, RECORDED[f"step_{name}"], atol=1e-6, rtol=0)


def test_order_of_the_domains() -> None:
    """Every domain once, anew at every step, the same for all seeds."""
    one, other = (Fish(Setup(TASK, 6, 10, seed)) for seed in (0, 1))
    orders = [one.order(step) for step in range(300)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert orders == [other.order(step) for step in range(300)]
    first = [order[0] for order in orders]
    assert all(70 < first.count(domain) < 130 for domain in range(3))
