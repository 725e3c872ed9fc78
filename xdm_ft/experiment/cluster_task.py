"""A task of a cluster: trains one piece in a process on some node, and sends what comes of it to the driver.

The driver is the process of `xdm-ft run`; it alone writes the run directory. A task has a folder of its own instead, on
its node, for as long as it runs.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xdm_ft.errors import UserError
from xdm_ft.experiment.engines import Engines, Model, Piece
from xdm_ft.experiment.machine import cores, start
from xdm_ft.experiment.overall import SLOT, Counts, Overall
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepared import Prepared, build_encoder
from xdm_ft.experiment.results import Outcome
from xdm_ft.features.cache_key import weights_digest
from xdm_ft.interrupt import Interrupted, request_stop
from xdm_ft.storage.checkpoint import Checkpoint, State
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
BEAT_SECONDS = 1.0  # between two messages of a task that has nothing else to send
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
"""Variables by which Accelerate would take a task for one of several processes: `srun ray start` may set them."""


class Work(NamedTuple):
    """What all tasks of one queue share."""

    plan: Plan
    prepared: Prepared
    pieces: Sequence[Piece]
    measure: Callable[[Engines, Model], Outcome]


class Order(NamedTuple):
    """What one task is to do."""

    node: str  # the name of the node that does it
    piece: int  # its number in `Work.pieces`
    attempt: int
    checkpoint: bytes | None  # the file to resume from
    threads: int  # of torch
    on_gpu: bool
    folder: str  # in which relative paths of the recipe are
    versions: Mapping[str, str]
    log_level: int


class Begun(NamedTuple):
    node: str


class Scalars(NamedTuple):
    """The arguments of `RunDirectory.write_scalars`."""

    sub_run: str
    step: int
    values: dict[str, float]


class File(NamedTuple):
    """A file of the task's folder, for the run directory."""

    relative: str
    content: bytes


class Line(NamedTuple):
    """A line for the log."""

    level: int
    text: str


Content = Begun | Scalars | File | Line | Counts | list[Outcome]


class Ending(NamedTuple):
    """How a task ended: `done`, `stopped` on request, `refused` for a fault of a user, or `failed`."""

    how: str
    node: str
    lines: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """Returns the versions that must be the same on all nodes, as numbers depend on them."""
    return {"xdm_ft": __version__, "torch": torch.__version__}


def run(send: Callable[[bytes], bool], fetch_work: Callable[[], bytes], name: str, order: Order) -> Ending:
    """Does a task. `send` takes a message to the driver, and returns whether the driver wants the task to stop.

    `name` stands for the `Work` that `fetch_work` returns, pickled: a process that has it does not fetch it again.
    """
    node, post = order.node, _Post(order, send)
    try:
        request_stop(False)  # an earlier task of this process was asked to stop
        post.send(Begun(node))
        _train(post, fetch_work, name, order)
    except UserError as error:
        return Ending("refused", node, tuple(f"node {node}: {line}" for line in error.args))
    except Interrupted:
        return Ending("stopped", node)
    except Exception:
        return Ending("failed", node, (traceback.format_exc(),))
    return Ending("done", node)


def _train(post: _Post, fetch_work: Callable[[], bytes], name: str, order: Order) -> None:
    with _logged(post, order.log_level), tempfile.TemporaryDirectory(prefix="xdm-ft-task-") as scratch:
        work, accelerator = _loaded(fetch_work, name, order)
        piece, directory = work.pieces[order.piece], _TaskDirectory(Path(scratch), post)
        torch.set_num_threads(order.threads)
        if order.checkpoint is not None:
            directory.write_bytes(directory.checkpoint_file(piece.name), order.checkpoint)
        engines = Engines(work.plan, work.prepared, directory, accelerator)
        _require_inputs(engines, piece)
        overall = Overall(piece.note, piece.cost, 0, mmap.mmap(-1, SLOT.size), 0, None)
        with post.beating(overall):
            for models in engines.train_piece(piece, overall):
                post.send([_alone(work.measure(engines, model)) for model in models])
        for trace in directory.path.glob("profiles/*"):
            post.send(File(str(trace.relative_to(directory.path)), trace.read_bytes()))
        post.send(overall.counts)


_kept: tuple[str, Work, Accelerator] | None = None  # of the last task of this process


