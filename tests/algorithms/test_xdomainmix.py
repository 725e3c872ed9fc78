"""XDomainMix: its loss against the pure functions, its settings and draws."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.xdomainmix import Augmented, XDomainMix, mixed_domains
from xdm_ft.core import Batch, Task
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream
from xdm_ft.xdomainmix import Partners, autograd_scores, decompose, mix, specific_mask

WIDTH = 40
TASK = Task(tuple("abcd"), tuple("xyz"))
HEADS = {"linear": Linear, "cosine": partial(Cosine, scale=5.0), "mlp": partial(MLP, hidden_width=9, activation="relu")}


def setup(steps: int = 100, seed: int = 0, **more) -> Setup:
    return Setup(TASK, WIDTH, steps, seed, **more)


def batch(seed: int = 0, size: int = 60) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    z = torch.relu(torch.randn(size, WIDTH, generator=generator))
    y, domain = (torch.randint(0, high, (size,), generator=generator) for high in (4, 3))
    return Batch(z, y, domain, torch.arange(size), torch.randperm(1000, generator=generator)[:size])


def drawn(algorithm: XDomainMix, given: Batch, step: int) -> Augmented:
    """Its partners, λ and discards at any step, which do not depend on the masks."""
    mask = torch.zeros(given.x.shape, dtype=torch.bool)
    return algorithm.augment(given.x, given, step, {"class_mask": mask, "domain_mask": mask})


def plain_parts(algorithm: XDomainMix, given: Batch, quantile: float):
    """Straight from the paper: scores by autograd, four parts."""
    class_mask = specific_mask(autograd_scores(given.x, algorithm.head, given.y), 0.5)
    domain_mask = specific_mask(autograd_scores(given.x, algorithm.domain_head, given.domain), quantile)
    return decompose(given.x, class_mask, domain_mask)


@pytest.mark.parametrize("head", HEADS)
def test_loss_is_that_of_the_pure_functions(head: str) -> None:
    """Equation (8) value and gradients, written out with scores by autograd, over the cycle of τ_d."""
    algorithm, given = XDomainMix(setup(head=HEADS[head]), warmup_steps=57, quantile_steps=2), batch()
    parameters = list(algorithm.head.parameters())
    for step, quantile in ((57, 0.9), (59, 0.8), (61, 0.7), (63, 0.6), (66, 0.5), (67, 0.9)):
        z, plain = given.x.clone().requires_grad_(), given.x.clone().requires_grad_()
        losses = algorithm(z, given._replace(x=z), step)
        draws = drawn(algorithm, given, step)
        mixed = mix(plain_parts(algorithm, given._replace(x=plain), quantile), draws.partners, draws.lam, draws.keep)
        ell = [F.cross_entropy(algorithm.head(features), given.y, reduction="none") for features in (plain, mixed)]
        expected = algorithm.average((ell[0] + ell[1]) / 2, given)
        torch.testing.assert_close(losses.total, expected, atol=1e-6, rtol=1e-6)
        gradients = torch.autograd.grad(losses.total, [z, *parameters])
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, [plain, *parameters]), atol=1e-6, rtol=1e-5)
        by_domain = F.cross_entropy(algorithm.domain_head(given.x), given.domain, reduction="none")
        torch.testing.assert_close(losses.auxiliary, algorithm.average(by_domain, given))


@pytest.mark.parametrize("head", HEADS)
def test_the_domain_head_is_of_the_class_heads_kind(head: str) -> None:
    """The paper's d "has an identical architecture as the class classifier c", for domains. It starts at random."""
    text = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    init = {"head_init": "zero_shot", "text_weight": text} if head != "mlp" else {}
    algorithm = XDomainMix(setup(head=HEADS[head], seed=5, **init))
    twin = HEADS[head](WIDTH, 3, 5, Stream.DOMAIN_INIT)
    assert type(algorithm.domain_head) is type(algorithm.head) is type(twin)
    assert algorithm.domain_head(batch().x).shape == (60, 3)
    state = algorithm.domain_head.state_dict()
    assert state.keys() == twin.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in twin.state_dict().items())
    linear = XDomainMix(setup(head=HEADS[head], seed=5), domain_head="linear")
    assert type(linear.head) is type(twin) and type(linear.domain_head) is Linear
    assert torch.equal(linear.domain_head.weight, Linear(WIDTH, 3, 5, Stream.DOMAIN_INIT).weight)


