"""Work in forked processes, one per core: heads are too small to profit from threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import Interrupted, before_exit, deferred, end_with_parent, handle, held_back
from xdm_ft.runtime.terminal import complain

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
        complain(traceback.format_exc())
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