def _loaded(fetch_work: Callable[[], bytes], name: str, order: Order) -> tuple[Work, Accelerator]:
    """Returns the work on this process's device. Raises `UserError` if this node can not do it."""
    global _kept
    for program, version in versions().items():
        if version != order.versions[program]:
            raise UserError(
                f"{program} is {version} here and {order.versions[program]} in the run; install the same everywhere"
            )
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
        _kept = None  # first, as the features of both may not fit
        work = pickle.loads(fetch_work())
        accelerator = start(work.plan.recipe)
        _kept = name, work._replace(prepared=_on_device(work.prepared, accelerator.device)), accelerator
    return _kept[1], _kept[2]


def _on_device(prepared: Prepared, device: torch.device) -> Prepared:
    found = {}
    for label, own in prepared.encoders.items():
        activations = {cut: None if cached is None else cached.to(device) for cut, cached in own.activations.items()}
        features = None if own.features is None else own.features.to(device)
        found[label] = dataclasses.replace(own, features=features, activations=activations)
    return dataclasses.replace(prepared, encoders=found)


_seen: set[tuple[str, str | None]] = set()  # (key of data, label of encoder) that this process has checked


def _require_inputs(engines: Engines, piece: Piece) -> None:
    """Raises `UserError` if this node does not see the images and weights that a training end to end reads."""
    plan, item = engines.plan, piece.request.item
    known = (engines.prepared.content, item.encoder_label)
    if not plan.recipe.trains_on_images(item) or known in _seen:
        return
    dataset = plan.dataset
    for domain, name in enumerate(dataset.domain_names):
        rows = [row for row in (dataset.domains == domain).nonzero()[0] if row not in engines.prepared.unreadable]
        try:
            if rows:
                dataset.image(int(rows[0]))
        except (UserError, OSError) as error:
            raise UserError(f"data: an image of {name} is unreadable ({error}); all nodes must see the data") from error
    if not item.is_cut:
        encoder = build_encoder(item.encoder, plan.recipe.protocol.seeds[0])
        if weights_digest(encoder) != engines.prepared.of(item).weights:
            raise UserError("encoder: its weights here are not those of the run; put the same file on all nodes")
    _seen.add(known)


def _alone(outcome: Outcome) -> Outcome:
    """Returns the outcome with tensors of their own: those of a head may be a part of all heads' memory."""
    weights = {
        file: ({name: tensor.clone() for name, tensor in state.items()}, metadata)
        for file, (state, metadata) in outcome.weights.items()
    }
    return dataclasses.replace(outcome, weights=weights)


class _Post:
    """Sends messages of one task in their order; several threads may use it."""

    def __init__(self, order: Order, send: Callable[[bytes], bool]) -> None:
        self._order, self._send = order, send
        self._later: list[Content] = []
        self._lock = threading.Lock()

    def add(self, content: Content) -> None:
        """Sends it with the next message, as a message takes longer than a step."""
        self._later.append(content)

    def send(self, content: Content) -> bool:
        """Sends it, and returns when the driver's side has it: whether the driver wants this task to stop."""
        with self._lock:
            later, self._later = self._later, []
            return self._send(pickle.dumps((self._order.piece, self._order.attempt, [*later, content])))

    @contextmanager
    def beating(self, overall: Overall) -> Iterator[None]:
        """Context in which the driver hears of the progress, and its wish to stop reaches the training."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                if self.send(overall.counts):
                    request_stop()

        thread = threading.Thread(target=beat, daemon=True, name="beat")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _TaskDirectory(RunDirectory):
    """A folder that stands for the run directory: what is written there goes to the driver, too."""

    def __init__(self, path: Path, post: _Post) -> None:
        super().__init__(path)
        self._post = post

    def checkpoint(self, name: str, about: Mapping[str, Any], writes: bool = True) -> Checkpoint:
        file = self.checkpoint_file(name)
        return _SentCheckpoint(self._post, file, self.path / file, about, self._pace, writes)

    def write_scalars(self, sub_run: str, step: int, values: Mapping[str, float]) -> None:
        self._post.add(Scalars(sub_run, step, dict(values)))


class _SentCheckpoint(Checkpoint):
    def __init__(self, post: _Post, relative: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._post, self._relative = post, relative

    def save(self, state: Callable[[], State]) -> None:
        started = time.monotonic()
        super().save(state)
        self._post.send(File(self._relative, self.path.read_bytes()))
        self.pace.saved(time.monotonic() - started)


@contextmanager
def _logged(post: _Post, level: int) -> Iterator[None]:
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
