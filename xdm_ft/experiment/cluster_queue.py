"""The queue of a cluster: every part of some work is a task of Ray, and is done again if its worker or node died.

Tasks send what comes of them (`cluster_task`) to a mailbox, a small process of Ray on this machine, so that nothing is
lost with the node that made it. This process takes it from there.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from xdm_ft.experiment.cluster_connection import first_line
from xdm_ft.experiment.cluster_task import Begun, Ending, Line, Work, versions_of
from xdm_ft.recipe.settings import Cluster
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import RESUME, Interrupted, deferred, stop_requested
from xdm_ft.runtime.terminal import print_error

logger = logging.getLogger("xdm_ft")
POLL_SECONDS = 0.2
MOST_LOSSES = 5  # of one part in a row, without progress between them: then the part itself is the cause


class Part(NamedTuple):
    """What one task is to do."""

    note: str  # its name for people
    threads: int
    given: Any  # the part for `Work.do`


@dataclass
class Attempt:
    """A task that has been submitted."""

    number: int  # of its part
    count: int
    note: str
    node: str = ""  # empty: it has not begun


class Queue(ABC):
    """Does the parts 0, 1, … of a work. `run` returns when all are done."""

    seconds_to_end = 60.0  # for all tasks to save and send their state, after a signal

    def __init__(self, ray: Any, settings: Cluster, work: Work, parts: int, threads: int) -> None:
        """`threads` of a task; the fewest, if tasks differ."""
        self.ray, self.settings, self.threads = ray, settings, threads
        self.versions = versions_of(work)
        self.waiting = deque(range(parts))
        self.running: dict[Any, Attempt] = {}  # by the reference of its task
        self.attempts, self.losses = Counter[int](), Counter[int]()
        self.stopped = 0  # tasks that were asked to stop and have saved their state
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        mailbox, task = _remote(ray)
        self.mailbox = mailbox.options(scheduling_strategy=here).remote()
        self.task = task
        self.work = ray.put(ray.cloudpickle.dumps(work))

    @abstractmethod
    def part(self, number: int) -> Part:
        """Returns what a new task for this part is to do."""

    @abstractmethod
    def take(self, attempt: Attempt, content: object) -> None:
        """Takes what a task has sent."""

    @abstractmethod
    def is_left(self, attempt: Attempt) -> bool:
        """Returns whether the part of a lost task must be done again."""

    @abstractmethod
    def done(self, attempt: Attempt) -> None:
        """Called when all that a task has sent is taken."""

    def run(self) -> None:
        """Does all parts. Raises `UserError` or `RuntimeError` if a task does.

        Raises `Interrupted` after a signal, when the tasks have saved their state.
        """
        try:
            with deferred():
                self._run()
        except self.ray.exceptions.RayError as error:
            what = f"the cluster does not answer any more ({first_line(error)})"
            raise UserError(f"cluster.address: {self.settings.address}: {what}; {RESUME}") from error

    def _run(self) -> None:
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self._room():
                    self._submit(self.waiting.popleft())
                self.poll()
                if stop_requested():
                    break
        except BaseException:
            with suppress(self.ray.exceptions.RayError):
                self._stop()
            raise
        if stop_requested():
            for fault in self._stop():
                raise fault
            raise Interrupted(self.saved)

    @property
    def saved(self) -> str:
        """What unfinished work was saved when tasks stopped; empty if there was none."""
        return ""

    def _room(self) -> int:
        """Returns how many tasks may be submitted: twice what fits now, so that a new node has work at once.

        A cluster that grows by demand sees that there is more to do, and a part waits here with its checkpoint.
        """
        return 2 * fitting(self.ray, self.settings, self.threads) + 2

    def _submit(self, number: int) -> None:
        note, threads, given = self.part(number)
        self.attempts[number] += 1
        order = {
            "number": number,
            "attempt": self.attempts[number],
            "part": given,
            "threads": threads,
            "on_gpu": self.settings.gpus_per_model > 0,
            "folder": os.getcwd(),
            "versions": self.versions,
            "log_level": logger.getEffectiveLevel(),
        }
        task = self.task.options(num_cpus=threads, num_gpus=self.settings.gpus_per_model, name=note)
        self.running[task.remote(self.mailbox, [self.work], order)] = Attempt(number, self.attempts[number], note)

    def poll(self) -> None:
        """Takes what has come, then ends the tasks that had ended before: all of their messages have come."""
        ended, _ = self.ray.wait([*self.running], num_returns=len(self.running), timeout=POLL_SECONDS)
        attempts = {(one.number, one.count): one for one in self.running.values()}
        for message in self.ray.get(self.mailbox.take.remote()):
            number, count, contents = pickle.loads(message)
            if (number, count) in attempts:  # a task that counts as lost may still send
                for content in contents:
                    self._take(attempts[number, count], content)
        for task in ended:
            self._end(task, self.running.pop(task))

    def _take(self, attempt: Attempt, content: object) -> None:
        if isinstance(content, Line):
            logger.log(content.level, "%s: %s", attempt.node, content.text)
            return
        if isinstance(content, Begun):
            attempt.node = content.node
        self.take(attempt, content)

    def _end(self, task: Any, attempt: Attempt) -> None:
        try:
            ending = Ending(*self.ray.get(task))
        except self.ray.exceptions.TaskCancelledError:
            return
        except self.ray.exceptions.RayError as error:
            if self.is_left(attempt):
                self._lost(attempt, error)
                return
            ending = Ending("done", attempt.node)
        if ending.how == "stopped":
            self.stopped += 1
        elif ending.how == "refused":
            raise UserError(*ending.lines)
        elif ending.how == "failed":
            print_error("\n".join(ending.lines))
            raise RuntimeError(f"a task on node {ending.node} failed; its traceback is above")
        else:
            self.done(attempt)

    def _lost(self, attempt: Attempt, error: Exception) -> None:
        """Does the part of a task again whose worker or node died."""
        self.losses[attempt.number] += 1
        where = f"on {attempt.node}" if attempt.node else "before it began"
        why = f"{attempt.note}: its task was lost {where} ({type(error).__name__})"
        if self.losses[attempt.number] >= MOST_LOSSES:
            raise UserError(
                f"{why}, {MOST_LOSSES} times; its nodes may lack memory, `ray status` and Ray's log say more"
            )
        logger.warning("%s; it is done again", why)
        self.waiting.appendleft(attempt.number)

    def _stop(self) -> list[Exception]:
        """Lets all tasks save their state, and takes it. Returns the faults of tasks that end by one meanwhile."""
        self.waiting.clear()
        self.ray.get(self.mailbox.stop.remote())
        for task, attempt in self.running.items():
            if not attempt.node:
                self.ray.cancel(task, recursive=False)  # recursive: its messages too, and a task fails if one is lost
        faults, until = list[Exception](), time.monotonic() + self.seconds_to_end
        while self.running and time.monotonic() < until:
            try:
                self.poll()
            except (UserError, RuntimeError) as error:  # the others still save
                faults.append(error)
        return faults


def fitting(ray: Any, settings: Cluster, cores: int) -> int:
    """Returns how many tasks of so many cores the cluster can do at a time."""
    has, fits = ray.cluster_resources(), float("inf")
    for kind, of_task in (("CPU", cores), ("GPU", settings.gpus_per_model)):
        if of_task:
            fits = min(fits, has.get(kind, 0) / of_task)
    return int(fits)


def _remote(ray: Any) -> tuple[Any, Any]:
    """Returns the mailbox and the task. Both are sent as they stand here: a node may lack this package."""

    class Mailbox:
        """Keeps messages until the driver takes them."""

        def __init__(self) -> None:
            self.messages: list[bytes] = []
            self.stopping = False

        def put(self, message: bytes) -> bool:
            self.messages.append(message)
            return self.stopping

        def take(self) -> list[bytes]:
            messages, self.messages = self.messages, []
            return messages

        def stop(self) -> None:
            self.stopping = True

    def do(mailbox: Any, work: list[Any], order: dict[str, Any]) -> tuple[Any, ...]:

        import ray

        node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        try:
            from xdm_ft.experiment import cluster_task
        except ImportError as error:
            why = f"node {node}: xdm_ft can not be imported ({error}); install the version of the run on all nodes"
            return "refused", node, (why,)
        return cluster_task.run(
            lambda message: ray.get(mailbox.put.remote(message)),
            lambda: ray.get(work[0]),
            work[0].hex(),
            cluster_task.Order(node=node, **order),
        )

    # a lost task is done again by this process, which knows what is left of it
    once = {"max_retries": 0, "scheduling_strategy": "SPREAD"}
    return ray.remote(num_cpus=0)(Mailbox), ray.remote(**once)(do)
