"""The contract of sharpness-aware steps, for every module of `xdm_ft/sharpness/`."""

import pytest
import torch
from torch.func import vmap

from xdm_ft.recipe.components import find, names
from xdm_ft.sharpness import Sharpness

NAMES = names("sharpness")


def tensors(seed: int, *stacked: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*stacked, *shape, generator=generator) for name, shape in {"w": (3, 4), "b": (3,)}.items()
    }


def test_the_names_are_found() -> None:
    assert "sam" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_pure_functions_of_the_right_shape(name: str) -> None:
    sharpness = find("sharpness", name)()
    assert isinstance(sharpness, Sharpness) and sharpness.source and sharpness.rho > 0
    parameters, first, second = tensors(0), tensors(1), tensors(2)
    offset = sharpness.offset(parameters, first, sharpness.rho)
    combined = sharpness.combine(first, second)
    for key in parameters:
        assert offset[key].shape == combined[key].shape == parameters[key].shape
        assert offset[key].isfinite().all() and combined[key].isfinite().all()
    for now, seed in ((parameters, 0), (first, 1), (second, 2)):
        assert all(torch.equal(now[key], value) for key, value in tensors(seed).items())


@pytest.mark.parametrize("name", NAMES)
def test_climbs_in_proportion_to_rho(name: str) -> None:
    """The part of the offset that depends on ρ is linear in ρ and ascends; SAGM's other part does not depend on ρ."""
    sharpness = find("sharpness", name)()
    parameters, gradients = tensors(0), tensors(1)
    near, middle, far = (sharpness.offset(parameters, gradients, rho) for rho in (0.1, 0.2, 0.3))
    assert sum((near[key] * gradients[key]).sum() for key in near) > 0
    for key in near:
        torch.testing.assert_close(middle[key] - near[key], far[key] - middle[key])
        assert ((middle[key] - near[key]) * gradients[key]).sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_stacked_heads_do_not_see_each_other(name: str) -> None:
    sharpness = find("sharpness", name)()
    parameters, first, second, rho = tensors(0, 5), tensors(1, 5), tensors(2, 5), torch.rand(5)
    offsets = vmap(sharpness.offset)(parameters, first, rho)
    combined = vmap(sharpness.combine)(first, second)
    for head in range(5):
        p, f, s = ({key: value[head] for key, value in stack.items()} for stack in (parameters, first, second))
        for key, value in sharpness.offset(p, f, rho[head]).items():
            torch.testing.assert_close(offsets[key][head], value)
        for key, value in sharpness.combine(f, s).items():
            torch.testing.assert_close(combined[key][head], value)
