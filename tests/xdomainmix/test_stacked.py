"""Every function under `torch.func.vmap` equals itself one head at a time; the package exports these and no others."""

import pytest
import torch
from torch.func import vmap

import xdm_ft.xdomainmix
from xdm_ft.xdomainmix import autograd_scores, decompose, draw_partners, linear_scores, mix, specific_mask

HEADS, BATCH, WIDTH, CLASSES = 5, 96, 33, 4


@pytest.mark.parametrize("shape", [(), (3, 3)], ids=["pooled", "map"])
def test_all_of_it_under_vmap(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    z = torch.relu(torch.randn(HEADS, BATCH, WIDTH, *shape))
    weight = torch.randn(HEADS, CLASSES, WIDTH)
    y, domain = torch.randint(0, CLASSES, (HEADS, BATCH)), torch.randint(0, 3, (HEADS, BATCH))
    noise, lam, keep = torch.rand(HEADS, BATCH, 2), torch.rand(HEADS, BATCH, 2), torch.rand(HEADS, BATCH) > 0.2

    def one(z, weight, y, domain, noise, lam, keep):
        pool = (lambda features: features.mean((2, 3))) if shape else (lambda features: features)
        by_class = linear_scores(z, weight, y)
        by_domain = autograd_scores(z, lambda features: pool(features) @ weight.T, domain)
        parts = decompose(z, specific_mask(by_class, 0.5), specific_mask(by_domain, 0.9))
        return by_class, by_domain, mix(parts, draw_partners(y, domain, noise), lam, keep)

    arguments = (z, weight, y, domain, noise, lam, keep)
    together = vmap(one)(*arguments)
    for head in range(HEADS):
        alone = one(*(argument[head] for argument in arguments))
        for stacked, single in zip(together, alone, strict=True):
            torch.testing.assert_close(stacked[head], single, atol=1e-6, rtol=1e-6)


def test_exports() -> None:
    functions = {"linear_scores", "autograd_scores", "specific_mask", "decompose", "draw_partners", "mix"}
    assert set(xdm_ft.xdomainmix.__all__) == functions | {"domain_quantile", "Partners"}
