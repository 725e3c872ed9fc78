"""The kernels against the plain functions, bit for bit, and that they are what runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher
from test_order_statistic import SCORES
from torch import Tensor

from xdm_ft.tensors import Parts
from xdm_ft.xdomainmix import Partners, _numba, decompose, decomposition, draw_partners, mix, mixing, specific_mask

TRITON = """
import torch
from test_order_statistic import SCORES, SIZE
from xdm_ft.xdomainmix import _triton, order_statistic

for kind, scores in SCORES.items():
    for ranks in (torch.arange(8) * 30, torch.tensor([0, SIZE - 1]), torch.tensor([100])):
        assert torch.equal(_triton.exceeds(scores[:8], ranks), order_statistic.reference(scores[:8], ranks)), kind
broken, ranks = SCORES["half zeros"][:8].clone(), torch.tensor([100])
broken[5, 5] = torch.nan
broken[6, 6] = -torch.nan
assert torch.equal(_triton.exceeds(broken, ranks), order_statistic.reference(broken, ranks))
assert _triton.exceeds(broken, ranks).any(1).tolist() == [True] * 5 + [False] * 2 + [True]

from triton.runtime.cache import FileCacheManager

cache = FileCacheManager("kernel")
cache.put("compiled", "file")
print(cache.cache_dir)
"""


@pytest.fixture
def parts() -> Parts:
    generator = torch.Generator().manual_seed(0)
    z, masks = torch.randn(50, 37, generator=generator), torch.rand(2, 50, 37, generator=generator) > 0.5
    return decompose(z, *masks)


@pytest.fixture
def choices() -> tuple[Partners, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y, domain = torch.randint(0, 30, (50,), generator=generator), torch.randint(0, 2, (50,), generator=generator)
    partners = draw_partners(y, domain, torch.rand(50, 2, generator=generator))
    assert not partners.has_same.all()
    return partners, torch.rand(50, 2, generator=generator), torch.rand(50, generator=generator) > 0.3


def plain_mix(parts: Parts, partners: Partners, lam: Tensor, keep: Tensor) -> Tensor:
    acting = torch.where(torch.stack((partners.has_same, partners.has_other), 1), lam, 1.0)
    return mixing.reference(parts, partners.same, partners.other, acting, keep)


def test_parts() -> None:
    """Also of infinities and NaN, which do not reach parts that leave them out."""
    z = torch.where(torch.rand(20, 30) > 0.9, torch.inf, torch.randn(20, 30))
    z[3, 5] = torch.nan
    masks = torch.rand(2, 20, 30) > 0.5
    for found, expected in zip(decompose(z, *masks), decomposition.reference(z, *masks), strict=True):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("space", [(), (2, 3)])
def test_mixed_features_and_their_gradient(
    space: tuple[int, ...], parts: Parts, choices: tuple[Partners, Tensor, Tensor]
) -> None:
    maps = [part[(..., *(None for _ in space))].expand(*part.shape, *space) * torch.rand(space) for part in parts]
    one, two = (Parts(*(part.clone().requires_grad_() for part in maps)) for _ in range(2))
    found, expected = mix(one, *choices), plain_mix(two, *choices)
    assert torch.equal(found, expected)
    upstream = torch.randn(found.shape)
    gradients = torch.autograd.grad(found, one, upstream), torch.autograd.grad(expected, two, upstream)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_by_finite_differences() -> None:
    z, masks = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.rand(2, 6, 5) > 0.5
    partners = draw_partners(torch.arange(6) % 2, torch.arange(6) // 2, torch.rand(6, 2))
    lam, keep = torch.rand(6, 2, dtype=torch.float64), torch.rand(6) > 0.3
    assert torch.autograd.gradcheck(lambda z: mix(decompose(z, *masks), partners, lam, keep), z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floats_are_computed_plainly(
    dtype: torch.dtype, parts: Parts, choices: tuple[Partners, Tensor, Tensor]
) -> None:
    other = Parts(*(part.to(dtype) for part in parts))
    assert torch.equal(mix(other, *choices), plain_mix(other, *choices))
    assert decompose(other.csds, *(parts.csds != 0, parts.csdg != 0)).csds.dtype == dtype


def test_a_nan_stays_with_its_sample(choices: tuple[Partners, Tensor, Tensor]) -> None:
    z = torch.randn(50, 30)
    z[3, 5] = torch.nan
    mask = specific_mask(z, 0.5)
    mixed = mix(decompose(z, mask, mask), *choices)
    assert mixed.isnan().any(1).nonzero().tolist() == [[3]]


def test_they_are_what_runs(
    parts: Parts, choices: tuple[Partners, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for name in ("exceeds", "parts", "mix"):
        kernel = getattr(_numba, name)
        monkeypatch.setattr(_numba, name, lambda *given, n=name, k=kernel: (called.append(n), k(*given))[1])
    mask = specific_mask(parts.csds, 0.5)
    mix(decompose(parts.csds, mask, mask), *choices)
    assert called == ["exceeds", "parts", "mix"]


def test_no_compiled_file_is_kept_that_could_be_damaged() -> None:
    kernels = [kernel for kernel in vars(_numba).values() if isinstance(kernel, Dispatcher)]
    assert len(kernels) == 5 and sum(len(kernel.signatures) for kernel in kernels) == 6, "compiled at once"
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
