"""The command `xdm-ft`, also as `python -m xdm_ft`: reacts to signals before anything else is imported."""

import sys

from xdm_ft import interrupt


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status of `cli.main`."""
    interrupt.handle()
    from xdm_ft import cli  # imports much more

    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