def test_warm_up_is_erm_with_a_domain_head_for_its_count_of_steps() -> None:
    given, algorithm, erm = batch(), XDomainMix(setup()), ERM(setup())
    losses = algorithm(given.x, given, 59)
    assert torch.equal(losses.total, erm(given.x, given, 59).total)
    assert losses.auxiliary > 0 and not losses.logs and algorithm(given.x, given, 60).logs
    long, short = XDomainMix(setup(5000)), XDomainMix(setup(1))
    assert (long.warmup_steps, long.quantile_steps) == (3000, 100)  # the paper's, on DomainBed
    assert (long.first_selectable_step, long.mixed_steps(5000), long.mixed_steps(10)) == (3001, 2000, 0)
    assert (short.warmup_steps, short.quantile_steps) == (0, 1)
    for steps in (100, 4000):
        message = f"warmup_steps {steps} leaves no step to mix in, .*has 100 steps.*lower"
        with pytest.raises(UserError, match=message) as fault:
            XDomainMix(setup(), warmup_steps=steps)
        assert "\n" not in str(fault.value)


def test_draws_depend_on_the_sample_and_not_on_its_place() -> None:
    algorithm, given = XDomainMix(setup()), batch()
    draws = drawn(algorithm, given, 70)
    order = torch.randperm(len(given.y), generator=torch.Generator().manual_seed(1))
    moved = drawn(algorithm, Batch(*(field[order] for field in given[:5])), 70)
    assert torch.equal(moved.keep, draws.keep[order])
    both = draws.partners.has_same & draws.partners.has_other
    assert both.any() and torch.equal(moved.lam, draws.lam[order])
    assert not torch.equal(drawn(algorithm, given, 71).lam, draws.lam)
    assert not torch.equal(drawn(XDomainMix(setup(seed=1)), given, 70).lam, draws.lam)


def test_lambda_is_uniform_and_independent() -> None:
    lam = torch.cat([drawn(XDomainMix(setup()), batch(seed), 60 + seed).lam for seed in range(40)])
    lam = lam[(lam < 1).all(1)]
    assert len(lam) > 2000
    torch.testing.assert_close(lam.mean(0), torch.tensor([0.5, 0.5]), atol=0.02, rtol=0)
    assert torch.corrcoef(lam.T)[0, 1].abs() < 0.05
    counts = torch.histc(lam, 10, 0, 1)
    assert ((counts - len(lam) / 5).abs() < 5 * (len(lam) / 5) ** 0.5).all()


def test_discard_per_sample_and_per_batch() -> None:
    for p in (0.0, 0.2, 1.0):
        kept = torch.cat([drawn(XDomainMix(setup(), p_discard=p), batch(seed), seed).keep for seed in range(15)])
        share = 1 - kept.float().mean()
        assert share == p if p in (0, 1) else abs(share - p) < 0.04
    algorithm = XDomainMix(setup(), discard_per="batch")
    kept = torch.stack([drawn(algorithm, batch(step), step).keep for step in range(120)])
    assert (kept.all(1) | ~kept.any(1)).all()
    assert abs((1 - kept.float().mean()) - 0.2) < 0.11


