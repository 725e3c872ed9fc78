"""What a verb prints on standard output and standard error. Nothing else in the package prints.

Control characters are made visible, because labels, paths and texts in files come from others, and a terminal executes
their escape sequences. Characters that the terminal's encoding lacks are written as escapes.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from xdm_ft.errors import UserError, printable


def show(text: object) -> None:
    """Prints a text of one or more lines to standard output, see `write`."""
    write(visible(f"{text}\n"))


def write(text: str) -> None:
    """Writes to standard output, control characters included: for text with colours, whose names are printable.

    Raises `BrokenPipeError` if the reader has ended (`| head`), and `UserError` if the output can not be written.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(f"standard output: {error.strerror}; not all of it is written; write it elsewhere") from error


def complain(text: object) -> None:
    """Prints a text of one or more lines to standard error. Where that can not be written, nothing is printed."""
    try:
        sys.stderr.write(visible(f"{text}\n"))
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def visible(text: str) -> str:
    """Returns the lines of a text, their control characters as escapes."""
    return "\n".join(printable(line) for line in text.split("\n"))


class _Log(logging.Handler):
    """Prints every record to standard error. Its message is one line; a traceback follows in lines of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        complain("\n".join(filter(None, [printable(record.getMessage()), trace])))


@contextmanager
def opened(level: int) -> Iterator[None]:
    """Context of a verb: standard output and error can be written, and the log (of `level`) goes to standard error.

    Raises `UserError` at the end if standard output holds text that can not be written.
    """
    for number in range(3):  # the next file that is opened would get the number of a closed one, and our output
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _usable(sys.stdout), _usable(sys.stderr)
    log, handler, show_warning = logging.getLogger(), _Log(), warnings.showwarning
    log.addHandler(handler)
    logging.getLogger("xdm_ft").setLevel(level)
    warnings.showwarning = _log_warning
    try:
        yield
    except SystemExit:  # --help and --version, which argparse prints
        write("")
        raise
    finally:
        log.removeHandler(handler)
        warnings.showwarning = show_warning
    write("")  # what libraries have printed


def _usable(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed before Python started
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _discard(stream: TextIO) -> None:
    """Lets the stream write into nothing from now on: Python would try to write the rest at exit, and fail again."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    logging.getLogger("py.warnings").warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)
