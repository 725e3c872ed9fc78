"""The processes of a run that share its work, and the progress of all of them."""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.interrupt import Interrupted, before_exit, deferred, end_with_parent, handle, held_back
from xdm_ft.runtime.progress import LOG_EVERY_SECONDS, Progress, duration, pulse, shows_bars
from xdm_ft.runtime.terminal import print_error, with_bar

if TYPE_CHECKING:
    from accelerate import Accelerator

    from xdm_ft.storage.run_directory import RunDirectory


logger = logging.getLogger("xdm_ft")
SECONDS_TO_SAVE = 10.0  # after one process has failed, the time for the others to save and exit


def run_forked(
    work: Callable[[int], None], processes: int, watched: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Runs work(0) here and work(1) … work(processes − 1) in forked processes, and waits for all. Work and wait are
    inside the context `watched`, which begins after the forks.

    Each process has one thread, so results do not depend on the number of processes. A fork shares the features in
    memory with this process, and dies with it. If a process raises, the others are stopped and this raises `UserError`,
    `Interrupted` or `RuntimeError`.
    """
    if processes == 1:
        with one_thread():
            work(0)
        return
    context, children = multiprocessing.get_context("fork"), list[tuple[BaseProcess, Connection]]()
    sys.stdout.flush()  # or every fork would print a copy of what is still in the buffers
    sys.stderr.flush()
    try:
        with before_exit(lambda: _stop(children)):  # a signal between two forks lets those that run save
            for number in range(1, processes):
                reader, writer = context.Pipe(duplex=False)
                child = context.Process(target=_in_child, args=(work, number, os.getpid(), writer), daemon=True)
                with deferred(), held_back():  # a signal right after the fork would otherwise miss the child
                    child.start()
                    children.append((child, reader))
                writer.close()  # only the child keeps this end, so that `recv` raises EOFError when the child has ended
            with one_thread(), watched():
                work(0)
                for process, reader in children:
                    process.join()
                    _raise(process, reader)
    except BaseException:
        _stop(children)
        raise


def _stop(children: Sequence[tuple[BaseProcess, Connection]]) -> None:
    """Lets the processes save their state, and returns when all have ended."""
    for process, _ in children:
        process.terminate()
    for process, _ in children:
        process.join(SECONDS_TO_SAVE)
        process.kill()
        process.join()


def _raise(child: BaseProcess, reader: Connection) -> None:
    """Raises the error of a process that has ended, if it failed."""
    try:
        raise UserError(*reader.recv())
    except EOFError:  # the process has sent no message
        pass
    if child.exitcode and child.exitcode < 0:
        name = signal.Signals(-child.exitcode).name
        raise UserError(
            f"a process that trained heads was killed ({name}, maybe out of memory); run the same command to resume"
        )
    if child.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise Interrupted
    if child.exitcode:
        raise RuntimeError(f"a process that trained heads failed with status {child.exitcode}; its traceback is above")


def _in_child(work: Callable[[int], None], number: int, parent: int, writer: Connection) -> None:
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one thread, as in a process that trains heads beside others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PROCESSES = 1024  # slots of one rank: its forks, at most
REFRESH_SECONDS = 0.2  # at least, between two looks at the counts


class Counts(NamedTuple):
    """Work and models of one process, or of all."""

    done: float = 0.0  # cost of the work done now
    spared: float = 0.0  # cost of work that an earlier run did, or that turned out not to be needed
    models: int = 0  # that have been saved

    def plus(self, other: Counts) -> Counts:
        return Counts(self.done + other.done, self.spared + other.spared, self.models + other.models)


SLOT = np.dtype(list(zip(Counts._fields, ("f8", "f8", "i8"), strict=True)))


class Display(Protocol):
    def show(self, counts: Counts, note: str) -> None: ...
    def close(self) -> None: ...


class Overall:
    """The work on `models` models, which costs `cost` in all (`engines.cost`)."""

    def __init__(
        self, what: str, cost: float, models: int, memory: mmap.mmap, first_slot: int, display: Display | None
    ) -> None:
        self.what, self.cost, self.models = what, cost, models
        # a column of numbers of 8 bytes for each field: another process never reads half of one
        self._fields = [np.frombuffer(memory, SLOT)[name] for name in Counts._fields]
        self._first, self._display = first_slot, display
        self._slot, self._own, self._note, self._next = first_slot, Counts(), "", 0.0
        self._lock = threading.Lock()

    def in_process(self, number: int) -> None:
        """Must be called in each fork (`number` 1, 2, …), which then counts in its own slot and shows nothing."""
        if number:
            self._slot, self._own, self._display = self._first + number % PROCESSES, Counts(), None

    def add(self, done: float = 0.0, spared: float = 0.0, models: int = 0, note: str | None = None) -> None:
        self._own = self._own.plus(Counts(done, spared, models))
        for field, value in zip(self._fields, self._own, strict=True):
            field[self._slot] = value
        self._note = self._note if note is None else note
        self._show()

    @property
    def counts(self) -> Counts:
        """The sums over all processes."""
        return Counts(*(field.sum().item() for field in self._fields))

    def _show(self) -> None:
        if self._display is None or time.monotonic() < self._next:
            return
        with self._lock:  # the thread of `watched` shows too
            self._next = time.monotonic() + REFRESH_SECONDS
            self._display.show(self.counts, self._note)

    @contextmanager
    def share(self, note: str, cost: float, total: int) -> Iterator[Progress]:
        """Context that yields the progress of one part: `total` units of its own, which cost `cost` together."""
        part = _Share(self, note, cost, total)
        self.add(note=note)
        yield part
        self.add(spared=(total - part.done) * part.worth)  # training ended early, or failed

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which the main process shows the progress of all, also while it waits. It may not fork in it."""
        if self._display is None:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(REFRESH_SECONDS):
            self._show()


class _Share(Progress):
    def __init__(self, overall: Overall, note: str, cost: float, total: int) -> None:
        super().__init__(note, total, "")
        self.overall, self.worth = overall, cost / max(1, total)

    def skip(self, n: int) -> None:
        super().skip(n)
        self.overall.add(spared=n * self.worth)

    def advance(self, n: int = 1, note: str = "") -> None:
        pulse.beat()
        self.done += n
        self.overall.add(done=n * self.worth, note=f"{self.description}, {note}" if note else None)


@contextmanager
def overall(
    what: str, cost: float, models: int, accelerator: Accelerator, directory: RunDirectory
) -> Iterator[Overall]:
    """Context for the work of all processes on these models. The main process shows it, and says how long it took.

    Raises `UserError` if the disk is full: several launched processes share a small file in the run directory.
    """
    ranks, main = accelerator.num_processes, accelerator.is_main_process
    size = SLOT.itemsize * PROCESSES * ranks
    # anonymous memory is shared with forks only
    name = f"{what.replace(' ', '_')}_{models}"  # with more seeds, the same work is done again for more models
    memory = mmap.mmap(-1, size) if ranks == 1 else directory.shared_memory(name, size)
    started, display = time.monotonic(), _display(what, cost, models) if main else None
    own = Overall(what, cost, models, memory, accelerator.process_index * PROCESSES, display)
    try:
        yield own
    finally:
        if display is not None:
            display.close()
    if main:
        logger.info("%s: %s in %s", what, _of(own.counts.models, models), duration(time.monotonic() - started))


def _of(done: int, models: int) -> str:
    return f"{done} of {models} model{'' if models == 1 else 's'}"


def _display(what: str, cost: float, models: int) -> Display:
    return _Bar(what, cost, models) if shows_bars() else _Lines(what, cost, models)


class _Lines:
    """Writes a line to the log every 30 seconds."""

    def __init__(self, what: str, cost: float, models: int) -> None:
        self.what, self.cost, self.models = what, cost, models
        self.started = self.last = time.monotonic()

    def show(self, counts: Counts, note: str) -> None:
        now = time.monotonic()
        if now - self.last < LOG_EVERY_SECONDS:
            return
        self.last, share = now, min(1.0, (counts.done + counts.spared) / self.cost)
        left = ""
        if counts.done > 0:
            seconds = (self.cost - counts.done - counts.spared) * (now - self.started) / counts.done
            left = f", about {duration(max(0.0, seconds))} left"
        logger.info("%s: %.0f%%, %s%s, now %s", self.what, 100 * share, _of(counts.models, self.models), left, note)

    def close(self) -> None:
        pass


def _columns() -> int:
    """The width of a bar: that of the terminal, but for what it prints at Ctrl-C, which would begin a second line."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # a terminal that does not say
        width = shutil.get_terminal_size().columns
    return max(20, width - len("^C "))


class _Bar:
    """One bar on the terminal, with the time left at the mean rate since the start."""

    def __init__(self, what: str, cost: float, models: int) -> None:
        from tqdm import tqdm

        self.models, self.counted = models, Counts()
        self.bar = tqdm(
            total=cost,
            desc=what,
            smoothing=0,  # methods differ in speed, and a piece in progress is not all that is left
            leave=False,
            ncols=_columns(),
            file=sys.stderr,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {remaining} left{postfix}",
        )
        self.shown = with_bar(self.bar)
        self.shown.__enter__()

    def show(self, counts: Counts, note: str) -> None:
        spared, done = counts.spared - self.counted.spared, counts.done - self.counted.done
        self.counted = counts
        self.bar.initial += spared  # tqdm takes the rate from n − initial
        self.bar.n = min(self.bar.total, self.bar.n + spared + done)
        self.bar.ncols = _columns()
        self.bar.postfix = f"{_of(counts.models, self.models)}, {printable(note)}"
        self.bar.refresh()

    def close(self) -> None:
        self.shown.__exit__(None, None, None)
        self.bar.close()
