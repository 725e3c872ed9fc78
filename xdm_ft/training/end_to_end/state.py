"""What a training end to end has come to: all that its steps move, as a checkpoint keeps it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from xdm_ft.storage.checkpoint import State
from xdm_ft.training.averages import Averages
from xdm_ft.training.end_to_end.gradients import EndToEnd
from xdm_ft.training.running_means import RunningMeans
from xdm_ft.training.selection import Selector

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    means: RunningMeans = field(default_factory=RunningMeans)
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
            "means": self.means.state(),
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
        self.means.load_state(state["means"])
        self.taken, self.evaluated, self.before = state["taken"], state["evaluated"], state["seconds"]
        self.skipped = state["skipped"]
