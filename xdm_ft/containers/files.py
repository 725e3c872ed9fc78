"""Data sets whose images are files, and groups that are read from their paths."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, overload

import numpy as np
from pydantic import AfterValidator, Field

from xdm_ft.images.decode import EncodedImages
from xdm_ft.runtime.errors import UserError, printable


def _regular_expression(pattern: str | None) -> str | None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


GroupPattern = Annotated[
    str | None,
    AfterValidator(_regular_expression),
    Field(
        description="regular expression for an image's path; the text that it matches, or that its parentheses "
        "capture, is the image's group: patient, slide or sequence. No split divides a group; null: images are "
        "independent"
    ),
]


class PathsBelow(Sequence[str]):
    """Paths below one folder, of which each keeps only the rest, as a million paths need much memory."""

    def __init__(self, folder: str | Path, rest: Sequence[str]) -> None:
        self.folder, self.rest = os.path.join(folder, ""), rest

    def __len__(self) -> int:
        return len(self.rest)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> PathsBelow: ...
    def __getitem__(self, place: int | slice) -> str | PathsBelow:
        if isinstance(place, slice):
            return PathsBelow(self.folder, self.rest[place])
        return self.folder + self.rest[place]


class ImageFiles(EncodedImages):
    """Row i is the file `paths[i]` (absolute); `shown[i]` is its path as the user wrote it, for messages."""

    paths: Sequence[str]
    shown: Sequence[str]
    base: str | Path
    """The folder at which `shown` starts. A table may also name files elsewhere, by absolute paths."""

    def name(self, row: int) -> str:
        return printable(self.shown[row])

    def name_in_data(self, row: int) -> str:
        return printable(self.shown[row].removeprefix(self._start))

    @cached_property
    def _start(self) -> str:
        """The text with which the paths below `base` start."""
        return os.path.join(self.base, "")

    def content(self, row: int) -> str:
        return self.paths[row]


def numbered(values: list[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the distinct values, sorted and printable, and for every value its index among them (int64 [N])."""
    names = sorted(set(values))
    number = {name: i for i, name in enumerate(names)}
    return tuple(printable(name) for name in names), np.fromiter(map(number.__getitem__, values), np.int64, len(values))


def groups_of(paths: list[str], pattern: str) -> np.ndarray:
    """Returns the number of every path's group (int64 [N]). Raises `UserError` if a path does not match."""
    expression = re.compile(pattern)
    groups = [group_of(path, expression) for path in paths]
    without = [path for path, group in zip(paths, groups, strict=True) if group is None]
    if without:
        raise UserError(
            f'data.group: "{pattern}" matches nothing in {len(without)} of {len(paths)} paths, '
            f"the first: {printable(without[0])}; change it so that every image has a group"
        )
    return numbered([group for group in groups if group is not None])[1]


def group_of(path: str, expression: re.Pattern[str]) -> str | None:
    """Returns the text that identifies the group of a path, None if the expression matches nothing in it."""
    match = expression.search(path)
    if match is None:
        return None
    # \0 is in no path, so that ("a", "bc") and ("ab", "c") stay two groups
    return "\0".join(match.groups("")) if expression.groups else match[0]
