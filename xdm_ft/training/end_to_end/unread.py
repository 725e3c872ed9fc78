"""The scalars of the last steps, which the host reads some steps later: it never waits for the step it has just begun.

On a GPU the host only queues work. A `float(loss)` would make it wait until the whole queue is done, and then the GPU
until the host has queued the next step. So the loss of a step, and whether a process was asked to stop, are copied to
the host's memory as part of the queue, and read when AHEAD more steps are queued. Every process reads the same values
after the same step, so that all of them end at the same step. On a CPU each step is read at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xdm_ft.training.end_to_end.gradients import StepLosses

AHEAD = 2  # steps that a GPU has in its queue: with fewer it waits for the host between them


class Read(NamedTuple):
    """A step, as the host knows it."""

    step: int
    total: float  # `Losses.total`
    loss: float  # the sum of all losses: finite only if each of them is
    stop: bool  # whether a process has received a signal to stop
    skipped: bool  # whether the gradient scaler has skipped its update
    scalars: dict[str, Tensor]  # to record, on the device


class UnreadSteps:
    """The steps whose scalars the host has not read yet, in order."""

    def __init__(self, device: torch.device) -> None:
        self.ahead = AHEAD if device.type == "cuda" else 0
        self._steps: deque[tuple[int, Tensor, bool, dict[str, Tensor], torch.cuda.Event | None]] = deque()

    def add(self, step: int, losses: StepLosses, skipped: bool) -> None:
        """Adds the last step, and begins to copy its scalars to the host."""
        values = torch.stack([losses.total, losses.loss, losses.stop]).to("cpu", non_blocking=True)
        copied = None
        if losses.total.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._steps.append((step, values, skipped, losses.scalars, copied))

    def read(self, all_of_them: bool) -> Iterator[Read]:
        """Yields and forgets the oldest steps: all but the last `ahead`, or all, for which the host waits."""
        while len(self._steps) > (0 if all_of_them else self.ahead):
            step, values, skipped, scalars, copied = self._steps.popleft()
            if copied is not None:
                copied.synchronize()
            total, loss, stop = values.tolist()
            yield Read(step, total, loss, stop > 0, skipped, scalars)

    def state(self) -> list[Any]:
        """Returns the steps as a checkpoint stores them; the host waits for their scalars."""
        for *_, copied in self._steps:
            if copied is not None:
                copied.synchronize()
        return [list(one[:4]) for one in self._steps]

    def load_state(self, state: list[Any]) -> None:
        self._steps = deque((step, values, skipped, scalars, None) for step, values, skipped, scalars in state)
