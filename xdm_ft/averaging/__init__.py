"""One file per way to average weights over a training: `ALGORITHM+NAME` in a recipe.

What the optimizer does is left as it is; only the weights that the training ends with are others. The file's stem is
its name in a recipe; its class's constructor keywords are recipe keys, with that name before them: `swad.n_converge`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

Tensors = dict[str, Tensor]  # parameter name → value


class Segment(NamedTuple):
    """The mean of the weights after steps first…last, numbers of steps taken, the last of which was evaluated."""

    first: int
    last: int
    mean: Tensors

    def merged_with(self, later: Segment) -> Segment:
        """The mean of both, each step counting the same. `later` begins where this one ends."""
        share = (later.last - later.first + 1) / (later.last - self.first + 1)
        mean = {name: value.lerp(later.mean[name], share) for name, value in self.mean.items()}
        return Segment(self.first, later.last, mean)


class Average(ABC):
    """The average of ONE model, as far as its training has come."""

    @abstractmethod
    def add(self, segment: Segment, loss: float) -> None:
        """The next segment, and the loss at its end on the training domains' validation images."""

    @abstractmethod
    def result(self) -> Segment:
        """What the training ends with, after all segments (at least one)."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that `add` has moved, for `load_state`: tensors, numbers, text, None, in lists, tuples and dicts."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. What were tuples are lists now."""


class Averaging(ABC):
    """The settings, from which every model's average starts anew."""

    source: str = ""
    reads_loss: bool = True  # whether the average looks at the validation loss

    @abstractmethod
    def begin(self) -> Average: ...


class Interval(Averaging):
    """The mean of the weights after steps first…last, known beforehand. Evaluations must fall on first − 1 and last."""

    reads_loss = False

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def begin(self) -> Average:
        return _IntervalMean(self.first, self.last)


class _IntervalMean(Average):
    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.joined: Segment | None = None

    def add(self, segment: Segment, loss: float) -> None:
        if self.first <= segment.first and segment.last <= self.last:
            self.joined = segment if self.joined is None else self.joined.merged_with(segment)

    def result(self) -> Segment:
        assert self.joined is not None, f"no segment lies between the steps {self.first} and {self.last}"
        return self.joined

    def state(self) -> dict[str, Any]:
        return {"joined": self.joined}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.joined = None if state["joined"] is None else Segment(*state["joined"])
