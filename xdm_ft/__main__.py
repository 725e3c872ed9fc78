"""`python -m xdm_ft` is `xdm-ft`."""

import sys

from xdm_ft.cli import main

if __name__ == "__main__":
    sys.exit(main())
