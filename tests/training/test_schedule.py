"""The learning rate's course, by values worked out by hand."""

import pytest
import torch

from xdm_ft.training import Schedule


def course(steps: int, **settings: object) -> list[float]:
    return [Schedule(**settings).factor(step, steps) for step in range(steps)]


def test_constant() -> None:
    assert course(3) == [1.0, 1.0, 1.0]


def test_constant_with_warm_up() -> None:
    assert course(6, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine() -> None:
    half = 0.5**0.5
    expected = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert course(4, name="cosine") == pytest.approx(expected)


def test_cosine_with_warm_up() -> None:
    assert course(4, name="cosine", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5])


def test_cosine_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    theirs = []
    for _ in range(50):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert course(50, name="cosine") == pytest.approx(theirs, abs=1e-9)
