"""The compiled passes against the plain functions: masks, partners, λ and discard bit for bit, z̃ and losses too."""

from __future__ import annotations

import shutil
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.tensors import Batch, Task
from xdm_ft.xdomainmix import Partners, decompose, linear_scores, mix, one_pass, selection, specific_mask
from xdm_ft.xdomainmix.kernel import kernel
from xdm_ft.xdomainmix.partners import OtherPartner

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="there is no C compiler"
)
TASK = Task(tuple("abcd"), tuple("xyz"))
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-42, -1e-42, 3e38, -3e38]


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (selection, one_pass):
        monkeypatch.setattr(module, "kernel", lambda: None)


def batch_of(size: int = 60, width: int = 40, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    z = torch.relu(torch.randn(size, width, generator=generator))
    y, domain = (torch.randint(0, high, (size,), generator=generator) for high in (4, 3))
    return Batch(z, y, domain, torch.arange(size), torch.randperm(1000, generator=generator)[:size])


def test_it_is_there() -> None:
    assert kernel() is not None
    assert one_pass.available(torch.zeros(2, 3))
    assert not one_pass.available(torch.zeros(2, 3, dtype=torch.float64))
    assert not one_pass.available(torch.zeros(2, 3, 1, 1))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_masks_of_any_scores(data: st.DataObject) -> None:
    """Ties, zeros of both signs, infinities, subnormals; and a NaN makes its row generic, whatever the others are."""
    size, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    value = st.one_of(st.sampled_from(SPECIAL), st.integers(-3, 3).map(float), st.floats(width=32))
    cells = data.draw(st.lists(value, min_size=rows * size, max_size=rows * size))
    z, one = torch.tensor(cells, dtype=torch.float32).view(rows, size), torch.ones(1, size)
    quantile = data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    target = torch.zeros(rows, dtype=torch.int64)
    ordered = z.sort(-1).values  # NaN last
    rank = int(quantile * 10) * (size - 1) // 10
    expected = (z > ordered[:, rank, None]) & ~z.isnan().any(1, keepdim=True)
    found, again = one_pass.linear_masks(z, one, one, target, target, quantile, quantile)
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)
    assert torch.equal(specific_mask(z, quantile), expected)


