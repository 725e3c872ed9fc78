"""The state of the training of a chunk of heads: everything that its steps change, as a checkpoint stores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.interrupt import Interrupted
from xdm_ft.sharpness import Tensors
from xdm_ft.storage.checkpoint import Checkpoint, State
from xdm_ft.storage.digests import tensors_digest
from xdm_ft.training import Job, Trained
from xdm_ft.training.averages import Averages
from xdm_ft.training.bank.cached_data import CachedData
from xdm_ft.training.running_means import RunningMeans
from xdm_ft.training.selection import Selector

if TYPE_CHECKING:
    from xdm_ft.training.bank.stacked import Bank

logger = logging.getLogger("xdm_ft")


@dataclass
class ChunkState:
    """There is no random state in it: batches and random draws are functions of the step's number."""

    jobs: Sequence[Job]
    bank: Bank
    selectors: list[Selector]  # one per head
    averages: Averages | None
    failures: list[str | None]  # one per head: why it failed; None: it did not
    best: dict[str, Tensors] = field(default_factory=dict)
    """{selection rule: {name: weights that it has picked so far, [H,…] on the device}}; a selector has their steps."""
    means: RunningMeans = field(default_factory=RunningMeans)
    taken: int = 0  # number of steps taken; the evaluations after them are done
    started: float = field(default_factory=time.perf_counter)
    before: float = 0.0  # seconds of training in earlier, interrupted processes
    restarts: tuple[str, ...] = ()  # the reason of each restart from the beginning

    @property
    def ended(self) -> bool:
        """Whether every head has failed or stopped."""
        stopped = [selector.stopped_at is not None for selector in self.selectors]
        return all(failure is not None or stop for failure, stop in zip(self.failures, stopped, strict=True))

    def stopped_before(self, taken: int) -> set[int]:
        """Returns the heads whose `patience` ended before the evaluation after `taken` steps."""
        stops = enumerate(selector.stopped_at for selector in self.selectors)
        return {head for head, stop in stops if stop is not None and stop < taken}

    def pick(self, heads_of: Mapping[str, Sequence[int]]) -> None:
        """Keeps the present weights of some heads as the best ones, {selection rule: heads}."""
        stacked = {name: values.detach() for name, values in self.bank.stacked().items()}
        for rule, heads in heads_of.items():
            if rule not in self.best:
                self.best[rule] = {name: torch.zeros_like(values) for name, values in stacked.items()}
            at = torch.tensor(heads, device=self.bank.lr.device)
            for name, best in self.best[rule].items():
                best.index_copy_(0, at, stacked[name].index_select(0, at))

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def state(self) -> State:
        bank = self.bank
        return {
            "taken": self.taken,
            "seconds": self.seconds,
            "parameters": bank.main | bank.auxiliary,
            "buffers": bank.buffers,
            "optimizer": bank.optimizer.state(),
            "selectors": [selector.state() for selector in self.selectors],
            "best": self.best,
            "averages": None if self.averages is None else self.averages.state(),
            "failures": self.failures,
            "means": self.means.state(),
        }

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        bank = self.bank
        for name, parameter in (bank.main | bank.auxiliary).items():
            parameter.copy_(state["parameters"][name])
        for name, value in state["buffers"].items():
            bank.buffers[name].copy_(value)
        bank.optimizer.load_state(state["optimizer"])
        for selector, of_head in zip(self.selectors, state["selectors"], strict=True):
            selector.load_state(of_head)
        self.best = {
            rule: {name: value.to(bank.lr.device) for name, value in of_rule.items()}
            for rule, of_rule in state["best"].items()
        }
        if self.averages is not None:
            self.averages.load_state(state["averages"], bank.lr.device)
        self.failures = state["failures"]
        self.means.load_state(state["means"])
        self.taken, self.before = state["taken"], state["seconds"]

    def resume(self, checkpoint: Checkpoint, data: CachedData) -> None:
        """Loads the checkpoint that an interrupted process has left of these heads, if there is one."""
        bank, splits = self.bank, [job.split for job in self.jobs]
        rows = [rows for split in splits for rows in (*split.train, *split.evaluation.values())]
        saved = checkpoint.load(  # one that was written for other values of these is not used
            {
                "device": data.features.device.type,
                "features": data.features.key,
                "data": tensors_digest(dict(enumerate([data.annotations.labels, data.annotations.domains, *rows]))),
                "weights": tensors_digest(bank.stacked()),
            }
        )
        self.restarts = tuple(checkpoint.restarts)
        if saved is not None:
            self.load_state(saved)
            logger.info("%s: resumes after %d of %d steps", self._name, self.taken, bank.steps)

    def save_and_stop(self, checkpoint: Checkpoint | None) -> NoReturn:
        """Saves the checkpoint, if the run keeps one, and raises `Interrupted`."""
        if checkpoint is None:
            raise Interrupted
        checkpoint.save(self.state)
        raise Interrupted(f"{self._name}: {self.taken} of {self.bank.steps} steps")

    @property
    def _name(self) -> str:
        return f"{self.jobs[0].method}, {plural(len(self.jobs), 'model')} together"

    def results(self, rules: Sequence[str]) -> list[Trained]:
        """Returns one result per head. `seconds` is the chunk's time divided by its number of heads."""
        bank, averages, seconds = self.bank, self.averages, self.seconds / len(self.jobs)
        best = {rule: {name: value.cpu() for name, value in of_rule.items()} for rule, of_rule in self.best.items()}
        # all heads of a bank have parameters of the same sizes
        parameters = sum(one.numel() for one in bank.template.parameters() if one.requires_grad)
        results = []
        for head, (job, selector, failure) in enumerate(zip(self.jobs, self.selectors, self.failures, strict=True)):
            failure = failure or (selector.nothing_selected() if averages is None else averages.nothing_averaged(head))
            selected = selector.selected
            if averages is None:
                for rule, one in selected.items():
                    if not one.state:  # of rules that picked the same step, the first fills the weights that they share
                        one.state.update({name: value[head].clone() for name, value in best[rule].items()})
            elif not failure:
                selected = averages.selected(head, lambda mean, head=head: bank.state(head) | mean, rules)  # type: ignore[misc]
            picked, stopped_at = {} if failure else selected, selector.stopped_at
            mixed_steps = bank.template.mixed_steps(stopped_at or bank.steps)
            results.append(
                Trained(
                    job, picked, mixed_steps, seconds, failure, selector.course, stopped_at, self.restarts, parameters
                )
            )
        return results
