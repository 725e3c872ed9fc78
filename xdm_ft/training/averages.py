"""Weights averaged while models train, where a method asks for it (`+swad`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from xdm_ft.averaging import Averaging, Segment, Tensors
from xdm_ft.training import Selected

LOSS_SPLIT = "train_val"
"""The validation images whose loss an average looks at, whatever the selection rule."""


class Averages:
    """Of H models that train together. Parameters are stacked, [H,…]; a single model is a stack of one."""

    def __init__(self, averagings: Sequence[Averaging], first_step: int) -> None:
        """One `Averaging` per model. Weights after fewer steps than `first_step` are left out."""
        self.averages = [averaging.begin() for averaging in averagings]
        self.first_step = first_step
        self.mean: Tensors = {}  # of the weights since the last evaluation
        self.count = 0
        self.broken_at: dict[int, int] = {}  # head → steps taken at its first validation loss that is not finite

    @torch.no_grad()
    def add(self, taken: int, parameters: Tensors) -> None:
        """The weights after `taken` steps."""
        if taken < self.first_step:
            return
        self.count += 1
        if self.count == 1:
            self.mean = {name: value.detach().clone() for name, value in parameters.items()}
        else:
            for name, mean in self.mean.items():
                mean.lerp_(parameters[name], 1 / self.count)

    def evaluated(self, taken: int, losses: Sequence[float | None], ended: Collection[int] = ()) -> None:
        """The validation loss of every head after `taken` steps; None where it is not finite.

        The averages of the heads in `ended`, whose training was over at an earlier evaluation, stay what they are.
        """
        if self.count == 0:
            return
        for head, (average, loss) in enumerate(zip(self.averages, losses, strict=True)):
            if head in ended:
                continue
            if loss is None:
                self.broken_at.setdefault(head, taken)
            elif head not in self.broken_at:
                mean = {name: value[head].to("cpu", copy=True) for name, value in self.mean.items()}
                average.add(Segment(taken - self.count + 1, taken, mean), loss)
        self.count = 0

    def nothing_averaged(self, head: int) -> str | None:
        """Why a head has no average; None where it has one."""
        if head not in self.broken_at:
            return None
        return f"the loss of the {LOSS_SPLIT} images was not finite after step {self.broken_at[head]}"

    def state(self) -> dict[str, Any]:
        return {
            "averages": [average.state() for average in self.averages],
            "mean": self.mean if self.count else {},
            "count": self.count,
            "broken_at": self.broken_at,
        }

    def load_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        for average, of_head in zip(self.averages, state["averages"], strict=True):
            average.load_state(of_head)
        self.mean = {name: value.to(device) for name, value in state["mean"].items()}
        self.count, self.broken_at = state["count"], state["broken_at"]

    def selected(self, head: int, whole: Callable[[Tensors], Tensors], rules: Sequence[str]) -> dict[str, Selected]:
        """The average for every rule, as no step is picked. `whole` makes a model's state of averaged parameters."""
        average = self.averages[head].result()
        selected = Selected(average.last, whole(average.mean), {"averaged_from": average.first})
        return dict.fromkeys(rules, selected)
