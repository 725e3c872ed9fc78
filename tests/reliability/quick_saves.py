"""`xdm-ft` on so many cores, saving after every step: `python quick_saves.py CORES run RECIPE.yaml`."""

import itertools
import math
import os
import random
import signal
import sys
from pathlib import Path

OUTSIDE = 77  # exit status where a signal arrives before the run has begun, or after it has ended


def save_after_every_step(cores: int) -> None:
    from xdm_ft.features import extract as extraction
    from xdm_ft.storage import checkpoint

    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.sample(available, min(cores, len(available))))
    checkpoint.EVERY_SECONDS = checkpoint.EVENT_SECONDS = 0.0
    checkpoint.SHARE = math.inf
    extraction.IMAGES_PER_SHARD = 16


def without_syncs(cores: int) -> None:
    """The same and faster: what is written outlives the process, if not a loss of power.

    A signal outside of the run, in the code of the test, ends the process with the status `OUTSIDE`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(OUTSIDE))
    os.fsync = lambda handle: None
    save_after_every_step(cores)


def killed_at_sync(number: int, counts: Path, cores: int) -> None:
    """The same, and the process kills itself when it is about to make its write of this number safe on the disk.

    `counts` holds how many writes there were.
    """
    without_syncs(cores)
    numbers = itertools.count(1)

    def counted(handle: int) -> None:
        count = next(numbers)
        counts.write_text(str(count))
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = counted


if __name__ == "__main__":
    save_after_every_step(int(sys.argv[1]))
    from xdm_ft.cli.parser import main

    sys.exit(main(sys.argv[2:]))
