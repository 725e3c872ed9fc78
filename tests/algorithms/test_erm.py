"""ERM, and what every algorithm shares: the head and the average."""

import torch
import torch.nn.functional as F
from torch.func import vmap

from xdm_ft.algorithms import Setup, mean_loss
from xdm_ft.algorithms.erm import ERM
from xdm_ft.runtime.tensors import Batch, Task

TASK = Task(("a", "b", "c"), ("x", "y"))


def batch(targets: torch.Tensor | None = None) -> Batch:
    torch.manual_seed(0)
    return Batch(
        torch.randn(5, 8),
        torch.tensor([0, 1, 2, 1, 0]),
        torch.tensor([0, 0, 0, 1, 1]),
        torch.arange(5),
        torch.arange(5),
        targets,
    )


def test_mean_per_domain_then_over_domains() -> None:
    per_sample = torch.tensor([1.0, 2.0, 6.0, 10.0])
    domain = torch.tensor([0, 0, 0, 2])  # nothing of domain 1
    assert mean_loss(per_sample, domain, 3, "domain") == (3 + 10) / 2
    assert mean_loss(per_sample, domain, 3, "sample") == 19 / 4


def test_loss_is_the_papers() -> None:
    algorithm, given = ERM(Setup(TASK, 8, 10, 0)), batch()
    losses = algorithm(given.x, given, 0)
    ell = F.cross_entropy(algorithm.head(given.x), given.y, reduction="none")
    torch.testing.assert_close(losses.total, (ell[:3].mean() + ell[3:].mean()) / 2)
    assert losses.auxiliary == 0 and not losses.first_pass_draws


def test_soft_labels() -> None:
    targets = torch.softmax(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), 1)
    algorithm, given = ERM(Setup(TASK, 8, 10, 0, loss_average="sample")), batch(targets)
    by_hand = -(targets * algorithm.head(given.x).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(algorithm(given.x, given, 0).total, by_hand)
    one_hot = batch(F.one_hot(given.y, 3).float())
    torch.testing.assert_close(algorithm(one_hot.x, one_hot, 0).total, algorithm(batch().x, batch(), 0).total)


def test_average_under_vmap() -> None:
    per_sample, domain = torch.rand(4, 6), torch.tensor([[0, 0, 1, 1, 1, 2]] * 4)
    stacked = vmap(lambda p, d: mean_loss(p, d, 3, "domain"))(per_sample, domain)
    alone = torch.stack([mean_loss(p, d, 3, "domain") for p, d in zip(per_sample, domain, strict=True)])
    torch.testing.assert_close(stacked, alone)
