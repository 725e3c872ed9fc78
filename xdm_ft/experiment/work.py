"""The processes of a run: their precision, threads and device, forks that share the work, and the progress of all."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError, plural, printable, undocumented
from xdm_ft.runtime.interrupt import (
    STOPPING,
    Interrupted,
    before_exit,
    block_signals,
    deferred,
    end_with_parent,
    handle,
)
from xdm_ft.runtime.machine import on_cpu_by_request, own_cores, warn_of_slow_bf16
from xdm_ft.runtime.progress import LOG_EVERY_SECONDS, Progress, duration, pulse, shows_bars
from xdm_ft.runtime.terminal import print_error, with_bar
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import MixedPrecision

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
LOOPBACK = "127.0.0.1"
REFRESH_SECONDS = 0.2  # at least, between two looks at the counts
WATCH_SECONDS = 1.0  # between two looks while this process only waits
SECONDS_TO_SAVE = 10.0  # after one process has failed, the time for the others to save and exit


def as_launched(recipe: Recipe) -> Recipe:
    """Returns the recipe with the precision that it trains in: its own, else the launcher's, else float32.

    The precision changes numbers, so the recipe in the run directory must contain it. `accelerate launch` sets its
    variable to `no` if the user gave no precision, so `no` never contradicts the recipe. Raises `UserError` if the
    launcher's precision differs from the recipe's, or does not work with the recipe.
    """
    wanted, launched = recipe.training.mixed_precision, os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    asked = f"accelerate launch --mixed_precision {launched} (or ACCELERATE_MIXED_PRECISION)"
    if launched != "no" and wanted is not None and wanted != launched:
        raise UserError(f"{recipe.name}: training.mixed_precision: {wanted}, but {asked}; leave one of them out")
    if launched not in get_args(MixedPrecision):
        raise UserError(f"{recipe.name}: {asked} is not supported; use bf16, fp16 or no")
    sharp = [item.label for item in recipe.methods if item.sharpness is not None and item.trainable is not False]
    if launched == "fp16" and sharp:
        problem = f"fp16 scales the loss, which makes the second pass of {sharp[0]} wrong"
        raise UserError(f"{recipe.name}: {asked}: {problem}; use bf16 or no")
    if not recipe.trains_encoders and launched != "no":
        logger.warning("%s has no effect, because the encoder is frozen; set features.precision instead", asked)
        launched = "no"
    precision = launched if wanted is None else wanted
    return dataclasses.replace(recipe, training=recipe.training.model_copy(update={"mixed_precision": precision}))


@contextmanager
def launched(recipe: Recipe, trackers: Sequence[str] = ()) -> Iterator[Accelerator]:
    """Yields the accelerator of a run, and frees it at the end, so that this process can start another run.

    `trackers`: names that the accelerator can log to.
    """
    from accelerate.state import AcceleratorState, is_initialized

    from xdm_ft.training.end_to_end.train import shut_down

    of_the_caller = is_initialized()
    with on_loopback():
        accelerator = start(recipe, trackers)
        try:
            yield accelerator
            shut_down(accelerator)  # not after an error: it waits for all processes
        finally:
            if accelerator.num_processes == 1 and not of_the_caller:
                # Accelerate keeps its state for the process, and refuses another precision
                with undocumented("accelerate"):
                    AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Context in which this process listens on the loopback address alone, if all launched ones are on this machine.

    Else gloo and NCCL listen on the address of the machine's name, and rank 0 serves the store of the process group on
    all addresses, unless the launcher serves it (torchrun, accelerate launch). Nothing of it asks who connects. Raises
    `UserError` if the port of the store is in use.
    """
    from torch.distributed import TCPStore, is_initialized

    processes = os.environ.get("WORLD_SIZE")
    if processes is None or os.environ.get("LOCAL_WORLD_SIZE") != processes or is_initialized():
        yield
        return
    interface = "lo0" if sys.platform == "darwin" else "lo"
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    port, store = int(os.environ.get("MASTER_PORT", "0")), None
    if port and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_ADDR"] = LOOPBACK
        if os.environ.get("RANK") == "0":
            try:
                bound = socket.create_server((LOOPBACK, port)).detach()
            except OSError as error:
                raise UserError(
                    f"MASTER_PORT: {port} cannot be used ({os.strerror(error.errno or 0)}); set another port"
                ) from error
            # torch's own store of this port then uses the same server (multi_tenant)
            store = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=bound
            )
    yield
    del store


