"""The kernels against the plain functions, bit for bit, and that they are what runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher
from test_masks import SCORES
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Batch, Task
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.xdomainmix import Partners, _numba, decompose, draw_partners, linear_scores, mix
from xdm_ft.xdomainmix.masks import exceeds_by_sorting
from xdm_ft.xdomainmix.mixing import mix_masked, select_and_mix

TRITON = """
import torch
from test_masks import SCORES, SIZE
from xdm_ft.xdomainmix import _triton
from xdm_ft.xdomainmix.masks import exceeds_by_sorting

for kind, scores in SCORES.items():
    for ranks in (torch.arange(8) * 30, torch.tensor([0, SIZE - 1]))[: 1 + (kind == "half zeros")]:
        assert torch.equal(_triton.exceeds(scores[:8], ranks), exceeds_by_sorting(scores[:8], ranks)), kind
broken, ranks = SCORES["half zeros"][:8].clone(), torch.tensor([100])
broken[5, 5] = torch.nan
broken[6, 6] = -torch.nan
assert torch.equal(_triton.exceeds(broken, ranks), exceeds_by_sorting(broken, ranks))
assert _triton.exceeds(broken, ranks).any(1).tolist() == [True] * 5 + [False] * 2 + [True]

from triton.runtime.cache import FileCacheManager

cache = FileCacheManager("kernel")
cache.put("compiled", "file")
print(cache.cache_dir)
"""


def plain(z: Tensor, choices: tuple[Tensor, ...], selection: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`select_and_mix` by the functions of the equations."""
    by_class, by_domain = (linear_scores(z, *selection[first : first + 2]) for first in (0, 3))
    masks = (exceeds_by_sorting(by_class, selection[2]), exceeds_by_sorting(by_domain, selection[5]))
    same, other, lam, keep = choices
    everyone = torch.ones(len(z), dtype=torch.bool)
    return mix(decompose(z, *masks), Partners(same, other, everyone, everyone), lam, keep), *masks


