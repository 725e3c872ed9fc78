"""Class weights in every method's loss, against torch's weighted cross-entropy and loops over domains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from partnered import mixed
from torch import Tensor
from torch.func import vmap

from xdm_ft.algorithms import Algorithm, LossAverage, Setup, domain_means, mean_loss
from xdm_ft.algorithms.coral import CORAL, mean_distance
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.groupdro import GroupDRO
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.vrex import VREx
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.recipe.components import find, names
from xdm_ft.runtime.tensors import Batch, Task

FOUND = {name: find("algorithms", name) for name in names("algorithms")}
ALGORITHMS = sorted(name for name, cls in FOUND.items() if issubclass(cls, Algorithm))
TASK = Task(tuple("abcd"), tuple("xyz"))
WEIGHT = torch.tensor([0.5, 2.0, 1.25, 0.0])  # the last class is not in the data
LATE = 90  # beyond every warm-up


def setup(weight: Tensor | None = WEIGHT, **more: Any) -> Setup:
    return Setup(TASK, 16, steps=100, seed=0, class_weight=weight, **more)


def batch() -> Batch:
    """Four samples of each of three domains, none of class 3."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(12, 16, generator=generator)
    y = torch.tensor([0, 1, 2, 0, 1, 1, 2, 0, 2, 2, 0, 1])
    return Batch(z, y, torch.arange(3).repeat_interleave(4), torch.arange(100, 112), torch.arange(12))


def risks(algorithm: Algorithm, given: Batch) -> Tensor:
    """[3]: torch's weighted mean in every domain."""
    own = [given.domain == d for d in range(3)]
    return torch.stack([F.cross_entropy(algorithm.head(given.x[o]), given.y[o], weight=WEIGHT) for o in own])


def test_weighted_means_by_hand() -> None:
    values, weight = torch.tensor([1.0, 2.0, 6.0, 10.0, 3.0]), torch.tensor([1.0, 3.0, 0.5, 2.0, 0.0])
    domain = torch.tensor([0, 0, 0, 2, 2])  # nothing of domain 1
    means, present = domain_means(values, domain, 3, weight)
    torch.testing.assert_close(means, torch.tensor([(1 + 6 + 3) / 4.5, 0.0, 10.0]))
    assert present.tolist() == [True, False, True]
    torch.testing.assert_close(mean_loss(values, domain, 3, "domain", weight), torch.tensor((10 / 4.5 + 10) / 2))
    torch.testing.assert_close(mean_loss(values, domain, 3, "sample", weight), torch.tensor((1 + 6 + 3 + 20) / 6.5))
    assert not domain_means(values, domain, 3, weight * (domain == 0))[1][2]  # weights of 0: no sample


def test_there_are_methods_to_test() -> None:
    assert len(ALGORITHMS) >= 13


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("step", [0, LATE])
def test_every_method_weighs_its_class_loss_and_nothing_else(name: str, step: int) -> None:
    plain, ones, weighted, scaled = (FOUND[name](setup(weight)) for weight in (None, torch.ones(4), WEIGHT, 8 * WEIGHT))
    given = mixed(plain, batch(), step)
    losses = {
        key: algorithm(given.x, given, step)
        for key, algorithm in {"plain": plain, "ones": ones, "weighted": weighted, "scaled": scaled}.items()
    }
    torch.testing.assert_close(losses["ones"].total, losses["plain"].total)
    torch.testing.assert_close(losses["scaled"].total, losses["weighted"].total)
    assert abs(losses["weighted"].total - losses["plain"].total) > 1e-3
    assert losses["weighted"].auxiliary == losses["plain"].auxiliary


@pytest.mark.parametrize("name", ALGORITHMS)
def test_heads_of_a_bank_have_their_own_weights(name: str) -> None:
    algorithm, given = FOUND[name](setup()), batch()
    weights = torch.stack([WEIGHT, torch.ones(4)])

    def total(weight: Tensor) -> Tensor:
        state = {"class_weight": weight}
        return torch.func.functional_call(algorithm, state, (given.x, given, LATE)).total

    alone = torch.stack([FOUND[name](setup(weight))(given.x, given, LATE).total for weight in weights])
    torch.testing.assert_close(vmap(total)(weights), alone)


