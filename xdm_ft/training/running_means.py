"""Means of losses and logged scalars over the steps between two evaluations."""

from __future__ import annotations

import torch

from xdm_ft.sharpness import Tensors
from xdm_ft.storage.checkpoint import State

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
                for place, head in torch.isfinite(values).logical_not().nonzero().tolist():
                    number = self._pending[place][0]
                    self._broken_at[head] = min(number, self._broken_at.get(head, number))
        self._pending = []

    def state(self) -> State:
        self._read()
        return {"sums": self._sums, "counts": self._counts, "broken_at": self._broken_at}

    def load_state(self, state: State) -> None:
        self._sums, self._counts, self._broken_at = state["sums"], state["counts"], state["broken_at"]
