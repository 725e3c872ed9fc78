"""What every head promises, over whatever lies in `xdm_ft/heads/`."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from xdm_ft.heads import Head
from xdm_ft.recipe.components import find, names
from xdm_ft.runtime.randomness import Stream

EVERY: dict[str, type[Head]] = {name: find("heads", name) for name in names("heads")}
HEADS = {name: cls for name, cls in EVERY.items() if cls.trained}
WIDTH, CLASSES = 12, 5


def made(name: str, seed: int = 0, stream: int = Stream.INIT) -> Head:
    return HEADS[name](WIDTH, CLASSES, seed, stream)


def features(n: int = 7) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(0))


def text_weight() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 20 * torch.nn.functional.normalize(torch.randn(CLASSES, WIDTH, generator=generator))


def test_there_are_heads_to_test() -> None:
    assert {"linear", "cosine", "mlp"} <= HEADS.keys()


@pytest.mark.parametrize("name", [name for name in EVERY if name not in HEADS])
def test_a_head_that_gradients_can_not_train_has_no_parameters_and_a_solver(name: str) -> None:
    assert not list(EVERY[name](WIDTH, CLASSES, 0, 0).parameters()) and EVERY[name].text_reason
    assert name in {getattr(find("algorithms", method), "head_kind", None) for method in names("algorithms")}


@pytest.mark.parametrize("name", EVERY)
def test_says_what_it_is(name: str) -> None:
    cls = EVERY[name]
    assert cls.source and cls.__doc__
    positional = [
        key
        for key, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert positional == ["self", "width", "outputs", "seed", "stream"]


@pytest.mark.parametrize("name", HEADS)
def test_starts_as_a_function_of_seed_and_stream_alone(name: str) -> None:
    first = made(name).state_dict()
    torch.manual_seed(99)
    again, other, elsewhere = made(name), made(name, seed=1), made(name, stream=Stream.DOMAIN_INIT)
    for key, value in first.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again.state_dict()[key])
    for changed in (other, elsewhere):
        assert any(not torch.equal(value, changed.state_dict()[key]) for key, value in first.items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_stacked_heads_are_the_heads_one_by_one(name: str, training: bool) -> None:
    """Under vmap, each on its own features, and by `stacked_logits`, all on the same ones."""
    heads = [made(name, seed).train(training) for seed in range(6)]
    parameters, buffers = stack_module_state(heads)
    assert not buffers
    own = torch.stack([features() + h for h in range(6)])
    mapped = vmap(lambda state, z: functional_call(heads[0], state, (z,)))(parameters, own)
    shared = heads[0].stacked_logits(features(), parameters)
    assert shared.shape == (7, 6, CLASSES)
    for h, head in enumerate(heads):
        torch.testing.assert_close(mapped[h], head(own[h]))
        torch.testing.assert_close(shared[:, h], head(features()))


@pytest.mark.parametrize("name", HEADS)
def test_samples_are_independent_and_eval_mode_changes_nothing(name: str) -> None:
    head, z = made(name), features()
    logits = head(z)
    assert logits.shape == (7, CLASSES) and head(z[:0]).shape == (0, CLASSES)
    torch.testing.assert_close(head(z[3:4]), logits[3:4])
    torch.testing.assert_close(head.eval()(z), logits)
    assert head.values_per_image >= CLASSES


@pytest.mark.parametrize("name", HEADS)
def test_gradients_are_finite_at_features_of_zeros(name: str) -> None:
    head, z = made(name), torch.zeros(3, WIDTH, requires_grad=True)
    head(z).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in [z, *head.parameters()])


@pytest.mark.parametrize("name", HEADS)
def test_starts_from_class_embeddings_or_says_why_not(name: str) -> None:
    head, z = made(name), torch.nn.functional.normalize(features())
    if head.text_reason:
        with pytest.raises(NotImplementedError):
            head.start_from_text(text_weight())
        return
    head.start_from_text(text_weight())
    torch.testing.assert_close(head(z), z @ text_weight().T, atol=1e-5, rtol=1e-5)
    longer = head(3 * z) if head.normalizes else 3 * head(z)
    torch.testing.assert_close(head(3 * z), longer)
