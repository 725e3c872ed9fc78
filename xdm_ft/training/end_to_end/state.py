"""The state of an end-to-end training: everything that its steps change, as a checkpoint stores it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from xdm_ft.storage.checkpoint import State
from xdm_ft.training.averages import Averages
from xdm_ft.training.end_to_end.model import EndToEnd, Roles
from xdm_ft.training.end_to_end.unread import UnreadSteps
from xdm_ft.training.running_means import RunningMeans
from xdm_ft.training.selection import Selector

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class LoopState:
    """The same in every process: one of them writes it, and each of them resumes from it.

    There is no random state in it: batches and random draws are functions of the step's number.
    """

    inner: EndToEnd
    roles: Roles  # of all parameters that some step trains
    optimizer: Optimizer
    selector: Selector
    averages: Averages | None
    accelerator: Accelerator
    means: RunningMeans = field(default_factory=RunningMeans)
    taken: int = 0  # number of steps taken
    evaluated: bool = True  # False: an evaluation is due after these steps and not done
    started: float = field(default_factory=time.perf_counter)
    unread: UnreadSteps = field(init=False)
    skipped: int = 0  # steps in a row that the gradient scaler skipped, as a loss or gradient was not finite
    before: float = 0.0  # seconds of training in earlier, interrupted processes

    def __post_init__(self) -> None:
        self.unread = UnreadSteps(self.accelerator.device)
        if self.accelerator.scaler is not None:
            # one scaler serves all models of a process: reset it, so that no model depends on those before it
            self.accelerator.scaler.load_state_dict(torch.amp.GradScaler(self.accelerator.device.type).state_dict())

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def average(self) -> None:
        """Adds the weights after the steps taken to the model's average, if it has one."""
        if self.averages is not None:
            trained = self.roles.main | self.roles.auxiliary
            self.averages.add(self.taken, {name: parameter[None] for name, parameter in trained.items()})

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
            "unread": self.unread.state(),
        }

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        device = self.accelerator.device
        self.inner.load_weights(state["weights"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.selector.load_state(state["selector"])
        if self.averages is not None:
            self.averages.load_state(state["averages"], device)
        self.means.load_state(state["means"])
        self.unread.load_state(state["unread"])
        self.taken, self.evaluated, self.before = state["taken"], state["evaluated"], state["seconds"]
        self.skipped = state["skipped"]
