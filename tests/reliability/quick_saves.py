"""`xdm-ft` on so many cores, saving after every step: `python quick_saves.py CORES run RECIPE.yaml`."""

import math
import os
import random
import sys


def save_after_every_step(cores: int) -> None:
    from xdm_ft.storage import checkpoint

    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.sample(available, min(cores, len(available))))
    checkpoint.EVERY_SECONDS = checkpoint.EVENT_SECONDS = 0.0
    checkpoint.SHARE = math.inf


if __name__ == "__main__":
    save_after_every_step(int(sys.argv[1]))
    from xdm_ft.cli import main

    sys.exit(main(sys.argv[2:]))
