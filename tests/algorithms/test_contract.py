"""What every method promises, over whatever lies in `xdm_ft/algorithms/`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from partnered import mixed, partnered
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from xdm_ft.algorithms import Algorithm, Method, Setup, Solver
from xdm_ft.core import Batch, Losses, Task
from xdm_ft.recipe.components import find, names
from xdm_ft.training.bank.step import InputMixing

METHODS = {name: find("algorithms", name) for name in names("algorithms")}
HEADS = {name: cls for name in names("heads") if (cls := find("heads", name)).trained}
ALGORITHMS = sorted(name for name, cls in METHODS.items() if issubclass(cls, Algorithm))
SOLVERS = sorted(name for name, cls in METHODS.items() if issubclass(cls, Solver))
CHANGES_INPUTS = [name for name in ALGORITHMS if METHODS[name].on_inputs is not Algorithm.on_inputs]
HAS_STAGES = [name for name in ALGORITHMS if METHODS[name].stage_modules is not Algorithm.stage_modules]
HAS_UPDATE = [name for name in ALGORITHMS if METHODS[name].update is not Algorithm.update]

WIDTH, CLASSES, DOMAINS, PER_DOMAIN, STEPS = 20, 3, 3, 12, 60
TASK = Task(tuple("abc"), tuple("xyz"))
FIRST_AND_LAST = (0, STEPS - 1)  # of methods with a warm-up the first step has another loss


def setup(seed: int = 0, **more: Any) -> Setup:
    text = nn.functional.normalize(torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9)))
    return Setup(TASK, WIDTH, STEPS, seed, text_weight=10 * text, **more)


TRAINED = [name for name in ALGORITHMS if any(p.requires_grad for p in METHODS[name](setup()).parameters())]


def toy(seed: int = 0) -> Batch:
    """Classes and domains each shift the features their own way: learnable. Every domain has every class."""
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.Generator().manual_seed(99)
    of_class = 2 * torch.randn(CLASSES, WIDTH, generator=shifts)
    of_domain = torch.randn(DOMAINS, WIDTH, generator=shifts)
    domain = torch.arange(DOMAINS).repeat_interleave(PER_DOMAIN)
    y = torch.arange(DOMAINS * PER_DOMAIN) % CLASSES
    noise = torch.randn(len(y), WIDTH, generator=generator)
    index = torch.randperm(10_000, generator=generator)[: len(y)]
    return Batch(torch.relu(of_class[y] + of_domain[domain] + noise), y, domain, index, torch.arange(len(y)))


def train(algorithm: Algorithm, first: int, last: int, encoder: nn.Module | None = None) -> list[float]:
    """Plain training as an engine does it: two optimizers, clipping, buffers committed once a step."""
    encoder = encoder or nn.Identity()
    own = {name for name, _ in algorithm.named_parameters() if name.split(".")[0] in algorithm.auxiliary}
    main = [p for name, p in algorithm.named_parameters() if name not in own and p.requires_grad]
    main += list(encoder.parameters())
    auxiliary = [p for name, p in algorithm.named_parameters() if name in own]
    optimizers = [torch.optim.SGD(group, lr=0.05) for group in (main, auxiliary) if group]
    totals = []
    for step in range(first, last):
        batch = mixed(algorithm, toy(step), step)
        losses = algorithm(encoder(batch.x), batch, step)
        gradients = torch.autograd.grad(losses.total, main)
        for parameter, gradient in zip(main, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(main, 1.0)  # the penalty of IRM has steep places
        if auxiliary:
            for parameter, gradient in zip(auxiliary, torch.autograd.grad(losses.auxiliary, auxiliary), strict=True):
                parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        for name, value in losses.buffers.items():
            algorithm.get_buffer(name).copy_(value)
        totals.append(losses.total.item())
    return totals


def flat(losses: Losses) -> dict[str, Tensor]:
    """Everything that is returned, by name."""
    named = {"total": losses.total, "auxiliary": losses.auxiliary}
    for field in ("buffers", "logs", "first_pass_draws"):
        named |= {f"{field}.{key}": value for key, value in getattr(losses, field).items()}
    return named


def assert_same(one: Losses, other: Losses) -> None:
    assert flat(one).keys() == flat(other).keys()
    for name, value in flat(one).items():
        assert torch.equal(value, flat(other)[name]), name


def same(one: Batch, other: Batch) -> bool:
    two = one.fields(), other.fields()
    return two[0].keys() == two[1].keys() and all(torch.equal(value, two[1][name]) for name, value in two[0].items())


def test_there_are_methods_to_test() -> None:
    assert len(ALGORITHMS) >= 13 and len(TRAINED) >= len(ALGORITHMS) - 1
    assert len(ALGORITHMS) + len(SOLVERS) == len(METHODS)
    assert CHANGES_INPUTS and HAS_STAGES and HAS_UPDATE


@pytest.mark.parametrize("name", METHODS)
def test_says_what_it_is(name: str) -> None:
    cls = METHODS[name]
    assert cls.source and cls.__doc__ and cls.min_domains >= 1
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        if key not in ("self", "setup"):
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"{key} must be keyword only to be a recipe key"
            assert parameter.default is not inspect.Parameter.empty or key in cls.__doc__
    if name in ALGORITHMS:
        for reason in (cls.frozen_reason, cls.pooled_reason):
            assert "\n" not in reason and (not reason or ";" in reason), "why; what to do"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_is_finite_and_falls(name: str) -> None:
    """The loss of the last step, on batches not trained on, before and after. What needs an encoder trains one."""
    algorithm = METHODS[name](setup())
    encoder = nn.Linear(WIDTH, WIDTH) if algorithm.frozen_reason else nn.Identity()

    @torch.no_grad()
    def mean_loss() -> float:
        unseen = [toy(seed) for seed in range(1000, 1010)]
        return sum(float(algorithm(encoder(batch.x), batch, STEPS - 1).total) for batch in unseen) / len(unseen)

    before = mean_loss()
    totals = train(algorithm, 0, STEPS, encoder)
    assert all(abs(total) < float("inf") for total in totals)
    assert mean_loss() < 0.6 * before


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if METHODS[name].frozen_reason])
def test_refused_on_cached_features_because_it_is_erm_there_or_trains_nothing(name: str) -> None:
    """The gradient of the head is ERM's."""
    if name not in TRAINED:
        assert "nothing to train" in METHODS[name].frozen_reason
        assert METHODS[name].needs_text, "a fixed head comes from the text side"
        return
    for step in FIRST_AND_LAST:
        batch, methods = toy(), [METHODS[name](setup()), METHODS["erm"](setup())]
        own, plain = (torch.autograd.grad(m(batch.x, batch, step).total, list(m.parameters())) for m in methods)
        torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_is_a_pure_function_in_float32(name: str) -> None:
    """Also under autocast. The second pass at the same weights is the first."""
    for step in FIRST_AND_LAST:
        algorithm, batch = METHODS[name](setup()), toy()
        state, before = copy.deepcopy(algorithm.state_dict()), copy.deepcopy(batch)
        losses = algorithm(batch.x, batch, step)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(losses, algorithm(batch.x, batch, step))
        assert_same(losses, algorithm(batch.x, batch, step, losses.first_pass_draws))
        assert all(not value.requires_grad for value in losses.first_pass_draws.values())
        assert all(torch.equal(value, state[key]) for key, value in algorithm.state_dict().items())
        assert same(batch, before)
        buffers = dict(algorithm.named_buffers())
        for key, value in losses.buffers.items():
            assert value.shape == buffers[key].shape and value.dtype == buffers[key].dtype and not value.requires_grad
        by_sample = METHODS[name](setup(loss_average="sample"))(batch.x, batch, step)
        for given in (losses, by_sample):
            for scalar in (given.total, given.auxiliary, *given.logs.values()):
                assert scalar.shape == () and scalar.dtype == torch.float32 and scalar.isfinite()


