"""A run of several processes ends where one of them hangs, and waits for one that works as long as it takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from xdm_ft.progress import pulse

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
EVERY_SECONDS = 10.0  # between looks
SILENCE_SECONDS = 30 * 60.0  # without a heartbeat, after which a rank counts as hung
SAID = "heartbeat/said"  # key of the store that is there once a rank has ended the run
AGAIN = 4  # looks that must find the same


def wait_for_everyone(accelerator: Accelerator) -> None:
    """Waits until every rank is here: to wait is not to hang."""
    with pulse.waiting():
        accelerator.wait_for_everyone()


def from_main(accelerator: Accelerator, value: T) -> T:
    """The main process's value, in every process."""
    if accelerator.num_processes == 1:
        return value
    from accelerate.utils import broadcast_object_list

    wait_for_everyone(accelerator)
    found: T = broadcast_object_list([value])[0]
    return found


@contextmanager
def heartbeat(accelerator: Accelerator) -> Iterator[None]:
    """Around the work of one of several ranks: a thread shows the others that it goes on, and looks at theirs.

    A rank has a heartbeat while its work advances (`pulse`: training steps, batches of images, shards, files) and while
    it waits for the others by `wait_for_everyone`. One without for SILENCE_SECONDS ends this process, with status 1 and
    one line from the first that notices; the launcher then ends the rest.
    """
    if accelerator.num_processes == 1:
        yield
        return
    from torch.distributed.distributed_c10d import _get_default_store

    # a connection of its own: collectives may hold the other one for as long as they wait
    watch = Watch(_get_default_store().clone(), accelerator.process_index, accelerator.num_processes)
    ended = threading.Event()
    thread = threading.Thread(target=_look, args=(watch, ended), daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    except BaseException:
        if watch.said():  # what is raised here only follows from it
            os._exit(1)
        raise
    finally:
        ended.set()
        thread.join()


class Store(Protocol):
    """What the ranks share: the part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class Watch:
    """Publishes one rank's heartbeat and counts the looks for which each rank has had none."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.store, self.rank = store, rank
        self.heard: list[bytes] = [b""] * ranks  # the last heartbeat of every rank
        # in looks, not in time: a process that was stopped itself (Ctrl-Z) must not blame the others afterwards
        self.silent = [0] * ranks
        self._published, self._count = 0, -1

    def look(self) -> list[int]:
        """Publishes and reads once; returns the ranks that have been silent for SILENCE_SECONDS."""
        try:
            if pulse.waits or pulse.count != self._count:
                self._published, self._count = self._published + 1, pulse.count
                self.store.set(f"heartbeat/{self.rank}", str(self._published))
            now = [self._read(rank) for rank in range(len(self.heard))]
        except RuntimeError:  # whoever keeps the store can not be reached
            now = self.heard
        for rank, beat in enumerate(now):
            self.silent[rank] = self.silent[rank] + 1 if beat == self.heard[rank] else 0
        self.heard = now
        return [rank for rank, looks in enumerate(self.silent) if looks * EVERY_SECONDS >= SILENCE_SECONDS]

    def speaks(self) -> bool:
        """Whether this rank is the first to ask, or can not ask the others."""
        try:
            return self.store.add(SAID, 1) == 1
        except RuntimeError:
            return True

    def said(self) -> bool:
        """Whether a rank has said that another one hangs."""
        try:
            return self.store.check([SAID])
        except RuntimeError:
            return False

    def _read(self, rank: int) -> bytes:
        key = f"heartbeat/{rank}"
        return self.store.get(key) if self.store.check([key]) else b""


def _look(watch: Watch, ended: threading.Event) -> None:
    found = 0
    while not ended.wait(EVERY_SECONDS):
        silent = watch.look()
        found = found + 1 if silent else 0
        if found <= AGAIN:  # a rank that waits for a hung one in the same step falls silent at another look than that
            continue
        if watch.speaks():
            # the main thread may hang with the locks of sys.stderr
            os.write(2, f"xdm-ft: {silence(silent, len(watch.heard))}\n".encode())
        elif ended.wait(AGAIN * EVERY_SECONDS):  # else the launcher would blame this rank
            return
        os._exit(1)  # the main thread waits in a library, where no exception reaches it


def silence(silent: list[int], ranks: int) -> str:
    """The line that ends the run."""
    minutes = SILENCE_SECONDS / 60
    who = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} have"
    if len(silent) == ranks:
        who = "all ranks have"  # one hangs, and the others wait for it in the middle of a step
    return f"{who} made no progress for {minutes:g} minutes; run the same command to resume"
