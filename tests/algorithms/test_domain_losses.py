"""ERM, IRM, VREx, GroupDRO, CORAL: recorded trainings, loops over domains, class weights by torch's cross-entropy."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from partnered import mixed
from recorded import DOMAINS, SETUP, Recorded, batch_of, close, random_batch, same_gradients
from test_contract import ALGORITHMS, METHODS
from torch import Tensor
from torch.func import vmap

from xdm_ft.algorithms import Algorithm, LossAverage, Setup, domain_means, normalised_sample_weight
from xdm_ft.algorithms.coral import CORAL, mean_distance
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.groupdro import GroupDRO
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.vrex import VREx
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Batch, Task
from xdm_ft.runtime.errors import UserError

UNEQUAL = [[0] * 4 + [1] * 4 + [2] * 4, [0, 1, 2, 2, 1, 0, 0, 2, 1, 0, 0], [0, 1, 0, 0, 0], [1] * 6]


def risks(algorithm: Algorithm, given: Batch, weight: Tensor | None = None) -> Tensor:
    """torch's (weighted) mean in every domain of the batch."""
    parts = [given.domain == d for d in given.domain.unique()]
    return torch.stack([F.cross_entropy(algorithm.head(given.x[o]), given.y[o], weight=weight) for o in parts])


def slope(logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """∂/∂s of the mean cross-entropy of s · logits at s = 1."""
    scale = torch.ones((), requires_grad=True)
    return torch.autograd.grad(F.cross_entropy(scale * logits, y, weight=weight), scale, create_graph=True)[0]


def irm_penalty(algorithm: IRM, given: Batch, weight: Tensor | None = None) -> Tensor:
    """By a double backward pass over halves of every domain; a domain of one sample has no estimate."""
    penalties = []
    for d in given.domain.unique():
        logits, y = algorithm.head(given.x[given.domain == d]), given.y[given.domain == d]
        if len(y) > 1:
            penalties.append(slope(logits[::2], y[::2], weight) * slope(logits[1::2], y[1::2], weight))
    return torch.stack(penalties).mean()


def mean_loss(values: Tensor, domain: Tensor, average: LossAverage, weight: Tensor | None = None) -> Tensor:
    return values @ normalised_sample_weight(domain, 3, average, weight)


def test_means_of_a_loss_by_hand_and_stacked() -> None:
    values, weight = torch.tensor([1.0, 2.0, 6.0, 10.0, 3.0]), torch.tensor([1.0, 3.0, 0.5, 2.0, 0.0])
    domain = torch.tensor([0, 0, 0, 2, 2])  # nothing of domain 1
    assert mean_loss(values, domain, "domain") == (3 + 6.5) / 2 and mean_loss(values, domain, "sample") == 22 / 5
    means, present = domain_means(values, domain, 3, weight)
    torch.testing.assert_close(means, torch.tensor([(1 + 6 + 3) / 4.5, 0.0, 10.0]))
    assert present.tolist() == [True, False, True]
    torch.testing.assert_close(mean_loss(values, domain, "domain", weight), torch.tensor((10 / 4.5 + 10) / 2))
    torch.testing.assert_close(mean_loss(values, domain, "sample", weight), torch.tensor((1 + 6 + 3 + 20) / 6.5))
    assert not domain_means(values, domain, 3, weight * (domain == 0))[1][2]  # weights of 0: no sample
    many, domains = torch.rand(4, 6), torch.tensor([[0, 0, 1, 1, 1, 2]] * 4)
    alone = torch.stack([mean_loss(p, d, "domain") for p, d in zip(many, domains, strict=True)])
    torch.testing.assert_close(vmap(lambda p, d: mean_loss(p, d, "domain"))(many, domains), alone)


def test_erm_is_the_papers_also_with_soft_labels() -> None:
    algorithm, given = ERM(SETUP), random_batch([0, 0, 0, 1, 1])
    losses = algorithm(given.x, given, 0)
    torch.testing.assert_close(losses.total, risks(algorithm, given).mean())
    assert losses.auxiliary == 0 and not losses.first_pass_draws
    by_sample = ERM(Setup(SETUP.task, SETUP.width, 10, 0, loss_average="sample"))
    soft = given._replace(targets=torch.softmax(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), 1))
    by_hand = -(soft.targets * by_sample.head(given.x).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(by_sample(given.x, soft, 0).total, by_hand)


@pytest.mark.parametrize("domain", UNEQUAL)
def test_irm_and_vrex_are_loops_over_domains(domain: list[int]) -> None:
    given, irm, vrex = random_batch(domain), IRM(SETUP), VREx(SETUP)
    for step in (0, 9, 10, 99):
        risk = irm.average(F.cross_entropy(irm.head(given.x), given.y, reduction="none"), given)
        penalty = irm_penalty(irm, given)
        losses, expected = irm(given.x, given, step), risk + (1 if step < 10 else 100) * penalty
        torch.testing.assert_close(losses.logs["penalty"], penalty)
        torch.testing.assert_close(losses.total, expected)
        same_gradients(losses.total, expected, list(irm.head.parameters()))
        of_domains = risks(vrex, given)
        expected = of_domains.mean() + (1 if step < 10 else 10) * of_domains.var(correction=0)
        total = vrex(given.x, given, step).total
        torch.testing.assert_close(total, expected)
        same_gradients(total, expected, list(vrex.head.parameters()))


@pytest.mark.parametrize(
    "method, domain", [(IRM, [0, 1, 2]), (IRM, [1]), (VREx, [1] * 6), (CORAL, [1] * 4), (CORAL, [0, 1, 2, 2])]
)
def test_without_an_estimate_of_its_penalty_it_is_erm(method: type[Algorithm], domain: list[int]) -> None:
    given = random_batch(domain)
    losses = method(SETUP)(given.x, given, 50)
    assert losses.logs["penalty"] == 0 and losses.total == ERM(SETUP)(given.x, given, 50).total


@pytest.mark.parametrize("method", [IRM, VREx])
def test_annealing(method: Any) -> None:
    algorithm = method(SETUP)
    assert algorithm.anneal_steps == 10  # DomainBed's 500 of 5000
    assert [step for step in range(100) if algorithm.resets_optimizer(step)] == [10]
    assert algorithm.first_selectable_step == 11
    assert method(SETUP, anneal_steps=0).first_selectable_step == 1
    for steps in (100, 150):
        message = rf"{method.__name__.lower()}: anneal_steps {steps} leaves no step .*has 100 steps.*lower"
        with pytest.raises(UserError, match=message) as fault:
            method(SETUP, anneal_steps=steps)
        assert "\n" not in str(fault.value)


def test_groupdro_s_recorded_training() -> None:
    recorded = Recorded("groupdro.npz")
    assert torch.equal(recorded["q_init"], torch.ones(DOMAINS))  # normalised from the first step on: as if uniform
    algorithm = GroupDRO(SETUP, eta=float(recorded["eta"]))
    for step, _, losses in recorded.steps(algorithm):
        close(losses.total.detach(), recorded["loss"][step], f"loss of step {step}")
        close(losses.buffers["q"], recorded["q"][step], f"q after step {step}")
    assert step == 3


def test_groupdro_is_a_loop_over_domains() -> None:
    algorithm, q = GroupDRO(SETUP, eta=0.5), [1.0] * DOMAINS
    for step, domain in enumerate(([0, 0, 1, 2, 2, 2], [2, 0, 1, 1, 1, 0], [1, 1, 1, 2, 1, 2])):  # the last without 0
        given = random_batch(domain)
        losses = algorithm(given.x, given, step)
        of_domains = dict(zip(sorted(set(domain)), risks(algorithm, given), strict=True))
        for d, loss in of_domains.items():
            q[d] *= math.exp(0.5 * loss.item())
        q = [value / sum(q) for value in q]
        weighted = sum(q[d] * loss for d, loss in of_domains.items())
        torch.testing.assert_close(losses.total, weighted)
        torch.testing.assert_close(losses.buffers["q"], torch.tensor(q))
        same_gradients(losses.total, weighted, [algorithm.head.weight])  # none through q
        algorithm.q.copy_(losses.buffers["q"])


def test_groupdro_at_its_limits() -> None:
    """η = 0 is ERM; a batch of one domain; a huge loss."""
    given = random_batch([0, 0, 0, 0, 1, 2])
    torch.testing.assert_close(GroupDRO(SETUP, eta=0.0)(given.x, given, 0).total, ERM(SETUP)(given.x, given, 0).total)
    one, algorithm = random_batch([1, 1, 1]), GroupDRO(SETUP, eta=0.1)
    losses = algorithm(one.x, one, 0)
    torch.testing.assert_close(losses.total, losses.buffers["q"][1] * risks(algorithm, one)[0])
    assert losses.buffers["q"][1] > losses.buffers["q"][0] == losses.buffers["q"][2]
    huge = GroupDRO(SETUP, eta=1.0)(1e4 * given.x, given, 0)
    assert huge.total.isfinite() and huge.buffers["q"].isfinite().all()
    torch.testing.assert_close(huge.buffers["q"].sum(), torch.tensor(1.0))


def test_coral_s_recorded_training() -> None:
    recorded = Recorded("coral_train.npz")
    algorithm = CORAL(SETUP, gamma=float(recorded["gamma"]))
    for step, _, losses in recorded.steps(algorithm):
        close(losses.logs["risk"].detach(), recorded["loss"][step], f"risk of step {step}")
        close(losses.logs["penalty"].detach(), recorded["penalty"][step], f"penalty of step {step}")
        torch.testing.assert_close(losses.total, losses.logs["risk"] + algorithm.gamma * losses.logs["penalty"])
    assert step == 2


def pairwise_distance(z: Tensor, domain: Tensor) -> Tensor:
    """Mean over pairs, with every covariance made."""
    groups = [z[domain == d] for d in domain.unique() if (domain == d).sum() > 1]
    distances = [
        (a.mean(0) - b.mean(0)).square().mean() + (a.T.cov() - b.T.cov()).square().mean()
        for a, b in combinations(groups, 2)
    ]
    return torch.stack(distances).mean()


@pytest.mark.parametrize("domain", [[0, 0, 0, 1, 1, 2, 2, 2, 2], [2, 0, 2, 0, 1, 0, 2, 2, 0]])  # 1: one sample only
@pytest.mark.parametrize("width", [5, 300])
def test_coral_with_covariances_written_out(domain: list[int], width: int) -> None:
    of = torch.tensor(domain)
    z = torch.randn(len(domain), width, generator=torch.Generator().manual_seed(0)) + 0.3 * of[:, None]
    z.requires_grad_()
    distance, expected = mean_distance(z, of, 4), pairwise_distance(z, of)
    torch.testing.assert_close(distance, expected)
    torch.testing.assert_close(torch.autograd.grad(distance, z), torch.autograd.grad(expected, z), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("distance", [1e-1, 1e-3])
def test_coral_s_precision_of_near_equal_domains(distance: float) -> None:
    """Covariances are subtracted before they are squared: the error is small beside the distance itself."""
    generator = torch.Generator().manual_seed(0)
    one = torch.relu(torch.randn(32, 512, generator=generator))
    z = torch.cat([one, one + distance * torch.randn(32, 512, generator=generator)]).requires_grad_()
    domain, exact = torch.arange(2).repeat_interleave(32), z.detach().double().requires_grad_()
    found, expected = mean_distance(z, domain, 2), pairwise_distance(exact, domain)
    assert found.dtype == torch.float32 and abs(found.double() - expected) < 1e-6 * expected
    gradients = torch.autograd.grad(found, z)[0].double(), torch.autograd.grad(expected, exact)[0]
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[1].norm()


def test_coral_of_equal_domains_and_of_features_that_are_not_finite() -> None:
    z = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).repeat(3, 1).requires_grad_()
    domain = torch.arange(3).repeat_interleave(16)
    distance = mean_distance(z, domain, 3)
    assert distance < 1e-25 and torch.autograd.grad(distance, z)[0].abs().max() < 1e-12
    assert mean_distance(z.detach().index_fill(1, torch.tensor([3]), torch.inf), domain, 3).isnan()


WEIGHT = torch.tensor([0.5, 2.0, 1.25, 0.0])  # the last class is not in the data
LATE = 90  # beyond every warm-up


def weighted(weight: Tensor | None = WEIGHT, **more: Any) -> Setup:
    text = F.normalize(torch.randn(4, 16, generator=torch.Generator().manual_seed(9)))
    more = {"text_weight": 10 * text, **more}
    return Setup(Task(tuple("abcd"), tuple("xyz")), 16, steps=100, seed=0, class_weight=weight, **more)


def twelve() -> Batch:
    """Four samples of each of three domains, none of class 3."""
    y = [0, 1, 2, 0, 1, 1, 2, 0, 2, 2, 0, 1]
    z = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
    return batch_of(z, y, torch.arange(3).repeat_interleave(4))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_weighs_its_class_loss_and_nothing_else(name: str) -> None:
    """Heads of a bank have their own weights."""
    weights = {"plain": None, "ones": torch.ones(4), "weighted": WEIGHT, "scaled": 8 * WEIGHT}
    algorithms = {key: METHODS[name](weighted(weight)) for key, weight in weights.items()}
    for step in (0, LATE):
        given = mixed(algorithms["plain"], twelve(), step)
        losses = {key: algorithm(given.x, given, step) for key, algorithm in algorithms.items()}
        torch.testing.assert_close(losses["ones"].total, losses["plain"].total)
        torch.testing.assert_close(losses["scaled"].total, losses["weighted"].total)
        assert abs(losses["weighted"].total - losses["plain"].total) > 1e-3
        assert losses["weighted"].auxiliary == losses["plain"].auxiliary

        def total(weight: Tensor, given: Batch = given, step: int = step) -> Tensor:
            state = {"class_weight": weight}
            return torch.func.functional_call(algorithms["ones"], state, (given.x, given, step)).total

        alone = torch.stack([losses["weighted"].total, losses["ones"].total])
        torch.testing.assert_close(vmap(total)(torch.stack([WEIGHT, torch.ones(4)])), alone)


@pytest.mark.parametrize("loss_average", ["sample", "domain"])
def test_soft_labels_weigh_every_class_by_its_own(loss_average: LossAverage) -> None:
    """Σ w_c t_c (−log p_c) / Σ w_c t_c, over the batch or in every domain; the sums are torch's weighted ones."""
    algorithm = Mixup(weighted(loss_average=loss_average), alpha=1.0)
    given = mixed(algorithm, twelve(), 5)
    assert given.targets is not None and not torch.equal(given.targets, given.targets.round())
    logits, parts = algorithm.head(given.x), [given.domain == d for d in range(3)]
    parts = parts if loss_average == "domain" else [torch.ones(12, dtype=torch.bool)]
    sums = [F.cross_entropy(logits[own], given.targets[own], weight=WEIGHT, reduction="sum") for own in parts]
    by_hand = [total / (WEIGHT * given.targets[own]).sum() for total, own in zip(sums, parts, strict=True)]
    torch.testing.assert_close(algorithm(given.x, given, 5).total, torch.stack(by_hand).mean())


@pytest.mark.parametrize("loss_average", ["sample", "domain"])
def test_one_hot_labels_are_labels(loss_average: LossAverage) -> None:
    """Samples of a class that weighs nothing included."""
    algorithm, given = ERM(weighted(loss_average=loss_average)), twelve()
    given = given._replace(y=given.y.index_fill(0, torch.tensor([2]), 3), x=given.x.requires_grad_())
    soft = given._replace(targets=F.one_hot(given.y, 4).float())
    totals = [algorithm(one.x, one, 5).total for one in (given, soft)]
    gradients = [torch.autograd.grad(total, given.x)[0] for total in totals]
    torch.testing.assert_close(totals[1], totals[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert not gradients[1][2].any()


def test_weighted_risks_are_torchs() -> None:
    given, sample = twelve(), ERM(weighted(loss_average="sample"))
    theirs = F.cross_entropy(sample.head(given.x), given.y, weight=WEIGHT)
    torch.testing.assert_close(sample(given.x, given, 0).total, theirs)
    vrex, groupdro, coral = VREx(weighted()), GroupDRO(weighted(), eta=0.5), CORAL(weighted(), gamma=2.0)
    of_domains, irm = risks(vrex, given, WEIGHT), IRM(weighted())
    torch.testing.assert_close(ERM(weighted())(given.x, given, 0).total, of_domains.mean())
    torch.testing.assert_close(vrex(given.x, given, LATE).total, of_domains.mean() + 10 * of_domains.var(correction=0))
    torch.testing.assert_close(groupdro(given.x, given, 0).total, (0.5 * of_domains).softmax(0).detach() @ of_domains)
    distance = mean_distance(given.x, given.domain, 3)
    torch.testing.assert_close(coral(given.x, given, 0).total, of_domains.mean() + 2 * distance)
    torch.testing.assert_close(irm(given.x, given, LATE).logs["penalty"], irm_penalty(irm, given, WEIGHT))


def test_the_domain_head_of_xdomainmix_is_not_weighted() -> None:
    given = twelve()
    for augmented in (False, True):
        plain, own = (
            XDomainMix(weighted(weight), domain_head_augmented=augmented, p_discard=0.0) for weight in (None, WEIGHT)
        )
        one, other = (algorithm(given.x, given, LATE) for algorithm in (plain, own))
        assert torch.equal(one.auxiliary, other.auxiliary) and not torch.equal(one.total, other.total)


@pytest.mark.parametrize("loss_average", ["sample", "domain"])
def test_solvers_weigh_images_by_class_and_average(loss_average: LossAverage) -> None:
    given = twelve()
    of_class = WEIGHT[given.y].double()
    parts = [given.domain == d for d in range(3)] if loss_average == "domain" else [given.domain >= 0]
    expected = sum(of_class * part / (of_class * part).sum() / len(parts) for part in parts)
    torch.testing.assert_close(LinearProbe(weighted(loss_average=loss_average)).image_weight(given), expected)
