"""Augmented features: those that training makes, by each kind of method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop_models import SmallCNN
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.dsu import DSU
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixstyle import MixStyle
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.analysis.augmented import QUANTILES, augment_in_encoder, halves, mix_features, xdomainmix_features
from xdm_ft.core import Task
from xdm_ft.heads.cosine import Cosine

TASK = Task(tuple("abc"), tuple("xyz"))
SETUP = Setup(TASK, width=16, steps=100, seed=3)


def features(n: int, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(n)
    y, domain = torch.randint(3, (n,), generator=source), torch.randint(3, (n,), generator=source)
    z = torch.randn(n, width, generator=source).abs()
    z[:, 0] += y
    z[:, 1] += 2 * domain
    return z, y, domain


def test_halves_are_disjoint_and_random_and_the_levels_are_the_papers() -> None:
    first, second = halves(11, 0)
    assert len(first) == len(second) == 5 and not set(first.tolist()) & set(second.tolist())
    assert sorted(first.tolist()) != list(range(5)) and not torch.equal(first, halves(11, 1)[0])
    assert QUANTILES == (0.9, 0.8, 0.7, 0.6, 0.5)


@pytest.mark.parametrize("head", [None, Cosine])
@pytest.mark.parametrize("quantile", QUANTILES)
def test_masks_have_the_level_that_was_asked_for(quantile: float, head: type | None, monkeypatch) -> None:
    setup = Setup(TASK, 16, 100, 3, head=head) if head else SETUP
    algorithm = XDomainMix(setup, warmup_steps=7, quantile_steps=4)
    made, own = [], XDomainMix.augment
    monkeypatch.setattr(XDomainMix, "augment", lambda *arguments: made.append(own(*arguments)) or made[-1])
    z, y, domain = features(75)
    found = xdomainmix_features(algorithm, z, y, domain, quantile)
    assert [len(batch.z) for batch in made] == [32, 32, 11]
    assert torch.equal(found, torch.cat([batch.z for batch in made])) and not found.requires_grad
    specific = torch.cat([batch.masks["domain_mask"] for batch in made]).sum(1)
    assert (specific == 16 - 1 - int(quantile * 15)).all()  # the scores above x_(⌊q·15⌋)
    assert not torch.equal(made[0].lam, made[1].lam)  # every batch has its own draws


def test_discarding_and_mixing_are_those_of_the_method() -> None:
    z, y, domain = features(640)
    off = {"p_discard": 0.0, "mix_class_specific": False, "mix_class_generic": False}

    def augmented(**changes: Any) -> Tensor:
        return xdomainmix_features(XDomainMix(SETUP, **off | changes), z, y, domain, 0.5)

    torch.testing.assert_close(augmented(), z)
    discarded = augmented(p_discard=1.0)
    assert ((discarded == z) | (discarded == 0)).all() and (discarded == 0).any()
    of_batches = augmented(p_discard=0.5, discard_per="batch").view(20, 32, 16)
    assert 3 < (of_batches == z.view(20, 32, 16)).all(2).all(1).sum() < 17, "each batch has its own draw"


@pytest.mark.parametrize(
    ("method", "setting"),
    [(LISA, {}), (LISA, {"partners": "all"}), (Mixup, {"alpha": 1.0}), (Mixup, {"partner_domain": "other"})],
)
def test_features_that_are_mixed_lie_between_two(method: type[Algorithm], setting: dict[str, str]) -> None:
    # features of class c and domain d: (c, d, 1); what is mixed is known from them
    _, y, domain = features(100)
    z = torch.stack([y.float(), domain.float(), torch.ones(100)], 1)
    found = mix_features(method(Setup(TASK, 3, 100, 0), **setting), z, y, domain)
    torch.testing.assert_close(found[:, 2], z[:, 2])
    assert (found[:, 1] != z[:, 1]).float().mean() > 0.3
    if method is LISA:  # the class stays, the domain changes
        torch.testing.assert_close(found[:, 0], z[:, 0])


def test_lisa_takes_partners_from_all_where_it_is_told() -> None:
    """In batches of one sample the batch holds no partner."""
    z, y, domain = features(40)
    alone = mix_features(LISA(SETUP), z, y, domain, batch_size=1)
    torch.testing.assert_close(alone, z)
    assert (mix_features(LISA(SETUP, partners="all"), z, y, domain, batch_size=1) != z).any(1).float().mean() > 0.9


class Staged(SmallCNN):
    stage_names = ("layers.1", "layers.4")


def batches(n: int = 64) -> list[tuple[Tensor, Tensor, Tensor]]:
    _, y, domain = features(n)
    images = torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * (1 + domain.view(-1, 1, 1, 1))
    return list(zip(images.split(32), y.split(32), domain.split(32), strict=True))


@pytest.mark.parametrize("algorithm", [ERM(SETUP), MixStyle(SETUP, p=0.0)], ids=["erm", "a stage that never draws"])
def test_without_augmentation_features_are_those_of_the_encoder(algorithm: Algorithm) -> None:
    encoder = Staged(dropout=0.5)
    plain = torch.cat([encoder(images) for images, _, _ in batches()])
    torch.testing.assert_close(augment_in_encoder(algorithm, encoder, batches()), plain.detach())


@pytest.mark.parametrize(
    ("method", "settings"), [(MixStyle, {"p": 1.0}), (DSU, {"p": 1.0}), (LISA, {}), (Mixup, {"alpha": 1.0})]
)
def test_augmentation_changes_features_and_leaves_the_encoder_as_it_was(
    method: type[Algorithm], settings: dict[str, float]
) -> None:
    encoder = Staged()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    plain = torch.cat([encoder(images) for images, _, _ in batches()]).detach()
    found = augment_in_encoder(method(SETUP, **settings), encoder, batches())
    assert found.shape == plain.shape and not found.requires_grad
    assert (found != plain).any(1).float().mean() > 0.5
    assert torch.equal(torch.cat([encoder(images) for images, _, _ in batches()]), plain)
    assert not any(module._forward_hooks for module in encoder.modules())  # each would call a method's module again
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert torch.equal(found, augment_in_encoder(method(SETUP, **settings), encoder, batches()))
