"""Heartbeats: a run of several processes ends if one of them hangs, and waits for a slow one without a limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from xdm_ft.runtime.interrupt import before_exit, print_nothing
from xdm_ft.runtime.progress import pulse

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed import Store

T = TypeVar("T")
EVERY_SECONDS = 10.0  # between two checks of the heartbeats
SILENCE_SECONDS = 30 * 60.0  # without a heartbeat, after which a rank counts as hung
REPORTED = "heartbeat/reported"  # key that a rank sets in the store when it reports a hung rank
AGAIN = 4  # a hung rank is reported after this many further checks with the same result


def wait_for_everyone(accelerator: Accelerator) -> None:
    """Waits until every rank has called this. A waiting rank does not count as hung."""
    with pulse.waiting():
        accelerator.wait_for_everyone()


def from_main(accelerator: Accelerator | None, value: T) -> T:
    """Returns the main process's value in every process. None: there is one process."""
    if accelerator is None or accelerator.num_processes == 1:
        return value
    from accelerate.utils import broadcast_object_list

    wait_for_everyone(accelerator)
    of_main: T = broadcast_object_list([value])[0]
    return of_main


def gather(accelerator: Accelerator | None, values: list[T]) -> list[T]:
    """Returns the values of all processes, in the order of their ranks, in every process."""
    if accelerator is None or accelerator.num_processes == 1:
        return values
    from accelerate.utils import gather_object

    wait_for_everyone(accelerator)
    gathered: list[T] = gather_object(values)
    return gathered


@contextmanager
def heartbeat(accelerator: Accelerator) -> Iterator[None]:
    """Context for the work of a rank: a thread publishes its heartbeat and checks the heartbeats of the others.

    A rank has a heartbeat while its work advances (`pulse`: training steps, batches of images, shards, files) and while
    it waits in `wait_for_everyone`. If a rank has none for SILENCE_SECONDS, this process exits with status 1. The first
    rank that notices prints one line; the launcher then ends the other processes.
    """
    if accelerator.num_processes == 1:
        yield
        return
    from torch.distributed.distributed_c10d import _get_default_store

    # a second connection, because a collective operation blocks the first one while it waits
    watch = Watch(_get_default_store().clone(), accelerator.process_index, accelerator.num_processes)
    ended = threading.Event()
    thread = threading.Thread(target=watch.check_until, args=(ended,), daemon=True, name="heartbeat")
    thread.start()
    try:
        # a signal after a report comes from the launcher, as the rank that reported has ended
        with before_exit(lambda: print_nothing() if watch.reported() else None):
            yield
    except BaseException:
        if watch.reported():  # the exception is a consequence of the hung rank, and its traceback would mislead
            os._exit(1)
        raise
    finally:
        ended.set()
        thread.join()


class Watch:
    """Publishes the heartbeat of one rank, and counts for each rank the checks since its last heartbeat."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.store, self.rank = store, rank
        self.heard: list[bytes] = [b""] * ranks  # the last heartbeat of every rank
        # counted in checks, not in seconds: a process that was paused itself (Ctrl-Z) must not report the others
        self.silent = [0] * ranks
        self._published, self._count = 0, -1

    def check(self) -> list[int]:
        """Publishes and reads heartbeats once. Returns the ranks that have had none for SILENCE_SECONDS."""
        try:
            if pulse.waits or pulse.count != self._count:
                self._published, self._count = self._published + 1, pulse.count
                self.store.set(f"heartbeat/{self.rank}", str(self._published))
            keys = [f"heartbeat/{rank}" for rank in range(len(self.heard))]
            now = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
        except RuntimeError:  # the process that serves the store cannot be reached
            now = self.heard
        for rank, beat in enumerate(now):
            self.silent[rank] = self.silent[rank] + 1 if beat == self.heard[rank] else 0
        self.heard = now
        return [rank for rank, looks in enumerate(self.silent) if looks * EVERY_SECONDS >= SILENCE_SECONDS]

    def is_first_to_report(self) -> bool:
        """Returns whether this rank is the first that calls this."""
        try:
            return self.store.add(REPORTED, 1) == 1
        except RuntimeError:  # rank 0 served the store and has ended: it has reported, or the launcher names it
            return False

    def reported(self) -> bool:
        """Returns whether a rank has reported a hung one."""
        try:
            return self.store.check([REPORTED])
        except RuntimeError:
            return False

    def check_until(self, ended: threading.Event) -> None:
        """Checks every `EVERY_SECONDS`, and ends this process if a rank hangs."""
        checks_with_silence = 0
        while not ended.wait(EVERY_SECONDS):
            silent = self.check()
            checks_with_silence = checks_with_silence + 1 if silent else 0
            # a rank that waits for the hung one in the same step falls silent some checks later: wait, to report both
            if checks_with_silence <= AGAIN:
                continue
            if self.is_first_to_report():
                # os.write, because the main thread may hang while it holds the lock of sys.stderr
                os.write(2, f"xdm-ft: {hung_message(silent, len(self.heard))}\n".encode())
            elif ended.wait(AGAIN * EVERY_SECONDS):  # the rank that reports exits first: the launcher names the first
                return
            os._exit(1)  # the main thread waits inside a library, where an exception cannot stop it


def hung_message(silent: list[int], ranks: int) -> str:
    """Returns the message that ends the run."""
    minutes = SILENCE_SECONDS / 60
    who = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} have"
    if len(silent) == ranks:
        who = "all ranks have"  # one hangs, and the others wait for it within the same training step
    return f"{who} made no progress for {minutes:g} minutes; run the same command to resume"
