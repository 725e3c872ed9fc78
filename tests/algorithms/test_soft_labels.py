"""Soft labels of the data in the class losses of methods: by hand, against naive sums, and as one-hot labels."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from partnered import mixed, partnered
from recorded import CLASSES, SETUP, batch_of, random_batch
from test_contract import ALGORITHMS, METHODS
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.domain_shift import DomainShift
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import cut_mix
from xdm_ft.algorithms.mixup import mix_up
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Batch, Task

READERS = [name for name in ALGORITHMS if METHODS[name].reads_soft_labels]
DOMAIN = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
WEIGHT = torch.tensor([0.5, 1.0, 3.0])
LAST = SETUP.steps - 1


def soft_batch() -> Batch:
    given = random_batch(DOMAIN)
    votes = torch.rand(len(DOMAIN), CLASSES, generator=torch.Generator().manual_seed(1))
    return given._replace(targets=0.5 * F.one_hot(given.y, CLASSES) + 0.5 * votes / votes.sum(1, keepdim=True))


def test_the_methods_that_read_them() -> None:
    """Those with the class loss of ERM; the others read `batch.y`."""
    erm_s = {name for name in ALGORITHMS if issubclass(METHODS[name], ERM)}
    assert {*READERS} == erm_s | {"coral", "xdomainmix", "domain_shift"} and len(erm_s) >= 7
    assert not any(METHODS[name].reads_soft_labels for name in METHODS if name not in ALGORITHMS)


def test_erm_by_hand() -> None:
    """Logits ln 3 and 0: the classes have probabilities ¾ and ¼; the soft labels are (1, 0) and (⅔, ⅓)."""
    algorithm = ERM(Setup(Task(("a", "b"), ("x",)), width=1, steps=1, seed=0))
    with torch.no_grad():
        algorithm.head.weight.copy_(torch.tensor([[math.log(3)], [0.0]]))
        algorithm.head.bias.zero_()
    given = batch_of(torch.ones(2, 1), [0, 0], [0, 0], targets=torch.tensor([[1, 0], [2 / 3, 1 / 3]]))
    losses = -math.log(3 / 4), -2 / 3 * math.log(3 / 4) - 1 / 3 * math.log(1 / 4)
    assert algorithm(given.x, given, 0).total.item() == pytest.approx(sum(losses) / 2, rel=1e-6)
    algorithm.class_weight = torch.tensor([1.0, 5.0])  # Σ w t (−log p) / Σ w t
    weighted = -math.log(3 / 4) - 2 / 3 * math.log(3 / 4) - 5 / 3 * math.log(1 / 4)
    assert algorithm(given.x, given, 0).total.item() == pytest.approx(weighted / (1 + 2 / 3 + 5 / 3), rel=1e-6)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("name", READERS)
def test_one_hot_ones_are_the_labels_bit_for_bit(name: str, weight: Tensor | None) -> None:
    """Losses and gradients, at the first step and the last: of a warm-up too."""
    text = torch.randn(CLASSES, SETUP.width, generator=torch.Generator().manual_seed(2))
    algorithm = METHODS[name](Setup(SETUP.task, SETUP.width, SETUP.steps, 0, class_weight=weight, text_weight=text))
    for step in (0, LAST):
        hard = random_batch(DOMAIN)
        results = []
        for given in (hard, hard._replace(targets=F.one_hot(hard.y, CLASSES).float())):
            batch = mixed(algorithm, given, step)
            losses = algorithm(batch.x, batch, step)
            results.append((losses.total, *torch.autograd.grad(losses.total, list(algorithm.head.parameters()))))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("average", ["domain", "sample"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("method", [XDomainMix, DomainShift])
def test_both_class_losses_are_sums_over_classes(
    method: type[XDomainMix | DomainShift], weight: Tensor | None, average: str
) -> None:
    """½ Σ_c w_c t_c (−log p_c − log p̃_c); masks, partners and the domain head's loss are those of the labels."""
    setup = Setup(SETUP.task, SETUP.width, SETUP.steps, 0, loss_average=average, class_weight=weight)  # type: ignore[arg-type]
    algorithm, soft = method(setup), soft_batch()
    algorithm.logits, seen = _recording(algorithm)  # type: ignore[method-assign]
    losses = algorithm(soft.x, soft, LAST)
    z, moved = seen
    hard = algorithm(soft.x, soft._replace(targets=None), LAST)
    assert torch.equal(seen[3], moved) and losses.auxiliary == hard.auxiliary and losses.total != hard.total
    assert soft.targets is not None
    factors = soft.targets * (torch.ones(CLASSES) if weight is None else weight)  # [B,C]
    per_sample = -sum((factors * algorithm.head(v).log_softmax(1)).sum(1) for v in (z, moved)) / 2
    groups = (
        [torch.tensor(DOMAIN) == d for d in range(3)] if average == "domain" else [torch.ones(12, dtype=torch.bool)]
    )
    means = [per_sample[group].sum() / factors[group].sum() for group in groups]
    torch.testing.assert_close(losses.total, torch.stack(means).mean())


def _recording(algorithm: Algorithm) -> tuple[object, list[Tensor]]:
    """Logits as before, and the list of what they were asked for."""
    seen = list[Tensor]()

    def logits(z: Tensor) -> Tensor:
        seen.append(z.detach())
        return algorithm.head(z)

    return logits, seen


def test_mixed_labels_are_those_of_both_samples() -> None:
    images, partner, lam = torch.rand(12, 3, 6, 6), torch.arange(12).roll(1), torch.linspace(0, 1, 12)
    soft = soft_batch()
    assert soft.targets is not None
    given = soft._replace(x=images, partner=images[partner], partner_y=soft.y[partner])
    given = given._replace(has_partner=lam > -1, partner_targets=soft.targets[partner])
    expected = lam[:, None] * soft.targets + (1 - lam[:, None]) * soft.targets[partner]
    torch.testing.assert_close(mix_up(given, lam, CLASSES).targets, expected)
    boxed = cut_mix(given, lam, torch.full((12, 2), 0.5), CLASSES)
    shown = (boxed.x == images).all(1).double().mean((1, 2)).float()[:, None]  # λ: the share of x
    torch.testing.assert_close(boxed.targets, shown * soft.targets + (1 - shown) * soft.targets[partner])
    for name in ("mixup", "lisa"):
        algorithm = METHODS[name](SETUP)
        both, batch = partnered(algorithm, soft, 3), mixed(algorithm, soft, 3)
        change = (batch.x - soft.x)[:, 0] / (both.partner - soft.x)[:, 0].where(both.has_partner, torch.ones(12))
        torch.testing.assert_close(
            batch.targets, soft.targets + change[:, None] * (both.partner_targets - soft.targets)
        )