def problem(seed: int, batch: int, width: int, special: float = 0.3) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Features and slopes, of which the share `special` are zeros of both signs, ties, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def values(rows: int) -> Tensor:
        odd = torch.tensor([0.0, -0.0, 0.0, 1.0, 1.0, -2.0, 1e-40, torch.inf, torch.nan])
        odd = odd[torch.randint(len(odd), (rows, width), generator=generator)]
        rare = torch.rand(rows, width, generator=generator) < special * torch.rand(rows, 1, generator=generator)
        return torch.where(rare, odd, torch.randn(rows, width, generator=generator))

    y, domain = (torch.randint(0, high, (batch,), generator=generator) for high in (3, 2))
    draws = torch.rand(5, batch, generator=generator)
    partners = draw_partners(y, domain, draws[:2].T)  # in a small batch many have none
    lam = torch.where(torch.stack((partners.has_same, partners.has_other), 1), draws[2:4].T, 1.0)
    ranks = torch.randint(0, width, (2, 1), generator=generator)
    choices = [partners.same, partners.other, lam, draws[4] > 0.3]
    return values(batch), choices, [values(3), y, ranks[0], values(2), domain, ranks[1]]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of the signs of zeros; all NaNs are alike."""
    if one.dtype == torch.bool:
        return torch.equal(one, other)
    bits = [torch.where(t.isnan(), torch.nan, t).contiguous().view(torch.int32) for t in (one, other)]
    return torch.equal(*bits)


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 12), st.integers(1, 40), st.sampled_from([0, 0.02, 1]))
def test_one_head_and_stacked_heads_are_those_of_the_equations(
    seed: int, heads: int, batch: int, width: int, special: float
) -> None:
    """Heads differ in their ranks; both with masks to find and with given masks."""
    of_heads = [problem(seed + head, batch, width, special) for head in range(heads)]
    expected = [plain(*of_head) for of_head in of_heads]
    for (z, choices, selection), (mixed, *masks) in zip(of_heads, expected, strict=True):
        found = select_and_mix(z, choices, selection)
        assert all(same_bits(*pair) for pair in zip(found, (mixed, *masks), strict=True))
        assert same_bits(mix_masked(z, choices, masks), mixed)
    z, choices, selection = (
        torch.stack(first) if isinstance(first[0], Tensor) else [torch.stack(each) for each in zip(*first, strict=True)]
        for first in zip(*of_heads, strict=True)
    )
    stacked = [torch.stack(each) for each in zip(*expected, strict=True)]
    found = torch.func.vmap(select_and_mix)(z, choices, selection)
    assert all(same_bits(*pair) for pair in zip(found, stacked, strict=True))
    assert same_bits(torch.func.vmap(mix_masked)(z, choices, stacked[1:]), stacked[0])


def test_tensors_that_heads_share() -> None:
    z, choices, selection = problem(0, 9, 20)
    expected = plain(z, choices, selection)[0]
    dims = (None, None, [None, None, 0, None, None, None])
    ranks = torch.stack([selection[2], (selection[2] + 7) % 20])
    mixed = torch.func.vmap(select_and_mix, dims)(z, choices, [*selection[:2], ranks, *selection[3:]])[0]
    assert same_bits(mixed[0], expected)
    assert same_bits(mixed[1], plain(z, choices, [*selection[:2], ranks[1], *selection[3:]])[0])


def test_gradients() -> None:
    """Of one head and of stacked heads; several samples have the same partner."""
    z, choices, selection = problem(1, 40, 30, special=0)
    assert len(choices[0].unique()) < 35
    upstream = torch.randn(2, 40, 30)
    one, stacked = z.clone().requires_grad_(), torch.stack([z, 2 * z]).requires_grad_()
    expected = [
        torch.autograd.grad(plain(one * factor, choices, selection)[0], one, upstream[head])[0] / factor
        for head, factor in enumerate((1, 2))
    ]
    mixed, *masks = select_and_mix(one, choices, selection)
    for found in (mixed, mix_masked(one, choices, masks)):
        torch.testing.assert_close(torch.autograd.grad(found, one, upstream[0])[0], expected[0])
    of_heads = torch.func.vmap(select_and_mix, (0, None, None))(stacked, choices, selection)[0]
    torch.testing.assert_close(torch.autograd.grad(of_heads, stacked, upstream)[0], torch.stack(expected))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels, in the order in which they run from now on."""
    names: list[str] = []
    for name in ("exceeds", "augment", "mix"):
        kernel = getattr(_numba, name)
        monkeypatch.setattr(_numba, name, lambda *given, n=name, k=kernel: (names.append(n), k(*given))[1])
    return names


@pytest.mark.parametrize("head", [Linear, MLP])
def test_they_are_what_trains(head: type, called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients of both passes of a sharpness-aware step, with kernels and by the equations."""
    setup = Setup(Task(("a", "b"), ("x", "y", "z")), 20, steps=10, seed=0, head=head)
    method, place = XDomainMix(setup, warmup_steps=0), torch.arange(30)
    z = torch.randn(30, 20).relu().requires_grad_()
    batch = Batch(z, place % 2, place % 3, place, place)

    def passes() -> list[Tensor]:
        first = method(z, batch, 3)
        second = method(z, batch, 3, first.first_pass_draws)
        gradients = [torch.autograd.grad(losses.total, z)[0] for losses in (first, second)]
        return [first.total, second.total, *gradients, *first.first_pass_draws.values()]

    fast = passes()
    assert called == ["augment", "mix"]
    monkeypatch.setenv("XDM_FT_KERNELS", "0")
    torch.testing.assert_close(fast, passes(), atol=1e-7, rtol=1e-6)
    monkeypatch.delenv("XDM_FT_KERNELS")
    method.double()(z.double(), batch, 3)
    assert called[2:] == ["exceeds", "exceeds"], "of other floats the scores alone are float32"


def test_no_compiled_file_is_kept_that_could_be_damaged() -> None:
    kernels = [kernel for kernel in vars(_numba).values() if isinstance(kernel, Dispatcher)]
    assert len(kernels) == 7 and sum(len(kernel.signatures) for kernel in kernels) == 8, "compiled at once"
    assert all(isinstance(kernel._cache, NullCache) for kernel in kernels)


@pytest.mark.slow
def test_triton_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    assert len(SCORES) > 10
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", TRITON], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [used] = done.stdout.splitlines()
    assert "xdm_ft-triton-" in used and not Path(used).parent.exists(), "every process has a new one"
