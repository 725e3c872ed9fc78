"""Work shared out between processes of one machine, one per core: heads are too small for threads."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from xdm_ft.errors import UserError
from xdm_ft.interrupt import Interrupted, handled_here

SECONDS_TO_SAVE = 10.0  # that the others have to leave in order when one can not go on
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def share_out(work: Callable[[int], None], processes: int) -> None:
    """Runs work(0) here and work(1) … work(processes − 1) in forked processes, each on one thread, and waits for all.

    Every number of a head is then the same however many there are. Forked processes share the features in memory, and
    die with this one. What one of them raises is raised here, once the others have stopped.
    """
    if processes == 1:
        with _one_thread():
            work(0)
        return
    context, children = multiprocessing.get_context("fork"), list[tuple[BaseProcess, Connection]]()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in range(1, processes):
        reader, writer = context.Pipe(duplex=False)
        child: BaseProcess = context.Process(target=_in_child, args=(work, number, writer), daemon=True)
        child.start()
        writer.close()
        children.append((child, reader))
    try:
        with _one_thread():
            work(0)
        for process, reader in children:
            process.join()
            _raise(process, reader)
    except BaseException:
        for process, _ in children:
            process.terminate()
        for process, _ in children:
            process.join(SECONDS_TO_SAVE)
            process.kill()
        raise


def _raise(child: BaseProcess, reader: Connection) -> None:
    """What a process that has ended has to say."""
    try:
        raise UserError(reader.recv())
    except EOFError:  # it closed its end without a word
        pass
    if child.exitcode and child.exitcode < 0:
        name = signal.Signals(-child.exitcode).name
        raise UserError(f"a process that trained heads was killed ({name}; out of memory?); run the same command again")
    if child.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise Interrupted
    if child.exitcode:
        raise RuntimeError(f"a process that trained heads failed with status {child.exitcode}; its traceback is above")


def _in_child(work: Callable[[int], None], number: int, writer: Connection) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    handled_here()
    try:
        work(number)
    except UserError as error:
        writer.send(str(error))
    except Interrupted as stop:  # the one who forked has been interrupted too, and says so
        sys.exit(stop.status)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