def start(recipe: Recipe, trackers: Sequence[str] = ()) -> Accelerator:
    """Returns the accelerator of this process, and sets its number of threads to cores // processes of this machine.

    `accelerate launch` alone would leave it at one thread. Raises `UserError` if the launcher asks for GPUs and torch
    finds none, or if the caller has an accelerator of another precision.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, is_initialized
    from accelerate.utils import InitProcessGroupKwargs

    # without this check, Accelerate trains on the CPU without a message, and each of several processes runs as if it
    # were the only one
    if not on_cpu_by_request() and not torch.accelerator.is_available():
        visible, processes = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ.get("WORLD_SIZE", "1")
        problem = None
        if visible not in ("", "-1", "NoDevFiles"):  # these hide all GPUs on purpose; schedulers set the last one
            problem = f"GPU {visible} is selected (accelerate launch --gpu_ids, or CUDA_VISIBLE_DEVICES)"
            remedy = "leave it out"
        elif processes != "1":
            problem, remedy = f"{processes} processes are launched for GPUs", "launch one process"
        if problem is not None:
            raise UserError(
                f"accelerate: {problem}, but torch {torch.__version__} finds none; {remedy}, or set "
                "ACCELERATE_USE_CPU=1 to train on the CPU"
            )
    precision = recipe.training.mixed_precision or "no"
    if is_initialized() and AcceleratorState().mixed_precision != precision:
        raise UserError(
            f"{recipe.name}: training.mixed_precision: {precision}, but this Python process already has an "
            f"Accelerator with {AcceleratorState().mixed_precision}; run the recipe in another process"
        )
    accelerator = Accelerator(
        mixed_precision=precision,
        log_with=[*trackers] or None,
        # ranks wait at barriers for as long as another one trains heads; `heartbeat` finds a rank that hangs
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=30))],
    )
    if precision == "bf16" and accelerator.device.type == "cpu":
        warn_of_slow_bf16("training.mixed_precision", "no")
    torch.set_num_threads(own_cores())
    # by torch's default convolutions multiply float32 numbers in TF32, and nothing else; not `fp32_precision` of each
    # operator: where it is set, torch refuses to read these, as its exporter does
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = recipe.training.tf32
    # images of one training all have one size: the fastest convolutions are found once
    torch.backends.cudnn.benchmark = recipe.trains_encoders
    return accelerator


def run_forked(
    work: Callable[[int], None], processes: int, watched: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Runs work(0) here and work(1) … work(processes − 1) in forked processes, and waits for all. Work and wait are
    inside the context `watched`, which begins after the forks.

    Each process has one thread, so results do not depend on the number of processes. A fork shares the features in
    memory with this process, and dies with it. If a process raises, the others are stopped and this raises `UserError`,
    `Interrupted` or `RuntimeError`.
    """
    context, parent = multiprocessing.get_context("fork"), os.getpid()
    children = list[tuple[BaseProcess, Connection]]()

    def work_in_fork(number: int, writer: Connection) -> None:
        end_with_parent(parent)
        handle(prints=False)
        torch.set_num_threads(1)
        try:
            work(number)
        except UserError as error:
            writer.send(error.args)
        except Interrupted as stop:  # the parent process received the signal too, and prints the message
            sys.exit(stop.status)
        except Exception:
            print_error(traceback.format_exc())
            sys.exit(1)

    def stop() -> None:
        """Lets the processes save their state, and returns when all have ended."""
        for process, _ in children:
            process.terminate()
        for process, _ in children:
            process.join(SECONDS_TO_SAVE)
            process.kill()
            process.join()

    sys.stdout.flush()  # or every fork would print a copy of what is still in the buffers
    sys.stderr.flush()
    try:
        with before_exit(stop):  # a signal between two forks lets those that run save
            for number in range(1, processes):
                reader, writer = context.Pipe(duplex=False)
                child = context.Process(target=work_in_fork, args=(number, writer), daemon=True)
                with deferred(), block_signals():  # a signal right after the fork would otherwise miss the child
                    child.start()
                    children.append((child, reader))
                writer.close()  # only the child keeps this end, so that `recv` raises EOFError when the child has ended
            with one_thread(), watched():
                work(0)
                for process, reader in children:
                    process.join()
                    _raise_fault_of(process, reader)
    except BaseException:
        stop()
        raise


def _raise_fault_of(child: BaseProcess, reader: Connection) -> None:
    """Raises the error of a process that has ended, if it failed."""
    with suppress(EOFError):  # the process has sent no message
        raise UserError(*reader.recv())
    if child.exitcode and child.exitcode < 0:
        name = signal.Signals(-child.exitcode).name
        raise UserError(
            f"a process that trained heads was killed ({name}, maybe out of memory); run the same command to resume"
        )
    if child.exitcode in {128 + number for number in STOPPING}:
        raise Interrupted
    if child.exitcode:
        raise RuntimeError(f"a process that trained heads failed with status {child.exitcode}; its traceback is above")


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one thread, as in a process that trains heads beside others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class WorkDone(NamedTuple):
    """An amount of work."""

    models: int = 0
    cost: int = 0  # `pieces.cost`


NOTHING = WorkDone()


