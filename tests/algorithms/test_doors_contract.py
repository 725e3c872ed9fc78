"""What every method promises where it is more than a loss, over whatever lies in `xdm_ft/algorithms/`."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from partnered import mixed, partnered
from test_contract import ALGORITHMS, DOMAINS, METHODS, STEPS, setup, toy
from torch import Tensor
from torch.func import stack_module_state

from xdm_ft.algorithms import Algorithm
from xdm_ft.runtime.tensors import Batch
from xdm_ft.training.bank.step import _InputMixing

FIELDS = ("x", "y", "domain", "index", "place")
CHANGES_INPUTS = [name for name in ALGORITHMS if METHODS[name].on_inputs is not Algorithm.on_inputs]
HAS_STAGES = [name for name in ALGORITHMS if METHODS[name].stage_modules is not Algorithm.stage_modules]
HAS_UPDATE = [name for name in ALGORITHMS if METHODS[name].update is not Algorithm.update]


def same(one: Batch, other: Batch) -> bool:
    two = one.fields(), other.fields()
    return two[0].keys() == two[1].keys() and all(torch.equal(value, two[1][name]) for name, value in two[0].items())


def test_every_door_is_used() -> None:
    assert CHANGES_INPUTS and HAS_STAGES and HAS_UPDATE


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_inputs_are_a_pure_function(name: str, step: int) -> None:
    algorithm, given = METHODS[name](setup()), toy()
    before, state = copy.deepcopy(given), copy.deepcopy(algorithm.state_dict())
    torch.manual_seed(1)
    changed = mixed(algorithm, given, step)
    torch.manual_seed(2)  # torch's own generator has no say
    assert same(changed, mixed(algorithm, given, step))
    assert same(given, before)
    assert all(torch.equal(value, state[key]) for key, value in algorithm.state_dict().items())
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter.normal_()
    assert same(changed, mixed(algorithm, given, step)), "a second pass, at other weights, must see the same inputs"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_inputs_keep_their_shape_and_whose_they_are(name: str) -> None:
    given = toy()
    changed = mixed(METHODS[name](setup()), given, 7)
    assert changed.x.shape == given.x.shape and changed.x.dtype == given.x.dtype
    assert all(torch.equal(getattr(changed, field), getattr(given, field)) for field in FIELDS[1:])
    if changed.targets is not None:
        torch.testing.assert_close(changed.targets.sum(1), torch.ones(len(given.y)))
        assert changed.targets.min() >= 0


@pytest.mark.parametrize("name", CHANGES_INPUTS)
def test_inputs_of_one_head_are_the_same_alone_and_among_24(name: str) -> None:
    heads = [METHODS[name](setup(seed)) for seed in range(24)]
    batches = [partnered(head, toy(seed), 5) for seed, head in enumerate(heads)]
    names = batches[0].fields()
    stacked = Batch(**{name: torch.stack([batch.fields()[name] for batch in batches]) for name in names})
    _, buffers = stack_module_state(heads)
    together = _InputMixing(heads[0]).of_heads(buffers, stacked, 5).fields()
    differ = False
    for place, (head, batch) in enumerate(zip(heads, batches, strict=True)):
        alone = head.on_inputs(batch, 5).fields()
        assert alone.keys() == together.keys()
        differ = differ or not torch.equal(alone["x"], batch.x)
        for key, value in alone.items():
            torch.testing.assert_close(together[key][place], value, atol=1e-6, rtol=1e-6, msg=key)
    assert differ


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_inputs_of_a_batch_with_little_in_it(name: str, few: int) -> None:
    given = Batch(*(field[:few] for field in toy()[:5]))
    algorithm = METHODS[name](setup())
    changed = mixed(algorithm, given, 3)
    assert changed.x.isfinite().all() and algorithm(changed.x, changed, 3).total.isfinite()


@pytest.mark.parametrize("name", HAS_STAGES)
def test_modules_in_the_encoder_have_no_buffers_and_keep_shapes(name: str) -> None:
    encoder = SimpleNamespace(stem_names=("stem", "pool"), stage_names=("a", "b", "c"), transition_names=())
    always = {"p": 1.0} if "p" in inspect.signature(METHODS[name]).parameters else {}  # probability per step
    modules = METHODS[name](setup(), **always).stage_modules(encoder)
    given, maps = toy(), torch.randn(len(toy().y), 6, 5, 5, generator=torch.Generator().manual_seed(0))
    assert modules.keys() <= {*encoder.stem_names, *encoder.stage_names}
    for module in modules.values():
        assert not list(module.buffers()), "parameters alone are trained and saved"
        before = maps.clone()
        changed = module(maps, given, 3)
        assert changed.shape == maps.shape and not torch.allclose(changed, maps)
        assert torch.equal(maps, before) and torch.equal(changed, module(maps, given, 3))
    assert METHODS[name].frozen_reason, "on cached features these modules are never reached"


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_trains_on_all_domains_and_goes_nowhere_by_itself(name: str, step: int) -> None:
    algorithm = METHODS[name](setup())
    parameters = dict(algorithm.named_parameters())
    before = {key: value.detach().clone() for key, value in parameters.items()}
    asked = list(algorithm.update(parameters, dict(algorithm.named_buffers()), step))
    assert asked == [None] or sorted(asked) == list(range(DOMAINS))  # type: ignore[type-var]
    assert all(torch.equal(value, before[key]) for key, value in parameters.items())
    assert (asked == [None]) == (name not in HAS_UPDATE)
    assert bool(algorithm.pooled_reason) == (name in HAS_UPDATE), "only per-domain batches consist of domains"


@pytest.mark.parametrize("name", HAS_UPDATE)
def test_an_update_follows_its_inner_steps_and_stacks(name: str) -> None:
    """Inner steps that add 1 move everything forward; parameters may have heads before their own axes."""
    one, many = torch.zeros(3, 2), torch.zeros(24, 3, 2)

    def moved(parameter: Tensor) -> Tensor:
        algorithm, heads = METHODS[name](setup()), parameter.shape[:-2]
        buffers = {key: value.expand((*heads, *value.shape)) for key, value in algorithm.named_buffers()}
        for _ in algorithm.update({"a": parameter}, buffers, 0):
            parameter.add_(1.0)
        return parameter

    assert (moved(one) > 0).all()
    assert torch.equal(moved(many), one.expand(24, 3, 2))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_reasons_are_one_line(name: str) -> None:
    for reason in (METHODS[name].frozen_reason, METHODS[name].pooled_reason):
        assert "\n" not in reason and (not reason or ";" in reason), "why; what to do"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_step_takes_as_many_gradients_as_it_says(name: str) -> None:
    if name not in ALGORITHMS:
        assert METHODS[name].gradients_per_step(DOMAINS) == 0  # no steps
        return
    algorithm = METHODS[name](setup())
    taken = list(algorithm.update(dict(algorithm.named_parameters()), dict(algorithm.named_buffers()), 3))
    assert len(taken) == METHODS[name].gradients_per_step(DOMAINS) > 0
