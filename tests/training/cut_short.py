"""Trainings that end in the middle, for the tests of resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from xdm_ft.storage.checkpoint import Checkpoint, Pace, State
from xdm_ft.training import Trained


class Killed(Exception):
    pass


class Cut(Checkpoint):
    """Saves after every step, and the process dies after having saved `lives` times."""

    def __init__(self, path: Path, lives: int = 10**9, **about: Any) -> None:
        super().__init__(path, about, Pace())
        self.lives = lives

    def save_if_due(self, state: Callable[[], State], event: bool = False) -> None:
        self.save(state)
        self.lives -= 1
        if self.lives == 0:
            raise Killed


def assert_same(got: Trained, expected: Trained) -> None:
    assert got.failure is None and expected.failure is None
    assert got.course == expected.course
    assert got.selected.keys() == expected.selected.keys()
    for rule, selected in expected.selected.items():
        assert (got.selected[rule].step, got.selected[rule].hparams) == (selected.step, selected.hparams)
        assert got.selected[rule].state.keys() == selected.state.keys()
        for name, value in selected.state.items():
            assert torch.equal(got.selected[rule].state[name], value), (rule, name)
    shared = [len({id(selected.state) for selected in trained.selected.values()}) for trained in (got, expected)]
    assert shared[0] == shared[1], "rules that picked the same share it"
