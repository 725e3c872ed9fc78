"""The entry script: `accelerate launch xdm_ft/run.py RECIPE.yaml [key.sub=value …]`, the same as `xdm-ft run`."""

import sys
from pathlib import Path

# Python puts this script's folder first on the path, where `data`, `features`, … would shadow other packages.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from xdm_ft.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
