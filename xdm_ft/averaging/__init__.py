"""Averages of a model's weights over the steps of its training, one kind per file: `ALGORITHM+NAME` in a recipe.

The optimizer is not affected: only the final weights are replaced by the average. The file's stem is the name in a
recipe. The class's constructor keywords are recipe keys with that name as prefix: `swad.n_converge`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from xdm_ft.core import Tensors
from xdm_ft.runtime.settings import SearchRanges


class Segment(NamedTuple):
    """The mean of the weights after the steps first…last, counted from 1; 0 is before the first step.

    The model was evaluated after the last.
    """

    first: int
    last: int
    mean: Tensors
    weight: float  # sum of `Averaging.weight` of its steps: their number, if every step has the same weight

    def merged_with(self, later: Segment) -> Segment:
        """The mean over the steps of both segments. `later` must begin at the step after `last`."""
        weight = self.weight + later.weight
        mean = {name: value.lerp(later.mean[name], later.weight / weight) for name, value in self.mean.items()}
        return Segment(self.first, later.last, mean, weight)


class Average(ABC):
    """The average of ONE model up to the present step of its training."""

    @abstractmethod
    def add(self, segment: Segment, loss: float) -> None:
        """Adds the next segment; `loss` is that at its end, on validation images of the training domains."""

    @abstractmethod
    def result(self) -> Segment:
        """Returns the steps that were averaged and their mean, after all segments (at least one) were added."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that `add` has changed, for `load_state`: tensors, numbers, text, None, in lists, tuples and dicts."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned. Tuples may have become lists."""


class Averaging(ABC):
    """The settings of an average. `begin` makes a new, empty average for one model."""

    source: str = ""  # paper and equation
    reads_loss: bool = True  # whether `Average.add` uses the validation loss
    # whether segments begin with the weights before training, step 0; False: with those of the first selectable step
    from_start: bool = False
    search_ranges: SearchRanges = {}  # constructor keyword → range, for the presets of a search

    @abstractmethod
    def begin(self) -> Average: ...

    def weight(self, step: int, steps: int) -> float:
        """Returns the factor, above 0, of the weights after `step` of `steps` steps in the mean of a segment."""
        return 1.0


class FixedInterval(Averaging):
    """The mean over the steps first…last, which are known beforehand.

    The model must be evaluated after the steps first − 1 and last, so that segments begin and end there.
    """

    reads_loss = False

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def begin(self) -> Average:
        return MeanOfSegments(self.first, self.last)


class MeanOfSegments(Average):
    """The mean of all segments that lie between two steps."""

    def __init__(self, first: int = 0, last: int = sys.maxsize) -> None:
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
