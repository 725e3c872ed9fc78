"""`xdm-ft` on so many cores, saving after every step: `python quick_saves.py CORES run RECIPE.yaml`."""

import math
import os
import random
import sys

if __name__ == "__main__":
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.sample(available, min(int(sys.argv[1]), len(available))))

    from xdm_ft.cli import main
    from xdm_ft.storage import checkpoint

    checkpoint.EVERY_SECONDS = checkpoint.EVENT_SECONDS = 0.0
    checkpoint.SHARE = math.inf
    sys.exit(main(sys.argv[2:]))