@pytest.mark.parametrize("name", TRAINED)
def test_a_second_pass_at_other_weights_keeps_the_draws_of_the_first(name: str) -> None:
    """What depends on the weights would differ; the second pass must see the loss of the first."""
    algorithm, batch = METHODS[name](setup()), toy()
    first = algorithm(batch.x, batch, STEPS - 1)
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter.mul_(-3)
    other = algorithm(batch.x, batch, STEPS - 1)
    second = algorithm(batch.x, batch, STEPS - 1, first.first_pass_draws)
    for kept in ("first_pass_draws", "buffers"):
        values = getattr(first, kept)
        assert all(torch.equal(getattr(second, kept)[key], value) for key, value in values.items())
        if kept == "first_pass_draws":  # buffers may be of the batch alone
            assert not values or any(not torch.equal(getattr(other, kept)[key], value) for key, value in values.items())
    assert (second.total != other.total) == bool(first.first_pass_draws)


@pytest.mark.parametrize("name", TRAINED)
def test_same_seed_same_numbers_also_when_restored_in_the_middle(name: str) -> None:
    torch.manual_seed(1)
    through = METHODS[name](setup(3))
    totals = train(through, 0, STEPS)
    torch.manual_seed(2)  # torch's own generator has no say
    first = METHODS[name](setup(3))
    assert train(first, 0, STEPS - 5) == totals[:-5]
    second = METHODS[name](setup(seed=8))  # its own initialisation must not matter
    second.load_state_dict(first.state_dict())
    assert train(second, STEPS - 5, STEPS) == totals[-5:]
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in through.state_dict().items())
    assert train(METHODS[name](setup(4)), 0, 3) != totals[:3]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_reach_exactly_what_they_should(name: str) -> None:
    """The total's: features and main parameters; the auxiliary loss's: the auxiliary parameters alone."""
    for step in FIRST_AND_LAST:
        algorithm, z = METHODS[name](setup()), toy().x.requires_grad_()
        losses = algorithm(z, toy(), step)
        for loss, auxiliary in ((losses.total, False), (losses.auxiliary, True)):
            algorithm.zero_grad()
            z.grad = None
            if loss.requires_grad:
                loss.backward(retain_graph=True)
            reached = {key for key, p in algorithm.named_parameters() if p.grad is not None and p.grad.any()}
            trained = {key for key, p in algorithm.named_parameters() if p.requires_grad}
            assert reached == {key for key in trained if (key.split(".")[0] in algorithm.auxiliary) == auxiliary}
            assert (z.grad is not None and bool(z.grad.any())) is not auxiliary