def test_switches_of_the_ablation_and_choice_of_x_j() -> None:
    given = batch()
    full = drawn(XDomainMix(setup()), given, 60)
    for place, key in enumerate(("mix_class_specific", "mix_class_generic")):
        off = drawn(XDomainMix(setup(), **{key: False}), given, 60)
        assert (off.lam[:, place] == 1).all()
        assert torch.equal(off.lam[:, 1 - place], full.lam[:, 1 - place])
        assert torch.equal(off.keep, full.keep)
    everything_off = XDomainMix(setup(), mix_class_specific=False, mix_class_generic=False, p_discard=0.0)
    torch.testing.assert_close(everything_off(given.x, given, 60).total, ERM(setup())(given.x, given, 60).total)
    partners = drawn(XDomainMix(setup(), other_partner="other_class_same_domain"), given, 60).partners
    assert partners.has_other.any()
    assert (given.domain[partners.other] == given.domain)[partners.has_other].all()
    assert (given.y[partners.other] != given.y)[partners.has_other].all()


def test_partners_that_are_missing_are_counted() -> None:
    given = batch()
    only = given._replace(domain=torch.where(torch.arange(60) < 45, 0, 1), y=torch.where(torch.arange(60) < 15, 0, 1))
    logs = XDomainMix(setup())(only.x, only, 60).logs
    assert float(logs["without_same_partner"]) == pytest.approx(0.25)  # the first 15 have their class to themselves
    # the middle 30: all of class 0 is in their domain
    assert float(logs["without_other_partner"]) == pytest.approx(0.5)
    one_domain = given._replace(domain=torch.zeros(60, dtype=torch.int64))
    losses = XDomainMix(setup(), p_discard=0.0)(one_domain.x, one_domain, 60)
    assert losses.logs == {"without_same_partner": 1.0, "without_other_partner": 1.0}
    torch.testing.assert_close(losses.total, ERM(setup())(one_domain.x, one_domain, 60).total)


def test_soft_domain_labels() -> None:
    yes, no = torch.tensor([True, True, True]), torch.tensor([True, False, True])
    partners = Partners(torch.tensor([1, 0, 1]), torch.tensor([2, 1, 0]), yes, no)
    lam = torch.tensor([[0.5, 0.25], [0.4, 1.0], [1.0, 0.0]])
    given = batch(size=3)._replace(domain=torch.tensor([0, 1, 2]))
    labels = mixed_domains(given, Augmented(given.x, partners, lam, yes, {}), 3)
    torch.testing.assert_close(labels, torch.tensor([[0.375, 0.25, 0.375], [0.3, 0.7, 0.0], [0.5, 0.0, 0.5]]))
    torch.testing.assert_close(labels.sum(1), torch.ones(3))


def test_domain_head_learns_from_augmented_features() -> None:
    """BCE on z, and on z̃ with its soft label where Z_c,d was not discarded; no gradient to anything but d."""
    algorithm, given = XDomainMix(setup(), domain_head_augmented=True), batch()
    draws = drawn(algorithm, given, 60)
    mixed = mix(plain_parts(algorithm, given, 0.9), draws.partners, draws.lam, draws.keep)

    def bce(features: Tensor, labels: Tensor) -> Tensor:
        v = algorithm.domain_head(features).sigmoid()
        return -(labels * v.log() + (1 - labels) * (1 - v).log()).mean(1)

    on_z = bce(given.x, F.one_hot(given.domain, 3).float())
    on_mixed = bce(mixed, mixed_domains(given, draws, 3))
    assert draws.keep.any() and not draws.keep.all()
    expected = algorithm.average(torch.where(draws.keep, (on_z + on_mixed) / 2, on_z), given)
    losses = algorithm(given.x, given, 60)
    torch.testing.assert_close(losses.auxiliary, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(losses.total, XDomainMix(setup())(given.x, given, 60).total)
    warm = algorithm(given.x, given, 0).auxiliary
    torch.testing.assert_close(warm, algorithm.average(on_z, given), atol=1e-6, rtol=1e-5)
    losses.auxiliary.backward()
    reached = {key for key, p in algorithm.named_parameters() if p.grad is not None}
    assert reached == {"domain_head.weight", "domain_head.bias"}
