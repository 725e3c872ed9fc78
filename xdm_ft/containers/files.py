"""Data sets whose images are files: found in trees of folders, with groups that are read from their paths."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, overload

import numpy as np
from pydantic import AfterValidator, Field

from xdm_ft.images.decode import EncodedImages, extensions
from xdm_ft.runtime.errors import UserError, plural, printable

logger = logging.getLogger("xdm_ft")

TREE = "set data.root to a folder of <domain>/<class>/<image>"  # the end of a message about `data.root`


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
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> PathsBelow: ...
    def __getitem__(self, index: int | slice) -> str | PathsBelow:
        if isinstance(index, slice):
            return PathsBelow(self.folder, self.rest[index])
        return self.folder + self.rest[index]


class ImageFiles(EncodedImages):
    """Row i is the file `paths[i]` (absolute); `shown[i]` is its path as the user wrote it, for messages."""

    paths: Sequence[str]
    shown: Sequence[str]
    base: str | Path
    """The folder at which `shown` starts. A table may also name files elsewhere, by absolute paths."""

    def name(self, row: int) -> str:
        return printable(self.shown[row])

    def name_in_data(self, row: int) -> str:
        return printable(self.shown[row].removeprefix(os.path.join(self.base, "")))

    def content(self, row: int) -> str:
        return self.paths[row]


def numbered(values: list[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the distinct values, sorted and printable, and for every value its index among them (int64 [N])."""
    names = sorted(set(values))
    number = {name: i for i, name in enumerate(names)}
    return tuple(printable(name) for name in names), np.fromiter(map(number.__getitem__, values), np.int64, len(values))


def groups_of(paths: list[str], pattern: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names of groups and the number of every path's group (int64 [N]).

    Raises `UserError` if a path does not match.
    """
    expression = re.compile(pattern)
    groups = [group_of(path, expression) for path in paths]
    without = [path for path, group in zip(paths, groups, strict=True) if group is None]
    if without:
        raise UserError(
            f'data.group: "{pattern}" matches nothing in {len(without)} of {len(paths)} paths, the first: '
            f"{without[0]}; change it to match every path"
        )
    return numbered([group for group in groups if group is not None])


def group_of(path: str, expression: re.Pattern[str]) -> str | None:
    """Returns the text that identifies the group of a path, None if the expression matches nothing in it."""
    match = expression.search(path)
    if match is None:
        return None
    # \0 is in no path, so that ("a", "bc") and ("ab", "c") stay two groups
    return "\0".join(match.groups("")) if expression.groups else match[0]


def refuse_missing_folder(root: Path, remedy: str) -> None:
    """Raises `UserError` if `data.root` is not a folder; `remedy` ends the message and says what to do."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise UserError(f"data.root: {root} {problem}; {remedy}")


def images_below(root: Path, folders: str = "<domain>/<class>") -> tuple[list[str], list[str]]:
    """Returns the images in such `folders` of `root` or deeper, and all files there.

    Paths are relative to `root`, with slashes, in the order of their names. Hidden files are skipped. Links are
    followed, but not in circles. The log counts the other files and the images in other folders.
    """
    depth = folders.count("/") + 1
    images, files = list[str](), list[str]()
    for below, names in _files(str(root), "", set()):
        paths = [below + name for name in names]
        files += paths
        if below.count("/") >= depth:
            images += _images(paths)
    if images and len(images) < len(files):
        deep, of_any_depth = set(images), set(_images(files))
        others = [path for path in files if path not in of_any_depth]
        higher = [path for path in files if path in of_any_depth and path not in deep]
        for paths, kind, what in (
            (others, "file", "without an image"),
            (higher, "image", f"outside a {folders} folder"),
        ):
            if paths:
                count = plural(len(paths), kind)
                logger.warning("%s: ignored %s %s, the first: %s", root, count, what, paths[0])
    return images, files


def _files(folder: str, below: str, visited: set[tuple[int, int]]) -> Iterator[tuple[str, list[str]]]:
    """Yields the path of a folder from the root and names of files in it; all of them in the order of their paths.

    `below` is the path of `folder` from the root, "" or with a slash at its end. Folders in `visited` (device, inode)
    are skipped.
    """
    status, names, folders = visible_entries(folder, "data.root")
    identity = (status.st_dev, status.st_ino)
    if identity in visited:
        return
    visited.add(identity)
    # Above a class folder `visited` has the parents only, to which a link may lead back: two domains may link to the
    # same images. Within a class it has every folder read, as folders that link to each other would repeat
    # exponentially.
    in_class = below.count("/") >= 2  # domain/class/
    for are_folders, run in groupby(names, folders.__contains__):
        if are_folders:
            for name in run:
                yield from _files(os.path.join(folder, name), f"{below}{name}/", visited if in_class else set(visited))
        else:
            yield below, list(run)


def visible_entries(folder: str, key: str) -> tuple[os.stat_result, list[str], set[str]]:
    """Returns the status of a folder, the sorted names in it that are not hidden, and those of them that are folders.

    Raises `UserError`, which names `key`, if the folder cannot be read.
    """
    try:
        status = os.stat(folder)
        with os.scandir(folder) as scan:
            entries = [entry for entry in scan if entry.name[0] != "."]
        others = [entry for entry in entries if not entry.is_file(follow_symlinks=False)]
        # os.path.isdir: for a link that points to itself `entry.is_dir` raises
        folders = {entry.name for entry in others if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path)}
    except OSError as error:
        raise UserError(f"{key}: {folder} cannot be read: {error.strerror}") from error
    return status, sorted([entry.name for entry in entries]), folders


def is_image(path: str) -> bool:
    return bool(_images([path]))


def _images(paths: list[str]) -> list[str]:
    """Returns those with the extension of an image."""
    # of a name without a dot it is the last character, which is no extension
    endings = [path[path.rfind(".") :] for path in paths]
    distinct = set(endings)
    of_images = {ending for ending in distinct if ending.lower() in extensions()}
    if len(of_images) == len(distinct):
        return paths
    return [path for path, ending in zip(paths, endings, strict=True) if ending in of_images]