@pytest.mark.parametrize(
    ("name", "head"), [*((name, "linear") for name in TRAINED), *(("xdomainmix", head) for head in HEADS)]
)
def test_one_head_is_the_same_alone_and_among_24(name: str, head: str) -> None:
    """Losses, gradients and buffers of heads of different seeds and batches, stacked and one by one."""
    heads = [METHODS[name](setup(seed, head=HEADS[head])) for seed in range(24)]
    batches = [toy(seed) for seed in range(24)]
    parameters, buffers = stack_module_state(heads)
    stacked = tuple(torch.stack(field) for field in list(zip(*batches, strict=True))[:5])
    for step in FIRST_AND_LAST:

        def one(parameters: dict, buffers: dict, fields: tuple[Tensor, ...], step: int = step) -> Losses:
            return functional_call(heads[0], (parameters, buffers), (fields[0], Batch(*fields), step))

        together = vmap(one)(parameters, buffers, stacked)
        gradients = torch.autograd.grad((together.total + together.auxiliary).sum(), list(parameters.values()))
        for place in (0, 1, 11, 23):
            alone = heads[place](batches[place].x, batches[place], step)
            for key, value in flat(alone).items():
                torch.testing.assert_close(flat(together)[key][place], value, atol=1e-6, rtol=1e-6, msg=key)
            own = torch.autograd.grad(alone.total + alone.auxiliary, list(heads[place].parameters()))
            for stack, gradient in zip(gradients, own, strict=True):
                atol = 1e-6 * max(1.0, float(gradient.abs().max()))  # rounding is that of the terms which cancel
                torch.testing.assert_close(stack[place], gradient, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_a_batch_with_little_in_it(name: str) -> None:
    """Sampling can leave a domain or a class out: losses, gradients and mixed inputs are finite all the same."""
    batch, rows = toy(), torch.arange(DOMAINS * PER_DOMAIN)
    for keep in (batch.domain == 1, batch.y == 2, rows == 4, rows < 2):
        few = Batch(*(field[keep] for field in batch[:5]))
        for step in FIRST_AND_LAST:
            for head in HEADS.values():
                algorithm = METHODS[name](setup(head=head))
                changed = mixed(algorithm, few, step)
                for given in (few, changed) if changed is not few else (few,):
                    losses = algorithm(given.x, given, step)
                    assert losses.total.isfinite() and losses.auxiliary.isfinite()
                    (losses.total + losses.auxiliary).backward()
                assert all(p.grad is None or p.grad.isfinite().all() for p in algorithm.parameters())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_starts_from_the_text_where_asked_and_keeps_its_counts_of_steps(name: str) -> None:
    given = setup(head_init="zero_shot")
    algorithm = METHODS[name](given)
    assert torch.equal(algorithm.head.weight, given.text_weight) and not algorithm.head.bias.any()
    assert 1 <= algorithm.first_selectable_step <= STEPS
    assert algorithm.mixed_steps(STEPS) in (None, STEPS - algorithm.first_selectable_step + 1)
    # a reset at every step would take the momentum away altogether
    assert sum(algorithm.resets_optimizer(step) for step in range(STEPS)) <= 1


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_offer_finite_heads_deterministically(name: str) -> None:
    batch = toy()
    before = copy.deepcopy(batch)
    candidates = list(METHODS[name](setup()).solve(batch.x, batch))
    assert candidates and [candidate.step for candidate in candidates] == list(range(len(candidates)))
    again = list(METHODS[name](setup()).solve(batch.x, batch))
    for candidate, other in zip(candidates, again, strict=True):
        assert candidate.head.keys() == other.head.keys() and candidate.hparams == other.hparams
        for key, value in candidate.head.items():
            assert value.isfinite().all() and torch.equal(value, other.head[key])
        solver = METHODS[name](setup(head=find("heads", METHODS[name].head_kind)))
        solver.load_state_dict(candidate.state)
        logits = solver.logits(batch.x)
        assert logits.shape == (len(batch.y), CLASSES) and logits.dtype == torch.float32 and logits.isfinite().all()
        stacked = {key: torch.stack([value, value]) for key, value in solver.state_dict().items()}
        tolerance = 1e-6 * max(1.0, float(logits.detach().abs().max()))
        torch.testing.assert_close(solver.stacked_logits(batch.x, stacked)[:, 1], logits, rtol=2e-6, atol=tolerance)
    assert same(batch, before)


@pytest.mark.parametrize("name", CHANGES_INPUTS)
def test_inputs_are_a_pure_function_that_keeps_whose_they_are(name: str) -> None:
    for step in FIRST_AND_LAST:
        algorithm, given = METHODS[name](setup()), toy()
        before, state = copy.deepcopy(given), copy.deepcopy(algorithm.state_dict())
        torch.manual_seed(1)
        changed = mixed(algorithm, given, step)
        torch.manual_seed(2)  # torch's own generator has no say
        assert same(changed, mixed(algorithm, given, step)) and same(given, before)
        assert all(torch.equal(value, state[key]) for key, value in algorithm.state_dict().items())
        with torch.no_grad():
            for parameter in algorithm.parameters():
                parameter.normal_()
        assert same(changed, mixed(algorithm, given, step)), "a second pass must see the same inputs"
        assert changed.x.shape == given.x.shape and changed.x.dtype == given.x.dtype
        assert all(torch.equal(one, other) for one, other in zip(changed[1:5], given[1:5], strict=True))
        torch.testing.assert_close(changed.targets.sum(1), torch.ones(len(given.y)))
        assert changed.targets.min() >= 0


@pytest.mark.parametrize("name", CHANGES_INPUTS)
def test_inputs_of_one_head_are_the_same_alone_and_among_24(name: str) -> None:
    heads = [METHODS[name](setup(seed)) for seed in range(24)]
    batches = [partnered(head, toy(seed), 5) for seed, head in enumerate(heads)]
    fields = batches[0].fields()
    stacked = Batch(**{field: torch.stack([batch.fields()[field] for batch in batches]) for field in fields})
    _, buffers = stack_module_state(heads)
    together = InputMixing(heads[0]).of_heads(buffers, stacked, 5).fields()
    differ = False
    for place, (head, batch) in enumerate(zip(heads, batches, strict=True)):
        alone = head.on_inputs(batch, 5).fields()
        assert alone.keys() == together.keys()
        differ = differ or not torch.equal(alone["x"], batch.x)
        for key, value in alone.items():
            torch.testing.assert_close(together[key][place], value, atol=1e-6, rtol=1e-6, msg=key)
    assert differ


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


@pytest.mark.parametrize("name", METHODS)
def test_an_update_trains_on_all_domains_and_goes_nowhere_by_itself(name: str) -> None:
    gradients = METHODS[name].gradients_per_step(DOMAINS)
    if name in SOLVERS:
        assert gradients == 0
        return
    algorithm = METHODS[name](setup())
    parameters = dict(algorithm.named_parameters())
    before = {key: value.detach().clone() for key, value in parameters.items()}
    for step in FIRST_AND_LAST:
        asked = list(algorithm.update(parameters, dict(algorithm.named_buffers()), step))
        assert len(asked) == gradients
        assert asked == [None] if name not in HAS_UPDATE else sorted(asked) == list(range(DOMAINS))  # type: ignore
        assert all(torch.equal(value, before[key]) for key, value in parameters.items())
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


HOOKS = {name for c in (Method, Algorithm) for name in vars(c) if not name.startswith("_")}
HOOKS -= {"source", "loss", "search_ranges"}  # every method has these


def replaced_by(cls: type[Any]) -> set[str]:
    """Hooks that its own file or a base beside another component replaces, in the class or for an instance."""
    concrete = {other for other in METHODS.values() if other is not cls} | {Method, Algorithm, Solver}
    bases = [c for c in cls.__mro__ if c not in concrete and c.__module__.startswith("xdm_ft.algorithms.")]
    return {name for c in bases for name in [*vars(c), *re.findall(r"self\.(\w+) = ", inspect.getsource(c))]} & HOOKS


def test_contributing_names_all_that_a_method_may_read() -> None:
    """What `loss` gets, and what the base class has beyond hooks and torch's own."""
    contributing = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
    text = contributing.read_text(encoding="utf-8")
    section = text.partition("### What a method may read")[2].partition("\n### ")[0]
    named = {word for span in re.findall(r"`([^`]+)`", section) for word in re.findall(r"\w+", span)}
    of_task = {name for name in vars(Task) if name.startswith("num_")} | {f.name for f in dataclasses.fields(Task)}
    given = {*Batch._fields, *of_task, *(f.name for f in dataclasses.fields(Setup))}
    assert {"domain", "num_domains", "width"} <= given <= named
    instance = find("algorithms", "erm")(Setup(TASK, width=4, steps=1, seed=0))
    assert {"head", "logits", "average", "by_domain", *dict(instance.named_buffers(recurse=False))} <= named


def test_the_table_of_hooks_is_what_the_code_does() -> None:
    contributing = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
    section = contributing.read_text(encoding="utf-8").partition("### Hooks of a method")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\w, ]+) \|$", section, flags=re.MULTILINE)
    assert len(rows) > 10
    in_the_code = {cls.__name__: replaced_by(cls) for cls in METHODS.values()}
    in_the_table = {name: {hook for hook, methods in rows if name in methods.split(", ")} for name in in_the_code}
    assert in_the_table == in_the_code
