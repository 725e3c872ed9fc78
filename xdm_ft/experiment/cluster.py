"""Training on a cluster: every piece is a task of Ray, and this process alone writes the run directory.

Tasks send what comes of them (`cluster_task`) to a mailbox, a small process of Ray on this machine, so that nothing is
lost with the node that made it. This process takes it from there. A piece whose worker or node died is done again, from
the last checkpoint that arrived.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from xdm_ft.errors import UserError
from xdm_ft.experiment.cluster_connection import connected, first_line
from xdm_ft.experiment.cluster_task import Begun, Content, Ending, File, Line, Scalars, Work, versions
from xdm_ft.experiment.engines import Engines, Model, Piece
from xdm_ft.experiment.overall import Counts, Overall
from xdm_ft.experiment.results import Outcome, ResultsFile
from xdm_ft.interrupt import RESUME, Interrupted, deferred, stop_requested
from xdm_ft.recipe.blocks import Cluster
from xdm_ft.terminal import complain

logger = logging.getLogger("xdm_ft")
POLL_SECONDS = 0.2
SECONDS_TO_SAVE = 60.0  # for all tasks to save and send their state, after a signal
MOST_LOSSES = 5  # of one piece in a row, without a checkpoint between them: then the piece itself is the cause


def train_on_cluster(
    engines: Engines,
    pieces: Sequence[Piece],
    measure: Callable[[Engines, Model], Outcome],
    results: ResultsFile,
    bar: Overall,
) -> None:
    """Trains all pieces in tasks, and saves the outcomes that `measure` returns there for their wanted models.

    Raises `UserError` or `RuntimeError` if a task does, and `Interrupted`, when the others have saved their state.
    """
    settings = engines.plan.recipe.cluster
    with connected(settings) as ray:
        work = Work(engines.plan, engines.prepared, pieces, measure)
        driver = _Driver(ray, settings, work, engines, results, bar)
        try:
            with deferred(), bar.watched():
                driver.run()
        except ray.exceptions.RayError as error:
            what = f"the cluster does not answer any more ({first_line(error)})"
            raise UserError(f"cluster.address: {settings.address}: {what}; {RESUME}") from error


@dataclasses.dataclass
class _Attempt:
    """A task for a piece that has been submitted."""

    piece: int
    number: int
    counts: Counts = dataclasses.field(default_factory=Counts)
    node: str = ""  # empty: it has not begun
    saved: bool = False  # whether the outcomes of the piece are in the run directory


class _Driver:
    def __init__(
        self, ray: Any, settings: Cluster, work: Work, engines: Engines, results: ResultsFile, bar: Overall
    ) -> None:
        self.ray, self.settings, self.pieces = ray, settings, work.pieces
        self.directory, self.results, self.bar = engines.directory, results, bar
        self.waiting = deque(range(len(self.pieces)))
        self.running: dict[Any, _Attempt] = {}  # by the reference of its task
        self.attempts, self.losses = Counter[int](), Counter[int]()
        self.stopped = 0  # tasks that were asked to stop and have saved their state
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        mailbox, task = _remote(ray)
        self.mailbox = mailbox.options(scheduling_strategy=here).remote()
        self.task = task
        self.work = ray.put(ray.cloudpickle.dumps(work))

    def run(self) -> None:
        """Trains all pieces."""
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self._room():
                    self._submit(self.waiting.popleft())
                self._poll()
                if stop_requested():
                    break
        except BaseException:
            with suppress(self.ray.exceptions.RayError):
                self._stop()
            raise
        if stop_requested():
            for fault in self._stop():
                raise fault
            saved = f"{self.stopped} unfinished trainings" if self.stopped != 1 else "1 unfinished training"
            raise Interrupted(saved if self.stopped else "")

    def _room(self) -> int:
        """Returns how many tasks may be submitted: twice what fits now, so that a new node has work at once.

        A cluster that grows by demand sees that there is more to do, and a piece waits here with its checkpoint.
        """
        has, fits = self.ray.cluster_resources(), float("inf")
        for kind, of_task in (("CPU", 1), ("GPU", self.settings.gpus_per_model)):
            if of_task:
                fits = min(fits, has.get(kind, 0) / of_task)
        return 2 * int(fits) + 2

    def _submit(self, number: int) -> None:
        piece, settings = self.pieces[number], self.settings
        checkpoint = self._checkpoint(piece)
        self.attempts[number] += 1
        threads = settings.cpus_per_model if piece.is_end_to_end else 1
        order = {
            "piece": number,
            "attempt": self.attempts[number],
            "checkpoint": checkpoint.read_bytes() if checkpoint.exists() else None,
            "threads": threads,
            "on_gpu": settings.gpus_per_model > 0,
            "folder": os.getcwd(),
            "versions": versions(),
            "log_level": logger.getEffectiveLevel(),
        }
        task = self.task.options(num_cpus=threads, num_gpus=settings.gpus_per_model, name=piece.note)
        self.running[task.remote(self.mailbox, [self.work], order)] = _Attempt(number, self.attempts[number])

    def _checkpoint(self, piece: Piece) -> Path:
        return self.directory.path / self.directory.checkpoint_file(piece.name)

    def _poll(self) -> None:
        """Takes what has come, then ends the tasks that had ended before: all of their messages have come."""
        ended, _ = self.ray.wait([*self.running], num_returns=len(self.running), timeout=POLL_SECONDS)
        attempts = {(one.piece, one.number): one for one in self.running.values()}
        for message in self.ray.get(self.mailbox.take.remote()):
            piece, number, contents = pickle.loads(message)
            if (piece, number) in attempts:  # a task that counts as lost may still send
                for content in contents:
                    self._take(attempts[piece, number], content)
        for task in ended:
            self._end(task, self.running.pop(task))

    def _take(self, attempt: _Attempt, content: Content) -> None:
        if isinstance(content, Begun):
            attempt.node = content.node
            self.bar.add(note=f"{self.pieces[attempt.piece].note} on {content.node}")
        elif isinstance(content, Counts):
            self._count(attempt, content)
        elif isinstance(content, Scalars):
            self.directory.write_scalars(*content)
        elif isinstance(content, Line):
            logger.log(content.level, "%s: %s", attempt.node, content.text)
        elif isinstance(content, File):
            self.directory.write_bytes(*content)
            self.losses[attempt.piece] = 0
        else:
            self.results.save(content, self.directory)
            self.bar.add(models=len(content))
            attempt.saved = True

    def _count(self, attempt: _Attempt, counts: Counts) -> None:
        self.bar.add(done=counts.done - attempt.counts.done, spared=counts.spared - attempt.counts.spared)
        attempt.counts = counts

    def _end(self, task: Any, attempt: _Attempt) -> None:
        piece = self.pieces[attempt.piece]
        try:
            ending = Ending(*self.ray.get(task))
        except self.ray.exceptions.TaskCancelledError:
            return
        except self.ray.exceptions.RayError as error:
            if not attempt.saved:
                self._lost(attempt, error)
                return
            ending = Ending("done", attempt.node)
        if ending.how == "stopped":
            self.stopped += 1
        elif ending.how == "refused":
            raise UserError(*ending.lines)
        elif ending.how == "failed":
            complain("\n".join(ending.lines))
            raise RuntimeError(f"a task on node {ending.node} failed; its traceback is above")
        else:
            self._checkpoint(piece).unlink(missing_ok=True)

    def _lost(self, attempt: _Attempt, error: Exception) -> None:
        """Does the piece of a task again whose worker or node died."""
        piece = self.pieces[attempt.piece]
        self._count(attempt, Counts())
        self.losses[attempt.piece] += 1
        where = f"on {attempt.node}" if attempt.node else "before it began"
        why = f"{piece.note}: its task was lost {where} ({type(error).__name__})"
        if self.losses[attempt.piece] >= MOST_LOSSES:
            raise UserError(
                f"{why}, {MOST_LOSSES} times; its nodes may lack memory, `ray status` and Ray's log say more"
            )
        logger.warning("%s; it is done again", why)
        self.waiting.appendleft(attempt.piece)

    def _stop(self) -> list[Exception]:
        """Lets all tasks save their state, and takes it. Returns the faults of tasks that end by one meanwhile."""
        self.waiting.clear()
        self.ray.get(self.mailbox.stop.remote())
        for task, attempt in self.running.items():
            if not attempt.node:
                self.ray.cancel(task)
        faults, until = list[Exception](), time.monotonic() + SECONDS_TO_SAVE
        while self.running and time.monotonic() < until:
            try:
                self._poll()
            except (UserError, RuntimeError) as error:  # the others still save
                faults.append(error)
        return faults


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

    def train(mailbox: Any, work: list[Any], order: dict[str, Any]) -> tuple[Any, ...]:

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

    # a task is done again by this process, which has its last checkpoint
    once = {"max_retries": 0, "scheduling_strategy": "SPREAD"}
    return ray.remote(num_cpus=0)(Mailbox), ray.remote(**once)(train)
