"""Averages of the weights of models while they train, for methods with an averaging (`+swad`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from xdm_ft.averaging import Averaging, Segment, Tensors
from xdm_ft.training import Selected

LOSS_SPLIT = "train_val"
"""The validation images whose loss decides which steps an average contains, under every selection rule."""


class Averages:
    """The averages of H models that train together. Parameters are stacked, [H,…]; a single model has H = 1."""

    def __init__(self, averagings: Sequence[Averaging], first_step: int, steps: int) -> None:
        """One `Averaging` per model, all of one kind. `steps`: the length of the training.

        Weights after fewer than `first_step` steps are ignored, unless the kind begins with those before training.
        """
        self.averagings, self.steps = averagings, steps
        self.averages = [averaging.begin() for averaging in averagings]
        self.first_step = 0 if averagings[0].from_start else first_step
        self.mean: Tensors = {}  # mean of the weights after each step since the last evaluation
        self.count = 0  # number of those steps
        self.weights = [0.0 for _ in averagings]  # sum of each head's factors of those steps
        self.broken_at: dict[int, int] = {}  # head → number of steps at its first validation loss that is not finite

    @torch.no_grad()
    def add(self, taken: int, parameters: Tensors) -> None:
        """Adds the weights after `taken` steps to the mean since the last evaluation."""
        if taken < self.first_step or (taken == 0 and self.count):
            return  # a training that stopped before its first step has added the weights of step 0 already
        self.count += 1
        factors = [averaging.weight(taken, self.steps) for averaging in self.averagings]
        if self.count == 1:
            self.weights = factors
            self.mean = {name: value.detach().clone() for name, value in parameters.items()}
            return
        self.weights = [weight + factor for weight, factor in zip(self.weights, factors, strict=True)]
        shares = [factor / weight for factor, weight in zip(factors, self.weights, strict=True)]
        if len(set(shares)) == 1:
            torch._foreach_lerp_([*self.mean.values()], [parameters[name] for name in self.mean], shares[0])
            return
        for name, mean in self.mean.items():  # [H,…]
            share = torch.tensor(shares, dtype=mean.dtype, device=mean.device).view(-1, *[1] * (mean.dim() - 1))
            mean.lerp_(parameters[name], share)

    def evaluated(self, taken: int, losses: Sequence[float | None], ended: Collection[int] = ()) -> None:
        """Passes the mean since the last evaluation, and the validation loss, to the average of every head.

        `losses`: each head's validation loss after `taken` steps; None if it is not finite. `ended`: heads whose
        training ended at an earlier evaluation; their averages do not change.
        """
        if self.count == 0:
            return
        means = {name: value.cpu() for name, value in self.mean.items()}  # one copy from the device for all heads
        for head, (average, loss) in enumerate(zip(self.averages, losses, strict=True)):
            if head in ended:
                continue
            if loss is None:
                self.broken_at.setdefault(head, taken)
            elif head not in self.broken_at:
                mean = {name: value[head].clone() for name, value in means.items()}
                average.add(Segment(taken - self.count + 1, taken, mean, self.weights[head]), loss)
        self.count = 0

    def nothing_averaged(self, head: int) -> str | None:
        """Returns why a head has no average; None if it has one."""
        if head not in self.broken_at:
            return None
        return f"the loss of the {LOSS_SPLIT} images was not finite after step {self.broken_at[head]}"

    def state(self) -> dict[str, Any]:
        return {
            "averages": [average.state() for average in self.averages],
            "mean": self.mean if self.count else {},
            "count": self.count,
            "weights": self.weights,
            "broken_at": self.broken_at,
        }

    def load_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.load_state(saved)
        self.mean = {name: value.to(device) for name, value in state["mean"].items()}
        self.count, self.weights, self.broken_at = state["count"], state["weights"], state["broken_at"]

    def selected(self, head: int, complete: Callable[[Tensors], Tensors], rules: Sequence[str]) -> dict[str, Selected]:
        """Returns the same average for every rule, as no rule picks a step.

        `complete`: averaged parameters → the state of a model.
        """
        average = self.averages[head].result()
        selected = Selected(average.last, complete(average.mean), {"averaged_from": average.first})
        return dict.fromkeys(rules, selected)
