"""What every method promises, over whatever lies in `xdm_ft/algorithms/`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from partnered import mixed
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from xdm_ft.algorithms import Algorithm, Setup, Solver
from xdm_ft.recipe.components import find, names
from xdm_ft.runtime.tensors import Batch, Losses, Task

METHODS = {name: find("algorithms", name) for name in names("algorithms")}
HEADS = {name: cls for name in names("heads") if (cls := find("heads", name)).trained}
ALGORITHMS = sorted(name for name, cls in METHODS.items() if issubclass(cls, Algorithm))
REFUSED = [name for name in ALGORITHMS if METHODS[name].frozen_reason]  # with a frozen encoder
SOLVERS = sorted(name for name, cls in METHODS.items() if issubclass(cls, Solver))

WIDTH, CLASSES, DOMAINS, PER_DOMAIN, STEPS = 20, 3, 3, 12, 60
TASK = Task(tuple("abc"), tuple("xyz"))


def setup(seed: int = 0, **more: Any) -> Setup:
    text = nn.functional.normalize(torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9)))
    return Setup(TASK, WIDTH, STEPS, seed, text_weight=10 * text, **more)


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


TRAINED = [name for name in ALGORITHMS if any(p.requires_grad for p in METHODS[name](setup()).parameters())]


def test_there_are_methods_to_test() -> None:
    assert len(ALGORITHMS) >= 2 and len(TRAINED) >= len(ALGORITHMS) - 1
    assert len(ALGORITHMS) + len(SOLVERS) == len(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_says_what_it_is(name: str) -> None:
    cls = METHODS[name]
    assert cls.source and cls.__doc__ and cls.min_domains >= 1
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        if key not in ("self", "setup"):
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"{key} must be keyword only to be a recipe key"
            assert parameter.default is not inspect.Parameter.empty or key in cls.__doc__


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


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("name", [name for name in REFUSED if name in TRAINED])
def test_refused_on_cached_features_because_it_is_erm_there(name: str, step: int) -> None:
    """The gradient of the head is ERM's."""
    assert "\n" not in METHODS[name].frozen_reason
    batch, methods = toy(), [METHODS[name](setup()), METHODS["erm"](setup())]
    own, plain = (torch.autograd.grad(m(batch.x, batch, step).total, list(m.parameters())) for m in methods)
    torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in TRAINED])
def test_a_method_without_parameters_to_train_is_refused_on_cached_features(name: str) -> None:
    assert "nothing trains" in METHODS[name].frozen_reason and "\n" not in METHODS[name].frozen_reason
    assert METHODS[name].needs_text, "a fixed head comes from the text side"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resets_the_optimizer_rarely(name: str) -> None:
    """A reset at every step would take the momentum away altogether."""
    algorithm = METHODS[name](setup())
    assert sum(algorithm.resets_optimizer(step) for step in range(STEPS)) <= 1


