"""`xdm-ft`, saving after every step: `python quick_saves.py run RECIPE.yaml`."""

import math
import sys

from xdm_ft.cli import main
from xdm_ft.training import checkpoint

checkpoint.EVERY_SECONDS = checkpoint.EVENT_SECONDS = 0.0
checkpoint.SHARE = math.inf

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