class RunProgress:
    """How far all processes of a run are with its pieces, as a bar or as a line now and then.

    A finished piece counts by its mark in the run directory, whichever process did it; an unfinished one by its steps,
    if this process or a fork of it does it.
    """

    def __init__(
        self,
        activity: str,
        pieces: Mapping[str, WorkDone],
        done: WorkDone,
        directory: RunDirectory,
        processes: int,
        shows: bool,
    ) -> None:
        """`pieces`: {name: its work}. `done`: of an earlier run. `processes`: this one and its forks."""
        self.what, self.pieces, self.done, self.directory, self.shows = activity, pieces, done, directory, shows
        self.total = self._with_done(pieces)
        self.number, self.note = 0, ""  # of the process, and what it does
        # cost of the unfinished pieces' steps, and of all steps of earlier runs: forks share the memory
        self.begun, self.resumed = RawArray("d", processes), RawArray("d", processes)
        self._lock, self._contexts = threading.Lock(), ExitStack()
        self.bar: Any = None

    def __enter__(self) -> RunProgress:
        self.started = self._last = time.monotonic()
        if self.shows and shows_bars():
            from tqdm import tqdm

            form = "{desc} {percentage:3.0f}% of the work|{bar}|{postfix}"
            bar = tqdm(total=100, desc=self.what, leave=False, ncols=_columns(), file=sys.stderr, bar_format=form)
            self.bar = self._contexts.enter_context(bar)
            self._contexts.enter_context(with_bar(self.bar))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._contexts.close()
        if self.shows and kind is None:
            seconds = time.monotonic() - self.started
            logger.info("%s: %s in %s", self.what, self._models(self.finished), duration(seconds))

    def in_process(self, number: int) -> None:
        """Must be called in each fork (`number` 1, 2, …), which then counts for itself and shows nothing."""
        if number:
            self.number, self.shows = number, False

    @contextmanager
    def of_piece(
        self, name: str, note: str, units: int, after_step: Callable[[], object] = lambda: None
    ) -> Iterator[Progress]:
        """Context that yields the progress of one piece: `units` of its own. Each advance calls `after_step`."""
        self.note = note
        yield PieceProgress(self, note, units, self.pieces[name].cost / max(1, units), after_step)
        # from now on its mark in the run directory counts
        self.begun[self.number] = 0.0

    @property
    def finished(self) -> WorkDone:
        return self._with_done(name for name in self.directory.finished() if name in self.pieces)

    def _with_done(self, names: Iterable[str]) -> WorkDone:
        models, cost = map(sum, zip(self.done, *(self.pieces[name] for name in names), strict=True))
        return WorkDone(models, cost)

    def _models(self, finished: WorkDone) -> str:
        return f"{finished.models} of {plural(self.total.models, 'model')}"

    def show(self) -> None:
        now = time.monotonic()
        if not self.shows or now - self._last < (REFRESH_SECONDS if self.bar else LOG_EVERY_SECONDS):
            return
        with self._lock:  # the thread of `watched` shows too
            self._last, finished = now, self.finished
            cost, total = min(self.total.cost, finished.cost + sum(self.begun)), self.total.cost
            # what earlier runs did took none of this run's time, so it tells nothing of its speed
            share, new = cost / max(1, total), cost - self.done.cost - sum(self.resumed)
            # a first piece includes what is done once, such as compiling
            known = new > 0.05 * (total - self.done.cost)
            left = f"about {duration((total - cost) * (now - self.started) / new)} left" if known else ""
            # on a cluster the tasks know what they train
            doing = f"now {printable(self.note)}" if self.note else ""
            text = ", ".join(filter(None, (self._models(finished), left, doing)))
            if self.bar:
                self.bar.n, self.bar.postfix, self.bar.ncols = 100 * share, text, _columns()
                self.bar.refresh()
            else:
                logger.info("%s: %.0f%% of the work, %s", self.what, 100 * share, text)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which the main process shows the progress of all, also while it waits. It may not fork in it."""
        if not self.shows:
            yield
            return
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(WATCH_SECONDS):
                self.show()

        thread = threading.Thread(target=watch, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class PieceProgress(Progress):
    def __init__(
        self, run: RunProgress, note: str, units: int, cost_of_unit: float, after_step: Callable[[], object]
    ) -> None:
        super().__init__(note, units, "")
        self.run, self.cost_of_unit, self.after_step = run, cost_of_unit, after_step

    def skip(self, n: int) -> None:
        self.run.resumed[self.run.number] += n * self.cost_of_unit
        self._count(n, "")

    def advance(self, n: int = 1, note: str = "") -> None:
        pulse.beat()
        self._count(n, note)
        self.after_step()

    def _count(self, n: int, note: str) -> None:
        self.done += n
        self.run.begun[self.run.number] = self.done * self.cost_of_unit
        self.run.note = f"{self.description}, {note}" if note else self.description
        self.run.show()


def _columns() -> int:
    """Returns the width of a bar: that of the terminal, but for "^C " at Ctrl-C, which would begin a second line."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # a terminal that does not say
        width = shutil.get_terminal_size().columns
    return max(20, width - len("^C "))
