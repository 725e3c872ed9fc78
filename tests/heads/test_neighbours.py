"""The head of stored training features against a loop over images and keys; its memory and its loading."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.heads import neighbours
from xdm_ft.heads.neighbours import Neighbours

CLASSES, WIDTH, IMAGES = 3, 5, 20


def keys(seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(IMAGES, WIDTH, generator=torch.Generator().manual_seed(seed)))


def labels() -> Tensor:
    return torch.arange(IMAGES) * 7 % CLASSES


def queries() -> Tensor:
    return 3 * torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(9))


def head(k: int, temperature: float = 0.07, seed: int = 0) -> Neighbours:
    made = Neighbours(WIDTH, CLASSES, 0, 0)
    state = {"keys": keys(seed), "labels": labels(), "k": torch.tensor(k), "temperature": torch.tensor(temperature)}
    made.load_state_dict(state)
    return made


def naive(z: Tensor, k: int, temperature: float) -> list[list[float]]:
    """Probabilities of each image, in float64."""
    found = []
    for image in z.double():
        cosines = [float(image @ key / image.norm()) for key in keys().double()]
        nearest = sorted(range(IMAGES), key=lambda i, of=cosines: -of[i])[:k]
        votes = [0.0] * CLASSES
        for i in nearest:
            votes[int(labels()[i])] += math.exp(cosines[i] / temperature)
        count = min(k, IMAGES)
        found.append([(count * v / sum(votes) + 1 / CLASSES) / (count + 1) for v in votes])
    return found


@pytest.mark.parametrize("temperature", [0.02, 1.0])
@pytest.mark.parametrize("k", [1, 4, IMAGES, 100])
def test_the_vote_is_that_of_a_loop(k: int, temperature: float) -> None:
    probabilities = head(k, temperature)(queries()).exp()
    torch.testing.assert_close(probabilities, torch.tensor(naive(queries(), k, temperature)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(11))


def test_an_image_of_the_training_set_finds_itself() -> None:
    assert torch.equal(head(1)(keys()).argmax(1), labels())


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = head(4)(queries())
    monkeypatch.setattr(neighbours, "VALUES_AT_ONCE", 3 * IMAGES)
    seen = list[int]()
    monkeypatch.setattr(
        neighbours, "vote", lambda z, *rest, own=neighbours.vote: (seen.append(len(z)), own(z, *rest))[1]
    )
    torch.testing.assert_close(head(4)(queries()), whole)
    assert seen == [3, 3, 3, 2]


def test_stacked_heads_are_the_heads_one_by_one_each_with_its_own_k() -> None:
    heads = [head(k, temperature, seed) for seed, (k, temperature) in enumerate([(1, 0.1), (5, 0.1), (5, 1.0)])]
    state = {name: torch.stack([one.state_dict()[name] for one in heads]) for name in heads[0].state_dict()}
    stacked = Neighbours(WIDTH, CLASSES, 0, 0).stacked_logits(queries(), state)  # [n,H,C]
    for h, one in enumerate(heads):
        torch.testing.assert_close(stacked[:, h], one(queries()))


@pytest.mark.parametrize("assign", [False, True])
def test_it_loads_any_number_of_images_and_refuses_another_width(assign: bool) -> None:
    given, other = head(4), head(2)
    other.load_state_dict({**given.state_dict(), "keys": keys()[:7], "labels": labels()[:7]}, assign=assign)
    assert len(other.keys) == len(other.labels) == 7 and other.nearest == 4
    torch.testing.assert_close(copy.deepcopy(other)(queries()), other(queries()))
    with pytest.raises(RuntimeError, match="size mismatch for keys"):
        Neighbours(WIDTH + 1, CLASSES, 0, 0).load_state_dict(given.state_dict())


def test_without_training_images_all_classes_are_equal() -> None:
    torch.testing.assert_close(
        Neighbours(WIDTH, CLASSES, 0, 0)(queries()).exp(), torch.full((11, CLASSES), 1 / CLASSES)
    )


def test_gradients_are_finite_at_features_of_zeros() -> None:
    z = torch.zeros(3, WIDTH, requires_grad=True)
    head(4)(z).sum().backward()
    assert z.grad is not None and z.grad.isfinite().all()
