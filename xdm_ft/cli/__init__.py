"""The verbs of the command line. Here: what a verb returns, as data for `--json` and as text for a reader."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.runtime.terminal import show

UNKNOWN_TRAINING = "unknown whether an image trained the model, because its training images have no checksums"


@dataclass(frozen=True)
class CommandResult:
    """The result of a verb. Values are fractions, seconds and bytes, names are as in the data: only the text rounds."""

    document: Any  # what `as_json` can write
    lines: Sequence[str] | Callable[[], None] = ()  # the text; a function prints it itself
    error: UserError | None = None  # a fault that leaves a result; its lines go to standard error, after the text
    status: int = 0  # exit status; with an error it is 2
    text_despite_error: bool = False  # what `--json` prints always is

    @property
    def exit_status(self) -> int:
        return self.status or (2 if self.error else 0)

    def text(self) -> str:
        """Returns the lines, in which names can neither begin a line nor change the terminal."""
        return "" if callable(self.lines) else "\n".join(map(printable, self.lines))

    def show(self) -> None:
        """Prints the text to standard output."""
        if callable(self.lines):
            self.lines()
        elif self.lines:
            show(self.text())


def as_json(document: Any) -> str:
    """Returns the text of a JSON document that ends with a newline. NaN and ±∞, which JSON lacks, become null.

    Dataclasses and blocks become objects, and paths texts. Everything but ASCII is escaped, so that also a path that is
    not UTF-8 can be read back (`os.fsencode`), and the text is the same in every locale.
    """
    return json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # of pydantic, which is not imported here
        return _plain(value.model_dump())
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def left_out_lines(
    unreadable: Mapping[str, str], copies: int, other_label: int, training_images: int | None
) -> Iterator[str]:
    """Yields a line for each kind of images of a site that do not count.

    `unreadable`: image → why. `other_label`: copies with another label. `training_images`: images that trained the
    model; None: unknown.
    """
    yield from unreadable_left_out(unreadable)
    if copies:
        yield copies_left_out(copies, other_label)
    if training_images:
        yield f"{plural(training_images, 'image')} left out, as they trained the model"
    elif training_images is None:
        yield UNKNOWN_TRAINING


def unreadable_left_out(unreadable: Mapping[str, str]) -> Iterator[str]:
    """Yields a line if there are such images, {image: why}."""
    if unreadable:
        name, reason = next(iter(unreadable.items()))
        yield f"{plural(len(unreadable), 'unreadable image')} left out, the first: {name}: {reason}"


def copies_left_out(copies: int, other_label: int) -> str:
    contrary = f", {other_label} of them with another label" if other_label else ""
    return f"{copies} {'copy' if copies == 1 else 'copies'} left out, as an image counts once{contrary}"


def columns(rows: Iterable[tuple[str, ...]], numbers: bool = True) -> list[str]:
    """Returns aligned lines: the first cell of a row to the left, the others, if they are numbers, to the right."""
    table = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    side = ">" if numbers else "<"
    lines = []
    for first, *others in table:
        cells = [f"{cell:{side}{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return lines
