"""Paths as a user writes them."""

from pathlib import Path

from xdm_ft.runtime.errors import UserError, printable


def expanded(path: str | Path, key: str) -> Path:
    """Returns the path with `~` replaced by the home folder. Raises `UserError`, which names `key`, without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        problem = "the home folder is unknown (no HOME, or no such user)"
        raise UserError(f"{key}: {printable(path)}: {problem}; write the whole path") from error
