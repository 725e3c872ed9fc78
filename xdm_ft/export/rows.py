"""What a model reads of the files that a user names: images, rows of features, or bags that become one row each.

A row of features is named FILE#ID, or FILE#NUMBER in a file without ids; a table may name rows so too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from xdm_ft.data.features import FEATURES, read_features
from xdm_ft.export import EncoderConfig, ModelConfig
from xdm_ft.export.sources import OF_ROWS, Item, Purpose, Site, is_empty, read_site
from xdm_ft.image_files.bags import Bag, pooled, read_bags
from xdm_ft.image_files.tables import name_in
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.runtime.errors import UserError, one_form, printable

logger = logging.getLogger("xdm_ft")


def labelled_site(path: str, config: ModelConfig, group: str | None = None, purpose: Purpose = "evaluate") -> Site:
    """Lists what a model reads at a labelled site, see `read_site`. Raises `UserError`."""
    encoder = config.encoder
    site = read_site(path, config.class_names, config.renamed, group, purpose, encoder)
    if encoder.settings.get("unit") != "group" or site.groups is None:
        items = [*items_of(site.items, encoder)]
        if len(items) > len(site.items):
            raise UserError(f"{path}: names whole files, but a label is of one row; name FILE#ROW")
        return site._replace(items=items)
    numbered = [item._replace(group=str(number)) for item, number in zip(site.items, site.groups, strict=True)]
    bags = rows_of_bags(numbered)
    named = {"label": (config.class_names, site.labels), "domain": (site.domain_names, site.domains)}
    for what, (names, numbers) in named.items():
        for rows in bags:
            if len(several := [names[number] for number in np.unique(numbers[rows])]) > 1:
                problem = f"another slide of its group has the {what} {several[1]}, and not {several[0]}; give them one"
                raise UserError(f"{path}: {site.items[rows[0]].path}: {problem}")
    items = [_bag([site.items[row] for row in rows], encoder) for rows in bags]
    return site.rows(np.array([rows[0] for rows in bags]))._replace(items=items, groups=None)


def items_of(
    files: Iterable[Item], encoder: EncoderConfig, with_group: Callable[[Item], Item] = lambda item: item
) -> Iterator[Item]:
    """Yields what the model reads: images, as they are, or the rows of features or the bags in the files.

    `with_group` gives rows their group, as `Sources` does. The content of a row is its features, float32 [K] as bytes;
    of a bag that cannot be read, it is the file. Raises `UserError` for a file of rows that cannot be read, or whose
    rows have another width.
    """
    if encoder.reads_bags:
        yield from bags_of(files, encoder)
    elif encoder.reads_features:
        read = cache(_rows_in)  # a table names a file once per row
        for item in files:
            yield from map(with_group, _rows_of(item, read, encoder.width))
    else:
        yield from files


def given_items(given: object, encoder: EncoderConfig) -> Iterator[Item]:
    """Yields the rows of an array [n,K] or [K], as the head reads them, or of files: a path, or several.

    Raises `UserError` for anything else.
    """
    if isinstance(given, np.ndarray) and given.dtype.kind == "f" and given.ndim in (1, 2):
        for number, row in enumerate(np.atleast_2d(given)):
            yield Item(f"row {number}", row.astype(np.float32).tobytes())
        return
    paths = [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
        kinds = f"a float array [n,{encoder.width}] or paths of files, not {type(given).__name__}"
        raise UserError(f"the model reads features: give {kinds}")
    files = [os.path.expanduser(os.fspath(path)) for path in paths]
    yield from items_of((Item(file, file) for file in files), encoder)


def features_of(item: Item, encoder: EncoderConfig) -> Tensor:
    """Returns features float32 [K]. Raises `UnreadableImage`."""
    if not isinstance(item.content, bytes):
        [bag] = read_bags([item.content], show=False)
        reason = bag if isinstance(bag, str) else "its width is not that of other slides of the group"
        is_group = encoder.settings.get("unit") == "group"
        raise UnreadableImage(item.path, f"{printable(item.content)}: {reason}" if is_group else reason)
    z = torch.from_numpy(np.frombuffer(item.content, np.float32).copy())
    if len(z) != encoder.width:
        raise UnreadableImage(item.path, f"has {len(z)} features, and the model reads {encoder.width}")
    return z


def bags_of(slides: Iterable[Item], encoder: EncoderConfig) -> Iterator[Item]:
    """Yields the bags of slides, pooled one after the other, each at the place of its first slide."""
    if encoder.settings["unit"] == "slide":
        yield from (_bag([slide], encoder) for slide in slides)
        return
    slides = [*slides]
    if not any(slide.group for slide in slides):
        logger.warning("no slide has a group, so each is a bag of its own; name a table with a column group")
    yield from (_bag([slides[i] for i in rows], encoder) for rows in rows_of_bags(slides))


def rows_of_bags(slides: Sequence[Item]) -> list[list[int]]:
    """Returns the numbers of the slides of each group, in order. A slide without group is a bag of its own."""
    bags: dict[tuple[str, int], list[int]] = {}
    for number, slide in enumerate(slides):
        bags.setdefault((slide.group, -1 if slide.group else number), []).append(number)
    return [*bags.values()]


def _bag(slides: Sequence[Item], encoder: EncoderConfig) -> Item:
    files, parts = [os.fsdecode(slide.content) for slide in slides], list[Bag]()
    item = slides[0]._replace(files=tuple(files))
    if item.group and encoder.settings["unit"] == "group":
        item = item._replace(path=item.group, group="")
    for file, bag in zip(files, read_bags(files, show=False), strict=True):
        if isinstance(bag, str) or (parts and len(bag.mean) != len(parts[0].mean)):
            return item._replace(content=file)
        parts.append(bag)
    return item._replace(content=pooled(parts, encoder.settings["pool"]).tobytes())


_Rows = tuple[np.ndarray, dict[str, int], Sequence[str]]
"""Features float32 [n,K] of a file, {name of a row: its number}, and the group of each row."""


def _rows_in(file: str) -> _Rows:
    if not file.endswith(OF_ROWS):
        raise UserError(f"{file}: the model reads features, in files that end in {' or '.join(OF_ROWS)}")
    z, table = read_features(file, (FEATURES,))

    def texts(column: str) -> Iterator[str]:
        for row, cell in enumerate(table[column].to_pylist()):
            try:
                yield "" if column == "group" and is_empty(cell) else printable(one_form(name_in(cell)))
            except ValueError as error:
                raise UserError(f"{printable(file)}: row {row}, column {column}: {error}") from error

    names = texts("id") if "id" in table.column_names else map(str, range(len(z)))
    row_of = {name: row for row, name in enumerate(names)}
    if len(row_of) < len(z):
        raise UserError(f"{file}: column id: one is the id of two rows; give each row its own, or leave the column out")
    return z, row_of, [*texts("group")] if "group" in table.column_names else [""] * len(z)


def _rows_of(item: Item, read: Callable[[str], _Rows], width: int) -> Iterator[Item]:
    """Yields the rows of a file, or the one that the item names, or is."""
    if isinstance(item.content, bytes):
        yield item
        return
    path, file, wanted = item.path, os.fsdecode(item.content), ""
    if not os.path.lexists(file) and "#" in file:
        file, _, wanted = file.rpartition("#")
        path = path.removesuffix(f"#{wanted}")
    z, row_of, groups = read(file)
    if z.shape[1] != width:
        raise UserError(f"{file}: has {z.shape[1]} features per row, and the model reads {width}")
    if wanted and wanted not in row_of:
        raise UserError(f"{file}: has no row {wanted}; name it FILE#ID, or FILE#NUMBER without ids")
    for name in [wanted] if wanted else row_of:
        row = row_of[name]
        yield Item(f"{path}#{name}", z[row].tobytes(), item.group or groups[row], files=(f"{file}#{name}",))
