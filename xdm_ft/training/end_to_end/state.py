"""What a training end to end has come to: all that its steps move, as a checkpoint keeps it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from xdm_ft.storage.checkpoint import State
from xdm_ft.training.averages import Averages
from xdm_ft.training.end_to_end.gradients import EndToEnd, StepLosses
from xdm_ft.training.selection import Selector

if TYPE_CHECKING:
    from accelerate import Accelerator


class Course:
    """Means of the losses and of what the algorithm logs, since the last time they were asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, losses: StepLosses) -> None:
        for name, value in {"loss": losses.total, "auxiliary_loss": losses.auxiliary, **losses.logs}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        return means

    def state(self) -> State:
        return {"sums": self.sums, "counts": self.counts}

    def load_state(self, state: State, device: torch.device) -> None:
        self.sums = {name: value.to(device) for name, value in state["sums"].items()}
        self.counts = state["counts"]


@dataclass
class LoopState:
    """Every process has the same, so that one of them writes it and each goes on from it.

    What a step draws is a function of its number, which is all that batches and random streams need.
    """

    inner: EndToEnd
    optimizer: Optimizer
    selector: Selector
    averages: Averages | None
    accelerator: Accelerator
    course: Course = field(default_factory=Course)
    taken: int = 0  # steps
    evaluated: bool = True  # whether the evaluation after them, if one is due, is done
    started: float = field(default_factory=time.perf_counter)
    skipped: int = 0  # steps in a row without a finite loss or gradient, which the gradient scaler skips
    before: float = 0.0  # seconds that interrupted processes have trained it

    def __post_init__(self) -> None:
        if self.accelerator.scaler is not None:
            # one scaler serves all models of a process, and each must begin as if it were the first
            self.accelerator.scaler.load_state_dict(torch.amp.GradScaler(self.accelerator.device.type).state_dict())

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def state(self) -> State:
        scaler = self.accelerator.scaler
        return {
            "taken": self.taken,
            "evaluated": self.evaluated,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "weights": self.inner.named_weights(),
            "optimizer": self.optimizer.state_dict()["state"],
            "scaler": None if scaler is None else scaler.state_dict(),
            "selector": self.selector.state(),
            "averages": None if self.averages is None else self.averages.state(),
            "course": self.course.state(),
        }

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        device = self.accelerator.device
        weights = self.inner.named_weights()
        for name, value in state["weights"].items():
            weights[name].copy_(value)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.selector.load_state(state["selector"])
        if self.averages is not None:
            self.averages.load_state(state["averages"], device)
        self.course.load_state(state["course"], device)
        self.taken, self.evaluated, self.before = state["taken"], state["evaluated"], state["seconds"]
        self.skipped = state["skipped"]
