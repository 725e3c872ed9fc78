"""Labelled images of a new site: `<class>/<image>`, `<domain>/<class>/<image>`, or a table."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xdm_ft.containers.files import groups_of, images_below, numbered, refuse_missing_folder
from xdm_ft.data.table import Table
from xdm_ft.export.sources import TABLES, Item
from xdm_ft.runtime.errors import UserError, did_you_mean, plural, printable
from xdm_ft.storage.names import expanded

logger = logging.getLogger("xdm_ft")
LAYOUTS = "folders must be <class>/<image> or <domain>/<class>/<image>, with the model's class names"


class Site(NamedTuple):
    """n images, whose labels are numbers of the model's classes."""

    items: list[Item]
    labels: np.ndarray  # int64 [n]
    domain_names: tuple[str, ...]
    domains: np.ndarray  # int64 [n]
    groups: np.ndarray | None  # int64 [n]; None: unknown

    def only(self, wanted: Sequence[str]) -> Site:
        """Returns the images of these domains. Raises `UserError` for a name that is not one of them."""
        for name in wanted:
            if name not in self.domain_names:
                raise UserError(f"--domain: no domain {name}{did_you_mean(name, list(self.domain_names))}")
        numbers = [number for number, name in enumerate(self.domain_names) if name in wanted]
        return self.rows(np.flatnonzero(np.isin(self.domains, numbers)))

    def rows(self, rows: np.ndarray) -> Site:
        """Returns some of the images."""
        groups = None if self.groups is None else self.groups[rows]
        items = [self.items[row] for row in rows]
        return Site(items, self.labels[rows], self.domain_names, self.domains[rows], groups)


class _SiteTable(Table):
    """A table that may leave the domain out: then its images are those of one site."""

    needed = ("path", "label")


def read_site(path: str, class_names: Sequence[str], renamed: Mapping[str, str], group: str | None = None) -> Site:
    """Lists the labelled images of a folder or table, in the order of their paths or rows.

    `renamed` are names that classes had in the training data: they are known too, if no class is called so. `group` is
    a regular expression as `data.group`; without it, groups are those of the table's column. Raises `UserError` for a
    label that the model does not know, and as `data: folder` and `data: table` do.
    """
    number = {name: place for place, name in enumerate(class_names)}
    number = {old: number[new] for old, new in renamed.items() if new in number} | number
    if group is not None:
        _check(group)
    where = expanded(path, "SITE")
    try:
        if path.lower().endswith(TABLES) and not where.is_dir():
            return _of_table(where, number, class_names, group)
        return _of_folder(where, number, class_names, group)
    except UserError as error:  # written for keys of a recipe
        lines = (re.sub("^data.(root|file): ", "", str(line)).replace("data.group:", "--group:") for line in error.args)
        raise UserError(*lines) from error


def _check(group: str) -> None:
    try:
        re.compile(group)
    except re.error as error:
        raise UserError(f"--group: {group} is not a regular expression: {error}") from error


def _of_table(file: Path, number: Mapping[str, int], class_names: Sequence[str], group: str | None) -> Site:
    table = _SiteTable(file=file, group=group)
    labels = _numbers(table.class_names, number, class_names, f"{printable(file)}: column label")
    items = [Item(shown, path) for shown, path in zip(table.shown, table.paths, strict=True)]
    return Site(items, labels[table.labels], table.domain_names, table.domains, table.groups)


def _of_folder(root: Path, number: Mapping[str, int], class_names: Sequence[str], group: str | None) -> Site:
    refuse_missing_folder(root, LAYOUTS)
    images, _ = images_below(root, "<class>")
    if not images:
        raise UserError(f"{printable(root)}: contains no images in class folders; {LAYOUTS}")
    if has_domains(images, number):
        outside = [path for path in images if path.count("/") < 2]
        if outside:
            ignored = plural(len(outside), "image")
            logger.warning("%s: ignored %s outside a <domain>/<class> folder: %s", root, ignored, outside[0])
        images = [path for path in images if path.count("/") >= 2]
        domains, classes = [path.split("/")[0] for path in images], [path.split("/")[1] for path in images]
    else:
        domains, classes = [root.resolve().name] * len(images), [path.split("/")[0] for path in images]
    names, own = numbered(classes)
    labels = _numbers(names, number, class_names, str(root), f" ({LAYOUTS})")[own]
    groups = None if group is None else groups_of(images, group)
    items = [Item(os.path.join(root, path), os.path.join(root, path)) for path in images]
    return Site(items, labels, *numbered(domains), groups)


def has_domains(images: Sequence[str], known: Collection[str]) -> bool:
    """Whether the folders of these paths are `<domain>/<class>/`, not `<class>/`, judged by the names of known classes.

    If neither level has only known classes, the level that has some is that of the classes.
    """
    first = {printable(path.split("/")[0]) for path in images}
    second = {printable(path.split("/")[1]) for path in images if path.count("/") >= 2}
    return not first <= set(known) and not second.isdisjoint(known)


def _numbers(
    names: Sequence[str], number: Mapping[str, int], class_names: Sequence[str], where: str, hint: str = ""
) -> np.ndarray:
    """The model's class of each name, int64. Raises `UserError` if the model lacks one."""
    unknown = [name for name in names if name not in number]
    if unknown:
        more = f", nor {plural(len(unknown) - 1, 'other label')} of the site" if len(unknown) > 1 else ""
        meant = did_you_mean(unknown[0], list(class_names))
        raise UserError(f'{where}: the model has no class "{unknown[0]}"{more}{meant}{hint}')
    return np.array([number[name] for name in names], np.int64)
