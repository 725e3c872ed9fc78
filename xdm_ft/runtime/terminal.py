"""What a verb prints on standard output and standard error. Nothing else in the package prints.

Control characters are made visible, because labels, paths and texts in files come from others, and a terminal executes
their escape sequences. Characters that the terminal's encoding lacks are written as escapes.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, Protocol, TextIO

from xdm_ft.runtime.errors import UserError, printable


def show(text: object) -> None:
    """Prints a text of one or more lines to standard output, see `write`."""
    write(visible(f"{text}\n"))


def write(text: str) -> None:
    """Writes to standard output, control characters included: for text with colours, whose names are printable.

    Raises `BrokenPipeError` if the reader has ended (`| head`), and `UserError` if the output cannot be written.
    """
    with _output():
        sys.stdout.write(text)
        sys.stdout.flush()


def write_data(data: bytes) -> None:
    """Writes UTF-8 to standard output as it is, or as `show` does if that is a terminal. Raises as `write` does."""
    if sys.stdout.isatty():
        write(visible(data.decode("utf-8", "surrogateescape")))
        return
    with _output():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextmanager
def _output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(f"standard output: {error.strerror}; not all of it is written; write it elsewhere") from error


def print_error(text: object) -> None:
    """Prints a text of one or more lines to standard error. Where that cannot be written, nothing is printed.

    A bar on the terminal gives way, and stands below the text afterwards.
    """
    try:
        for bar in _bars:
            bar.clear()
        sys.stderr.write(visible(f"{text}\n"))
        sys.stderr.flush()
        for bar in _bars if os.getpid() == _owner else ():  # a fork has an old copy of the bar
            bar.refresh()
    except OSError:
        _discard(sys.stderr)


class ProgressBar(Protocol):
    """A bar of tqdm."""

    def clear(self) -> Any: ...
    def refresh(self) -> Any: ...


_bars: list[ProgressBar] = []  # that are on the terminal now
_owner = os.getpid()  # the process that shows them


@contextmanager
def with_bar(bar: ProgressBar) -> Iterator[None]:
    """Context in which a bar stands on standard error, below what else is printed there."""
    global _owner
    _owner = os.getpid()
    _bars.append(bar)
    try:
        yield
    finally:
        _bars.remove(bar)


@contextmanager
def set_aside() -> Iterator[None]:
    """Context whose standard output is standard error, also for libraries and child processes.

    Then standard output holds nothing but what is written after the context.
    """
    out = sys.stdout
    try:
        number = out.fileno()
    except (OSError, ValueError):  # captured inside Python
        number = None
    kept = None if number is None else os.dup(number)
    # what Python still holds belongs to standard output, and would go to the other one after `dup2`
    out.flush()
    sys.stdout = sys.stderr
    if number is not None:
        os.dup2(2, number)
    try:
        yield
    finally:
        sys.stdout = out
        if number is not None and kept is not None:
            os.dup2(kept, number)
            os.close(kept)


def visible(text: str) -> str:
    """Returns the lines of a text, their control characters as escapes."""
    return "\n".join(printable(line) for line in text.split("\n"))


class _Log(logging.Handler):
    """Prints every record to standard error. Its message is one line; a traceback follows in lines of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        trace = [logging.Formatter().formatException(record.exc_info)] if record.exc_info else []
        print_error("\n".join([printable(record.getMessage()), *trace]))


@contextmanager
def open_streams(level: int) -> Iterator[None]:
    """Context of a verb: standard output and error can be written, and the log (of `level`) goes to standard error.

    Raises `UserError` at the end if standard output holds text that cannot be written.
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
    except SystemExit:  # help, version and faults of the arguments, which argparse prints
        try:
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)
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


def packaged_texts(file: str) -> dict[str, dict[str, Any]]:
    """Returns the tables of a TOML file of the package. The lines of a text are joined by single spaces."""

    def joined(value: Any) -> Any:
        if isinstance(value, list):
            return [joined(text) for text in value]
        return " ".join(value.split()) if isinstance(value, str) else value

    # `files` of a room would import it: `xdm-ft explain` answers at once
    text = files("xdm_ft").joinpath(file).read_text(encoding="utf-8")
    return {name: {key: joined(value) for key, value in table.items()} for name, table in tomllib.loads(text).items()}


def glossary() -> dict[str, dict[str, str]]:
    """Returns {group: {word: meaning}}. The first group has the concepts that a reader needs to ship a model."""
    return packaged_texts("report/glossary.toml")