def test_erm_is_torchs_weighted_cross_entropy() -> None:
    given = batch()
    sample, domain = ERM(setup(loss_average="sample")), ERM(setup())
    theirs = F.cross_entropy(sample.head(given.x), given.y, weight=WEIGHT)
    torch.testing.assert_close(sample(given.x, given, 0).total, theirs)
    torch.testing.assert_close(domain(given.x, given, 0).total, risks(domain, given).mean())


@pytest.mark.parametrize("loss_average", ["sample", "domain"])
def test_soft_labels_weigh_every_class_by_its_own(loss_average: LossAverage) -> None:
    """Σ w_c t_c (−log p_c) / Σ w_c t_c, over the batch or in every domain; the sums are torch's weighted ones."""
    algorithm, given = Mixup(setup(loss_average=loss_average), alpha=1.0), batch()
    given = mixed(algorithm, given, 5)
    assert given.targets is not None and not torch.equal(given.targets, given.targets.round())
    logits, parts = algorithm.head(given.x), [given.domain == d for d in range(3)]
    parts = parts if loss_average == "domain" else [torch.ones(12, dtype=torch.bool)]
    sums = [F.cross_entropy(logits[own], given.targets[own], weight=WEIGHT, reduction="sum") for own in parts]
    by_hand = [total / (WEIGHT * given.targets[own]).sum() for total, own in zip(sums, parts, strict=True)]
    torch.testing.assert_close(algorithm(given.x, given, 5).total, torch.stack(by_hand).mean())


@pytest.mark.parametrize("loss_average", ["sample", "domain"])
def test_one_hot_labels_are_labels(loss_average: LossAverage) -> None:
    """Samples of a class that weighs nothing included."""
    algorithm, given = ERM(setup(loss_average=loss_average)), batch()
    given = given._replace(y=given.y.index_fill(0, torch.tensor([2]), 3), x=given.x.requires_grad_())
    hard, soft = given, given._replace(targets=F.one_hot(given.y, 4).float())
    totals = [algorithm(one.x, one, 5).total for one in (hard, soft)]
    gradients = [torch.autograd.grad(total, given.x)[0] for total in totals]
    torch.testing.assert_close(totals[1], totals[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert not gradients[1][2].any()


def test_risks_of_domains_are_weighted() -> None:
    given = batch()
    vrex, groupdro, coral = VREx(setup()), GroupDRO(setup(), eta=0.5), CORAL(setup(), gamma=2.0)
    of_domains = risks(vrex, given)
    torch.testing.assert_close(vrex(given.x, given, LATE).total, of_domains.mean() + 10 * of_domains.var(correction=0))
    q = (0.5 * of_domains).softmax(0)
    torch.testing.assert_close(groupdro(given.x, given, 0).total, q.detach() @ of_domains)
    distance = mean_distance(given.x, given.domain, 3)
    torch.testing.assert_close(coral(given.x, given, 0).total, of_domains.mean() + 2 * distance)


def test_irm_differentiates_the_weighted_risks() -> None:
    algorithm, given, penalties = IRM(setup()), batch(), []
    for d in range(3):
        logits, y = algorithm.head(given.x[given.domain == d]), given.y[given.domain == d]
        slopes = []
        for half in (slice(0, None, 2), slice(1, None, 2)):
            scale = torch.ones((), requires_grad=True)
            risk = F.cross_entropy(scale * logits[half], y[half], weight=WEIGHT)
            slopes.append(torch.autograd.grad(risk, scale)[0])
        penalties.append(slopes[0] * slopes[1])
    torch.testing.assert_close(algorithm(given.x, given, LATE).logs["penalty"], torch.stack(penalties).mean())


def test_the_domain_head_of_xdomainmix_is_not_weighted() -> None:
    given = batch()
    for augmented in (False, True):
        plain, weighted = (
            XDomainMix(setup(weight), domain_head_augmented=augmented, p_discard=0.0) for weight in (None, WEIGHT)
        )
        one, other = (algorithm(given.x, given, LATE) for algorithm in (plain, weighted))
        assert torch.equal(one.auxiliary, other.auxiliary) and not torch.equal(one.total, other.total)


def test_without_weights_there_is_no_buffer() -> None:
    assert "class_weight" not in ERM(setup(None)).state_dict()
    assert torch.equal(ERM(setup()).state_dict()["class_weight"], WEIGHT)
