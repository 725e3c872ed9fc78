"""What steps change besides the weights, in either engine: means of losses, the time, and what a checkpoint resumes."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from xdm_ft.core import Tensors
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.storage.checkpoint import Checkpoint, State
from xdm_ft.training.selection import Averages, Selector

logger = logging.getLogger("xdm_ft")
READ_STEPS = 256  # steps whose scalars are copied from the device at once


class RunningMeans:
    """Means over the steps since the last evaluation, of H models that train together.

    Scalars stay on the device and are copied in blocks, since each copy waits for the device.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[int, Tensors]] = []  # (step from 0, name → [H])
        self._sums: Tensors = {}
        self._counts: dict[str, int] = {}
        self._broken_at: dict[int, int] = {}  # head → first step whose loss is not finite

    def add(self, number: int, scalars: Tensors) -> None:
        self._pending.append((number, scalars))
        if len(self._pending) == READ_STEPS:
            self._read()

    def take(self) -> tuple[Tensors, dict[int, int]]:
        """Returns {name: mean [H] since the last call}, and {head: its first step with a loss that is not finite}."""
        self._read()
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means, self._broken_at

    def _read(self) -> None:
        for name in dict.fromkeys(name for _, scalars in self._pending for name in scalars):
            values = torch.stack([scalars[name] for _, scalars in self._pending if name in scalars]).cpu()  # [S,H]
            self._sums[name] = self._sums.get(name, torch.zeros(())) + values.sum(0)
            self._counts[name] = self._counts.get(name, 0) + len(values)
            if name in ("loss", "auxiliary_loss"):
                for index, head in torch.isfinite(values).logical_not().nonzero().tolist():
                    number = self._pending[index][0]
                    self._broken_at[head] = min(number, self._broken_at.get(head, number))
        self._pending = []

    def state(self) -> State:
        self._read()
        return {"sums": self._sums, "counts": self._counts, "broken_at": self._broken_at}

    def load_state(self, state: State) -> None:
        self._sums, self._counts, self._broken_at = state["sums"], state["counts"], state["broken_at"]


class TrainingState(ABC):
    """Everything that the steps of H models change, as a checkpoint stores it.

    There is no random state in it: batches and random draws are functions of the step's number.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        selectors: Sequence[Selector],
        averages: Averages | None,
        device: torch.device,
        checkpoint: Checkpoint | None,
        started: float,
    ) -> None:
        """`name`: of the training, for messages. `started`: time.perf_counter() at its start."""
        self.name, self.steps, self.device, self.checkpoint = name, steps, device, checkpoint
        self.selectors, self.averages = selectors, averages
        self.taken = 0  # number of steps taken
        self.means = RunningMeans()
        self._started, self._earlier_seconds = started, 0.0  # those of interrupted processes

    @property
    def seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._started

    @property
    def restarts(self) -> tuple[str, ...]:
        """The reason of each restart from the beginning."""
        return () if self.checkpoint is None else tuple(self.checkpoint.restarts)

    def state(self) -> State:
        return {
            "taken": self.taken,
            "seconds": self.seconds,
            "means": self.means.state(),
            "selectors": [selector.state() for selector in self.selectors],
            "averages": None if self.averages is None else self.averages.state(),
        }

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        self.taken, self._earlier_seconds = state["taken"], state["seconds"]
        self.means.load_state(state["means"])
        for selector, saved in zip(self.selectors, state["selectors"], strict=True):
            selector.load_state(saved)
        if self.averages is not None:
            self.averages.load_state(state["averages"], self.device)

    @abstractmethod
    def _settings(self) -> Mapping[str, Any]:
        """Returns what a checkpoint must have been written for, as JSON values."""

    def resume(self) -> None:
        """Loads the checkpoint that an interrupted process has left of this training, if there is one."""
        saved = None if self.checkpoint is None else self.checkpoint.load(self._settings())
        if saved is not None:
            self.load_state(saved)
            logger.info("%s: resumes after %d of %d steps", self.name, self.taken, self.steps)

    def save_if_due(self, event: bool) -> None:
        """`event`: an evaluation is done, which would be expensive to repeat."""
        if self.checkpoint is not None:
            self.checkpoint.save_if_due(self.state, event)

    def save_and_stop(self, wait: Callable[[], None] = lambda: None) -> NoReturn:
        """Saves the checkpoint, if the run keeps one, waits, and raises `Interrupted`."""
        if self.checkpoint is None:
            raise Interrupted
        self.checkpoint.save(self.state)
        wait()
        raise Interrupted(f"{self.name}: {self.taken} of {self.steps} steps")