@pytest.mark.parametrize("loss_average", ["domain", "sample"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_losses_are_scalars_of_float32(name: str, loss_average: str) -> None:
    for step in (0, STEPS - 1):
        losses = METHODS[name](setup(loss_average=loss_average))(toy().x, toy(), step)
        for scalar in (losses.total, losses.auxiliary, *losses.logs.values()):
            assert scalar.shape == () and scalar.dtype == torch.float32 and scalar.isfinite()


@pytest.mark.parametrize("name", TRAINED)
def test_same_seed_same_numbers(name: str) -> None:
    def trained(seed: int) -> tuple[list[float], dict[str, Tensor]]:
        algorithm = METHODS[name](setup(seed))
        return train(algorithm, 0, STEPS), algorithm.state_dict()

    torch.manual_seed(1)
    totals, state = trained(3)
    torch.manual_seed(2)  # torch's own generator has no say
    again, state_again = trained(3)
    assert totals == again
    assert all(torch.equal(value, state_again[key]) for key, value in state.items())
    assert trained(4)[0] != totals


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_reach_exactly_the_parameters_they_should(name: str, step: int) -> None:
    algorithm = METHODS[name](setup())
    losses = algorithm(toy().x, toy(), step)
    for loss, auxiliary in ((losses.total, False), (losses.auxiliary, True)):
        algorithm.zero_grad()
        if loss.requires_grad:
            loss.backward(retain_graph=True)
        reached = {key for key, p in algorithm.named_parameters() if p.grad is not None and p.grad.any()}
        meant = {
            key for key, _ in algorithm.named_parameters() if (key.split(".")[0] in algorithm.auxiliary) == auxiliary
        }
        assert reached == meant


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_features_get_gradient_from_the_total_alone(name: str, step: int) -> None:
    batch = toy()
    z = batch.x.clone().requires_grad_()
    losses = METHODS[name](setup())(z, batch, step)
    assert torch.autograd.grad(losses.total, z, retain_graph=True)[0].any()
    if losses.auxiliary.requires_grad:
        assert torch.autograd.grad(losses.auxiliary, z, allow_unused=True) == (None,)


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_changes_nothing(name: str, step: int) -> None:
    algorithm, batch = METHODS[name](setup()), toy()
    state = {key: value.clone() for key, value in algorithm.state_dict().items()}
    inputs = [field.clone() for field in batch if field is not None]
    losses = algorithm(batch.x, batch, step)
    assert_same(losses, algorithm(batch.x, batch, step))  # a pure function
    assert all(torch.equal(value, state[key]) for key, value in algorithm.state_dict().items())
    assert all(torch.equal(x, copy) for x, copy in zip((f for f in batch if f is not None), inputs, strict=True))
    buffers = dict(algorithm.named_buffers())
    for key, value in losses.buffers.items():
        assert value.shape == buffers[key].shape and value.dtype == buffers[key].dtype and not value.requires_grad


@pytest.mark.parametrize("name", TRAINED)
def test_saved_and_restored_in_the_middle(name: str) -> None:
    through = METHODS[name](setup())
    totals = train(through, 0, STEPS)
    first = METHODS[name](setup())
    train(first, 0, STEPS - 5)
    second = METHODS[name](setup(seed=8))  # its own initialisation must not matter
    second.load_state_dict(first.state_dict())
    assert train(second, STEPS - 5, STEPS) == totals[-5:]


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_second_pass_at_the_same_weights_is_the_first(name: str, step: int) -> None:
    algorithm, batch = METHODS[name](setup()), toy()
    losses = algorithm(batch.x, batch, step)
    assert all(not value.requires_grad for value in losses.first_pass_draws.values())
    assert_same(losses, algorithm(batch.x, batch, step, losses.first_pass_draws))


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_float32_under_autocast(name: str, step: int) -> None:
    algorithm, batch = METHODS[name](setup()), toy()
    losses = algorithm(batch.x, batch, step)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(losses, algorithm(batch.x, batch, step))


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", TRAINED)
def test_one_head_is_the_same_alone_and_among_24(name: str, head: str, step: int) -> None:
    """Losses, gradients and buffers of heads of different seeds and batches, stacked and one by one."""
    heads = [METHODS[name](setup(seed, head=HEADS[head])) for seed in range(24)]
    batches = [toy(seed) for seed in range(24)]
    parameters, buffers = stack_module_state(heads)
    stacked = [torch.stack(field) for field in list(zip(*batches, strict=True))[:5]]

    def one(
        parameters: dict, buffers: dict, x: Tensor, y: Tensor, domain: Tensor, index: Tensor, place: Tensor
    ) -> Losses:
        return functional_call(heads[0], (parameters, buffers), (x, Batch(x, y, domain, index, place), step))

    together = vmap(one)(parameters, buffers, *stacked)
    gradients = torch.autograd.grad((together.total + together.auxiliary).sum(), list(parameters.values()))
    for place, (head, batch) in enumerate(zip(heads, batches, strict=True)):
        alone = head(batch.x, batch, step)
        for key, value in flat(alone).items():
            torch.testing.assert_close(flat(together)[key][place], value, atol=1e-6, rtol=1e-6, msg=key)
        own = torch.autograd.grad(alone.total + alone.auxiliary, list(head.parameters()))
        for stack, gradient in zip(gradients, own, strict=True):
            atol = 1e-6 * max(1.0, float(gradient.abs().max()))  # rounding is that of the terms which cancel
            torch.testing.assert_close(stack[place], gradient, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("missing", ["one domain", "one class", "one sample"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", TRAINED)
def test_a_batch_with_little_in_it(name: str, head: str, missing: str, step: int) -> None:
    """Sampling can leave a domain or a class out: the loss is finite all the same, and so are its gradients."""
    batch = toy()
    keep = {"one domain": batch.domain == 1, "one class": batch.y == 2, "one sample": torch.arange(len(batch.y)) == 4}
    few = Batch(*(field[keep[missing]] for field in batch[:5]))
    algorithm = METHODS[name](setup(head=HEADS[head]))
    losses = algorithm(few.x, few, step)
    assert losses.total.isfinite() and losses.auxiliary.isfinite()
    (losses.total + losses.auxiliary).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in algorithm.parameters())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_starts_from_the_text_where_asked(name: str) -> None:
    given = setup(head_init="zero_shot")
    head = METHODS[name](given).head
    assert torch.equal(head.weight, given.text_weight) and not head.bias.any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_selectable_steps_and_mixed_steps(name: str) -> None:
    algorithm = METHODS[name](setup())
    assert 1 <= algorithm.first_selectable_step <= STEPS
    mixed = algorithm.mixed_steps(STEPS)
    assert mixed is None or 0 < mixed <= STEPS
    assert mixed is None or mixed == STEPS - algorithm.first_selectable_step + 1


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_offer_finite_heads_deterministically(name: str) -> None:
    batch = toy()
    inputs = [field.clone() for field in batch[:5]]
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
        torch.testing.assert_close(solver.stacked_logits(batch.x, stacked)[:, 1], logits)
    assert all(torch.equal(x, copy) for x, copy in zip(batch[:5], inputs, strict=True))
