"""The entry script: `accelerate launch xdm_ft/run.py RECIPE.yaml [key.sub=value …]`, the same as `xdm-ft run`."""

import os
import sys

# Python puts this script's folder first on the path, where `data`, `features`, … would shadow other packages.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from xdm_ft.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
