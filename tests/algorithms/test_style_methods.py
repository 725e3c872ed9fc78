"""MixStyle and DSU: the recorded numbers, their places in encoders, their draws."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from recorded import golden
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.dsu import DSU, redraw, spread
from xdm_ft.algorithms.mixstyle import MixStyle, mix_style, moments
from xdm_ft.core import Batch, Task
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.randomness import Stream, beta, beta_quantiles, uniform

SETUP = Setup(Task(tuple("ab"), tuple("xy")), width=4, steps=10, seed=3)
EXACT = {"atol": 1e-6, "rtol": 0}


def test_single_calls_are_the_recorded_ones() -> None:
    g = golden("mixstyle.npz")
    eps = float(g["eps"])
    mean, std = moments(g["x"], eps)
    torch.testing.assert_close(mean, g["mu"], **EXACT)
    torch.testing.assert_close(std, g["sig"], **EXACT)
    torch.testing.assert_close(mix_style(g["x"], g["perm"], g["lmda"].flatten(), eps), g["out"], **EXACT)
    default = MixStyle(SETUP)
    assert (default.eps, default.alpha, default.p) == (eps, float(g["alpha"]), 0.5)
    g = golden("dsu.npz")
    eps = float(g["eps"])
    mean, std = moments(g["x"], eps)
    torch.testing.assert_close(mean[..., 0, 0], g["mean"], **EXACT)
    torch.testing.assert_close(std[..., 0, 0], g["std"], **EXACT)
    for statistic, name in ((mean, "sqrtvar_mu"), (std, "sqrtvar_std")):
        torch.testing.assert_close(spread(statistic, eps)[..., 0, 0].expand(6, 4), g[name], **EXACT)
    torch.testing.assert_close(redraw(g["x"], g["eps_mu"], g["eps_std"], eps), g["out"], **EXACT)
    assert (DSU(SETUP).eps, DSU(SETUP).p) == (eps, 0.5)


def maps(seed: int = 0, size: int = 5) -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, size, size, generator=generator) + 3 * torch.randn(16, 4, 1, 1, generator=generator)
    two = torch.arange(16) % 2
    return x, Batch(x, two, two, torch.arange(16), torch.randperm(500, generator=generator)[:16])


def encoder(**names: tuple[str, ...]) -> SimpleNamespace:
    return SimpleNamespace(
        **{"stem_names": (), "stage_names": ("one", "two", "three"), "transition_names": (), **names}
    )


def test_gradients() -> None:
    """MixStyle's statistics are constants (Zhou et al. 2021, section 2.2); DSU's are not."""
    x, _ = maps()
    x.requires_grad_()
    std = moments(x, 1e-6)[1].detach()
    lam, partner = torch.full((16,), 0.3), torch.arange(16).roll(1)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    (gradient,) = torch.autograd.grad(mix_style(x, partner, lam, 1e-6), x, upstream)
    torch.testing.assert_close(gradient, upstream * (0.3 * std + 0.7 * std[partner]) / std)
    zero = torch.zeros(16, 4)
    (gradient,) = torch.autograd.grad(redraw(x, zero, zero, 1e-6), x, upstream)
    torch.testing.assert_close(gradient, upstream, atol=1e-5, rtol=1e-4)  # without noise it is the identity


def test_mixstyle_s_partners_of_other_domains() -> None:
    """All are of another domain, and uniform over them; a sample without one keeps its style."""
    x, batch = maps()
    module = MixStyle(SETUP, p=1.0, partners="other_domain").stage_modules(encoder())["one"]
    alone = batch._replace(domain=torch.zeros_like(batch.domain))
    torch.testing.assert_close(module(x, alone, 0), x, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="partners: other_domain needs two training domains"):
        MixStyle(Setup(Task(tuple("ab"), ("x",)), width=4, steps=10, seed=3), partners="other_domain")
    with pytest.raises(UserError, match=r"stages \[2, 2\] has one twice"):
        MixStyle(SETUP, stages=(2, 2))
    with pytest.raises(UserError, match=r"stages \[1, 4\]: the encoder has 3 named stages; name lower ones"):
        MixStyle(SETUP, stages=(1, 4)).stage_modules(encoder())


def test_places() -> None:
    """After the first two stages; after the first convolution, the max-pool and every stage or transition."""
    assert list(MixStyle(SETUP).stage_modules(encoder(stem_names=("conv",)))) == ["one", "two"]
    found = DSU(SETUP).stage_modules(encoder(stem_names=("conv", "pool")))
    assert list(found) == ["conv", "pool", "one", "two", "three"]
    dense = encoder(stem_names=("conv", "pool"), transition_names=("t1", "t2"))
    assert list(DSU(SETUP).stage_modules(dense)) == ["conv", "pool", "t1", "t2"]
    for method, least in ((MixStyle, 2), (DSU, 1)):
        with pytest.raises(UserError, match="named stage"):
            method(SETUP).stage_modules(encoder(stage_names=("one", "two")[: least - 1]))


@pytest.mark.parametrize("method", [MixStyle, DSU])
def test_at_work_with_probability_p_at_each_place_on_its_own(method: type[Algorithm]) -> None:
    x, batch = maps()
    modules = list(method(SETUP, p=0.3).stage_modules(encoder()).values())[:2]
    at_work = torch.tensor([[module(x, batch, step) is not x for module in modules] for step in range(250)]).float()
    assert ((at_work.mean(0) - 0.3).abs() < 0.1).all()
    assert torch.corrcoef(at_work.T)[0, 1].abs() < 0.2
    for p in (0.0, 1.0):
        always = method(SETUP, p=p).stage_modules(encoder())["one"]
        assert all((always(x, batch, step) is not x) == bool(p) for step in range(9))


def noise_of(method: type[Algorithm], place: str, seed: int, step: int, given: Batch, x: Tensor) -> Tensor:
    own = method(Setup(SETUP.task, 4, 10, seed), p=1.0).stage_modules(encoder())[place]
    return own(x, given, step)


@pytest.mark.parametrize("method", [MixStyle, DSU])
def test_draws_are_functions_of_seed_step_place_and_sample(method: type[Algorithm]) -> None:
    x, given = maps()
    once = noise_of(method, "one", 0, 0, given, x)
    torch.manual_seed(77)  # torch's own generator has no say
    assert torch.equal(once, noise_of(method, "one", 0, 0, given, x))
    for other in (("two", 0, 0), ("one", 1, 0), ("one", 0, 1)):
        assert not torch.allclose(once, noise_of(method, *other, given, x))
    moved = given._replace(position=given.position + 1)
    assert not torch.allclose(once, noise_of(method, "one", 0, 0, moved, x))


def test_dsu_s_noise_is_normal_and_independent() -> None:
    """Taken back out of the output: β and γ of maps whose statistics are known."""
    x, given = maps()
    mean, std = moments(x, 1e-6)
    drawn = []
    for step in range(200):
        new_mean, new_std = moments(noise_of(DSU, "one", 0, step, given, x), 0.0)
        drawn.append((new_mean - mean)[..., 0, 0] / spread(mean, 1e-6)[..., 0, 0])
        assert new_std.shape == std.shape
    noise = torch.stack(drawn)  # [steps,B,C]
    assert abs(float(noise.mean())) < 0.03 and abs(float(noise.std()) - 1) < 0.03
    flat = noise.flatten(1)[:, :8]
    correlation = torch.corrcoef(flat.T) - torch.eye(8)
    assert correlation.abs().max() < 0.3


@pytest.mark.parametrize("stages", [(1, 2, 3), (3,)])
@pytest.mark.parametrize("partners", ["random", "other_domain"])
def test_mixstyle_is_a_naive_loop(partners: str, stages: tuple[int, ...]) -> None:
    """Sample by sample, in the encoder's order; each stage with its own draws, whatever the others are."""
    _, batch = maps()
    domain = torch.where(batch.position % 2 == 0, torch.arange(16) % 3, 0)  # of unequal size
    batch, names = batch._replace(domain=domain), ("one", "two", "three")
    made = MixStyle(SETUP, p=1.0, stages=stages, partners=partners).stage_modules(encoder())
    assert {*made} == {names[stage - 1] for stage in stages}
    for step in range(2):
        x = maps()[0]
        for stage in sorted(stages):
            key = batch.position + ((stage - 1) << 48)
            u = uniform(3, step, Stream.STYLE_PARTNERS, key)
            lam = beta(uniform(3, step, Stream.STYLE_LAMBDA, key), beta_quantiles(0.1))
            rows = []
            for i in range(16):
                others = [k for k in range(16) if domain[k] != domain[i]]
                j = int(u.argsort(stable=True)[i]) if partners == "random" else others[int(u[i] * len(others))]
                channels = []
                for c in range(4):
                    mean, std = ([float(f(x[k, c])) for k in (i, j)] for f in (torch.mean, deviation))
                    mixed = [float(lam[i]) * own + (1 - float(lam[i])) * other for own, other in (mean, std)]
                    channels.append((x[i, c] - mean[0]) / std[0] * mixed[1] + mixed[0])
                rows.append(torch.stack(channels))
            x_mixed = made[names[stage - 1]](x, batch, step)
            torch.testing.assert_close(x_mixed, torch.stack(rows), atol=1e-5, rtol=1e-5)
            x = x_mixed


def deviation(values: Tensor) -> Tensor:
    return (values.var() + 1e-6).sqrt()


@pytest.mark.parametrize("method", [MixStyle, DSU])
def test_small_maps_and_batches_and_half_precision(method: type[Algorithm]) -> None:
    """Unbiased variances of one number would be NaN; they count as 0. Statistics are float32 under autocast."""
    for samples, size in ((1, 5), (16, 1), (1, 1)):
        x, given = maps(size=size)
        x, few = x[:samples].requires_grad_(), Batch(*(field[:samples] for field in given[:5]))
        out = noise_of(method, "one", 0, 0, few, x)
        assert out.shape == x.shape and out.isfinite().all()
        assert torch.autograd.grad(out.square().sum(), x)[0].isfinite().all()
    half, given = maps()[0].bfloat16(), maps()[1]
    expected = noise_of(method, "one", 0, 0, given, half.float()).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = noise_of(method, "one", 0, 0, given, half)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