@pytest.mark.parametrize("width", [1, 2, 31, 512, 1280])
def test_masks_of_both_heads(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    z = torch.randn(5, 33, width, generator=generator)
    z[:2].relu_()
    heads = torch.randn(5, 4, width, generator=generator), torch.randn(5, 3, width, generator=generator)
    targets = torch.randint(0, 4, (5, 33), generator=generator), torch.randint(0, 3, (5, 33), generator=generator)

    def masks(z: Tensor, weight: Tensor, other_weight: Tensor, y: Tensor, domain: Tensor) -> tuple[Tensor, Tensor]:
        return one_pass.linear_masks(z, weight, other_weight, y, domain, 0.5, 0.9)

    stacked = torch.vmap(masks)(z, *heads, *targets)
    for h in range(5):
        alone = masks(z[h], heads[0][h], heads[1][h], targets[0][h], targets[1][h])
        for of_head, (weight, target, quantile) in enumerate(
            [(heads[0][h], targets[0][h], 0.5), (heads[1][h], targets[1][h], 0.9)]
        ):
            scores = linear_scores(z[h], weight, target)
            rank = int(quantile * 10) * (width - 1) // 10
            expected = scores > scores.sort(-1).values[:, rank, None]
            assert torch.equal(alone[of_head], expected)
            assert torch.equal(stacked[of_head][h], expected)


def test_a_class_or_place_out_of_range_is_refused() -> None:
    z, weight, y = torch.randn(3, 4), torch.randn(2, 4), torch.tensor([0, 2, 1])
    with pytest.raises(IndexError, match="out of range"):
        one_pass.linear_masks(z, weight, weight, y, y, 0.5, 0.5)
    mask, lam, keep = torch.ones(3, 4, dtype=torch.bool), torch.ones(3, 2), torch.ones(3, dtype=torch.bool)
    for places in ((torch.tensor([0, 1, 3]), y), (y, torch.tensor([0, -1, 0]))):
        with pytest.raises(IndexError, match="out of range"):
            one_pass.mixed(z, mask, mask, *places, lam, keep)


@pytest.mark.parametrize("other", get_args(OtherPartner))
@pytest.mark.parametrize("discard_per", ["sample", "batch"])
@pytest.mark.parametrize("mixes", [(True, True), (False, True), (True, False)])
def test_the_same_draws(
    other: OtherPartner, discard_per: str, mixes: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = XDomainMix(
        Setup(TASK, 40, 100, seed=7), warmup_steps=0, other_partner=other, discard_per=discard_per, p_discard=0.4,
        mix_class_specific=mixes[0], mix_class_generic=mixes[1],
    )  # fmt: skip
    batches = [batch_of(size, seed=size) for size in (1, 2, 3, 31, 32, 33, 64, 100)]
    cases = [(batch, step) for batch in batches for step in (0, 5, 2**40)]
    found = [algorithm.draws(*case) for case in cases]
    monkeypatch.setattr(one_pass, "kernel", lambda: None)
    expected = [algorithm.draws(*case) for case in cases]
    for one, two in zip(found, expected, strict=True):
        for a, b in zip((*one.partners, one.lam, one.keep), (*two.partners, two.lam, two.keep), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_mixed_features_and_their_gradient() -> None:
    batch, generator = batch_of(50, 37), torch.Generator().manual_seed(1)
    masks = [torch.rand(50, 37, generator=generator) > 0.5 for _ in range(2)]
    same, other = (torch.randint(0, 50, (50,), generator=generator) for _ in range(2))
    lam, keep = torch.rand(50, 2, generator=generator), torch.rand(50, generator=generator) > 0.3
    everyone = torch.ones_like(keep)
    one, two = (batch.x.clone().requires_grad_() for _ in range(2))
    found = one_pass.mixed(one, *masks, same, other, lam, keep)
    expected = mix(decompose(two, *masks), Partners(same, other, everyone, everyone), lam, keep)
    assert torch.equal(found, expected)
    upstream = torch.randn(50, 37, generator=generator)
    (a,), (b,) = torch.autograd.grad(found, one, upstream), torch.autograd.grad(expected, two, upstream)
    torch.testing.assert_close(a, b)
    stacked = torch.vmap(one_pass.mixed)(*(t.expand(3, *t.shape) for t in (one, *masks, same, other, lam, keep)))
    assert torch.equal(stacked[2], expected)
    (c,) = torch.autograd.grad(stacked.sum(0), one, upstream)
    torch.testing.assert_close(c, 3 * b)


def test_a_nan_does_not_spread() -> None:
    batch = batch_of(20, 30)
    batch.x[3, 5] = torch.nan
    algorithm = XDomainMix(Setup(TASK, 30, 100, seed=0), warmup_steps=0)
    masks, draws = algorithm.masks(batch.x, batch, 5), algorithm.draws(batch, 5)
    partners = draws.partners
    z = one_pass.mixed(batch.x, *masks.values(), partners.same, partners.other, draws.lam, draws.keep)
    assert z.isnan().any(1).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("augmented", [False, True])
def test_the_loss_and_its_gradients_without_a_compiler(augmented: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = XDomainMix(Setup(TASK, 40, 100, seed=3), warmup_steps=0, domain_head_augmented=augmented)
    results = []
    for _ in range(2):
        z = batch_of().x.requires_grad_()
        losses = algorithm(z, batch_of()._replace(x=z), 13)
        gradients = torch.autograd.grad(losses.total + losses.auxiliary, [z, *algorithm.parameters()])
        results.append((losses, gradients))
        for module in (selection, one_pass):
            monkeypatch.setattr(module, "kernel", lambda: None)
    (one, _), (two, _) = results
    for name in ("class_mask", "domain_mask"):
        assert torch.equal(one.held[name], two.held[name])
    assert one.logs.keys() == two.logs.keys()
    values = [
        (losses.total, losses.auxiliary, *losses.logs.values(), *of_losses) for losses, of_losses in results
    ]  # fmt: skip
    for a, b in zip(*values, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_any_number_of_threads_gives_the_same() -> None:
    z, weight = torch.randn(4, 300, 700), torch.randn(4, 5, 700)
    y = torch.randint(0, 5, (4, 300))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.vmap(lambda z, w, y: one_pass.linear_masks(z, w, w, y, y, 0.5, 0.8))(z, weight, y))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for masks in found[1:] for a, b in zip(masks, found[0], strict=True))


def test_the_plain_path_is_taken_without_a_compiler(without_compiler: None) -> None:
    assert not one_pass.available(torch.zeros(2, 3))
    scores = torch.randn(selection.SEARCH_ROWS, 50)
    assert torch.equal(specific_mask(scores, 0.5), scores > scores.sort(-1).values[:, 24, None])
