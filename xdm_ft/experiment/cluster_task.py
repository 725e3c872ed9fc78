"""A task of a cluster: does a part of some work in a process on some node, and sends what comes of it to the driver.

The driver is the process of `xdm-ft`; it alone writes the run directory.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch

from xdm_ft.encoders import Encoder
from xdm_ft.experiment.machine import start
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import Interrupted, request_stop
from xdm_ft.runtime.machine import cores
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
BEAT_SECONDS = 1.0  # between two messages of a task that has nothing else to send
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
"""Variables by which Accelerate would take a task for one of several processes: `srun ray start` may set them."""


class Work(Protocol):
    """What all tasks of one queue share."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def encoders(self) -> Iterable[Encoder]:
        """Those whose libraries its numbers depend on."""

    def on(self, device: torch.device) -> Self:
        """Returns the work as tasks with this device do it."""

    def do(self, part: Any, post: Post, accelerator: Accelerator) -> None:
        """Does one part. Raises `UserError` for a fault of a user, and `Interrupted` if it was asked to stop."""


class Order(NamedTuple):
    """What one task is to do."""

    node: str  # the name of the node that does it
    number: int  # of the part
    attempt: int
    part: Any  # for `Work.do`
    threads: int  # of torch
    on_gpu: bool
    folder: str  # in which relative paths of the recipe are
    versions: Mapping[str, str]
    log_level: int


class Begun(NamedTuple):
    node: str


class Line(NamedTuple):
    """A line for the log."""

    level: int
    text: str


class Ending(NamedTuple):
    """How a task ended: `done`, `stopped` on request, `refused` for a fault of a user, or `failed`."""

    how: str
    node: str
    lines: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """Returns the versions that must be the same on a node before it can unpickle any work."""
    return {"xdm_ft": __version__, "torch": torch.__version__}


def versions_of(work: Work) -> dict[str, str]:
    """Returns all versions that must be the same on all nodes, as the numbers of this work depend on them."""
    found = dict[str, str]()
    for encoder in work.encoders:
        libraries = encoder.identity().get("versions")
        found |= libraries if isinstance(libraries, dict) else {}
    return found | versions()


def _require_versions(here: Mapping[str, str], order: Order) -> None:
    for program, version in here.items():
        if version != order.versions[program]:
            raise UserError(
                f"{program} is {version} here and {order.versions[program]} in the run; install the same everywhere"
            )


def run(send: Callable[[bytes], bool], fetch_work: Callable[[], bytes], name: str, order: Order) -> Ending:
    """Does a task. `send` takes a message to the driver, and returns whether the driver wants the task to stop.

    `name` stands for the `Work` that `fetch_work` returns, pickled: a process that has it does not fetch it again.
    """
    node, post = order.node, Post(order, send)
    try:
        request_stop(False)  # an earlier task of this process was asked to stop
        post.send(Begun(node))
        try:
            with _logged(post, order.log_level):
                work, accelerator = _loaded(fetch_work, name, order)
                torch.set_num_threads(order.threads)
                work.do(order.part, post, accelerator)
        finally:
            post.send()  # the last lines of the log: they may say why it fails
    except UserError as error:
        return Ending("refused", node, tuple(f"node {node}: {line}" for line in error.args))
    except Interrupted:
        return Ending("stopped", node)
    except Exception:
        return Ending("failed", node, (traceback.format_exc(),))
    return Ending("done", node)


_kept: tuple[str, Work, Accelerator] | None = None  # of the last task of this process


def _loaded(fetch_work: Callable[[], bytes], name: str, order: Order) -> tuple[Work, Accelerator]:
    """Returns the work on this process's device. Raises `UserError` if this node can not do it."""
    global _kept
    _require_versions(versions(), order)
    try:
        os.chdir(order.folder)
    except OSError as error:
        raise UserError(
            f"{order.folder}: {error.strerror}; start the run in a folder that all nodes see, as the paths of a "
            "recipe are relative to it"
        ) from error
    for variable in LAUNCHERS:
        os.environ.pop(variable, None)
    os.environ["ACCELERATE_USE_CPU"] = "false" if order.on_gpu else "true"
    # tasks share memory and cores as the processes of a launcher do
    os.environ["LOCAL_WORLD_SIZE"] = str(max(1, cores() // order.threads))
    if _kept is None or _kept[0] != name:
        _kept = None  # first, as both may not fit
        pickled = fetch_work()
        try:
            work: Work = pickle.loads(pickled)
        except OSError as error:  # data in files that are opened here
            raise UserError(f"data: {error}; all nodes must see the run's data under the same paths") from error
        _require_versions(versions_of(work), order)
        accelerator = start(work.recipe)
        _kept = name, work.on(accelerator.device), accelerator
    return _kept[1], _kept[2]


class Post:
    """Sends messages of one task in their order; several threads may use it.

    They are `Begun`, `Line`s, and what the driver of this work takes.
    """

    def __init__(self, order: Order, send: Callable[[bytes], bool]) -> None:
        self._order, self._send = order, send
        self._later: list[object] = []
        self._lock = threading.Lock()

    def add(self, content: object) -> None:
        """Sends it with the next message, as a message takes longer than a step."""
        self._later.append(content)

    def send(self, *contents: object) -> bool:
        """Sends them, and returns when the driver's side has them: whether the driver wants this task to stop."""
        with self._lock:
            later, self._later = self._later, []
            return self._send(pickle.dumps((self._order.number, self._order.attempt, [*later, *contents])))

    @contextmanager
    def beating(self, progress: Callable[[], Sequence[object]] = tuple) -> Iterator[None]:
        """Context in which the driver hears of the `progress`, and its wish to stop reaches the work."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                if self.send(*progress()):
                    request_stop()

        thread = threading.Thread(target=beat, daemon=True, name="beat")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def _logged(post: Post, level: int) -> Iterator[None]:
    """Context in which lines of the log go to the driver."""

    class Sent(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            post.add(Line(record.levelno, record.getMessage()))

    handler, before = Sent(), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
