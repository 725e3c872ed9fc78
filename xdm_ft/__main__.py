"""The command `xdm-ft`, also as `python -m xdm_ft`: reacts to signals before anything else is imported."""

import os
import sys

from xdm_ft.runtime import interrupt

SPINS = "1000"  # a small ViT's step took 0.11 s on two cores beside another program, by default 0.2 to 0.3


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status of `parser.main`."""
    interrupt.handle()
    if "OMP_WAIT_POLICY" not in os.environ:
        # torch's threads wait for each other in a loop, which keeps a core from the program that they wait for
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from xdm_ft.cli import parser

    return parser.main(argv)


if __name__ == "__main__":
    sys.exit(main())
