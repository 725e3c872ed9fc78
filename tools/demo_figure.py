"""Writes docs/demo.svg, the picture of the README: the results of a run of the demo, each with its interval.

    PYTHONPATH=. python tools/demo_figure.py output/demo

It is the page's figure of the results on a white background, so it can be read in light and dark.
"""

import sys
from pathlib import Path

RESULTS = Path("plots", "results.svg")
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "demo.svg"

if __name__ == "__main__":
    PICTURE.write_text((Path(sys.argv[1]) / RESULTS).read_text(encoding="utf-8"), encoding="utf-8")
    print(PICTURE)
