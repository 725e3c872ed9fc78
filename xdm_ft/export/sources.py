"""Images that a user names: to predict (files, folders, globs, tables, standard input), or a site of labelled ones."""

from __future__ import annotations

import glob
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np

from xdm_ft.data.features import FEATURES, FeatureTable
from xdm_ft.data.table import COLUMNS, TableDataset, column_names, path_in
from xdm_ft.export import EncoderConfig
from xdm_ft.image_files.bags import SUFFIXES, files_of_slide
from xdm_ft.image_files.files import (
    count_files,
    describe_left_out,
    expression_of,
    first_pattern,
    group_of,
    groups_of,
    images_below,
    index_names,
    is_image,
    kind_of,
    refuse_missing_folder,
    refuse_splits,
    visible_entries,
)
from xdm_ft.image_files.tables import TableColumns, column_meant, csv_rows, name_in, on_disk, whole_number
from xdm_ft.runtime.errors import UserError, did_you_mean, one_form, plural, printable
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.names import expand_user

logger = logging.getLogger("xdm_ft")
STDIN = "-"
TABLES = (".csv", ".parquet")
OF_ROWS = (".npz", ".parquet")  # files of features
SLIDE = "slide"
PATHS = ("path", "file", SLIDE)  # columns of which a table of slides has one; images: path
ROWS_AT_ONCE = 1024  # of a Parquet table
Purpose = Literal["evaluate", "adapt"]
FOR = "for"  # the column of a table that says for which purpose an image was labelled
LAYOUTS = "folders must be <class>/<image> or <domain>/<class>/<image>, with the model's class names"


class Item(NamedTuple):
    """An image, of which nothing has been read yet."""

    path: str  # as the user gave it
    content: str | bytes  # its file, or the encoded image
    group: str = ""
    hashed: bytes = b""  # xxh3 (128 bits) of the encoded image; empty: unknown
    files: tuple[str, ...] = ()  # of features: the files of a bag, or FILE#ROW; (): `content` is the file


class Sources:
    """The images that a user has named, in this order; those of folders and globs in the order of their names.

    A path is a file, a folder (images in it at any depth, by their extension, without hidden ones), a glob, a CSV or
    Parquet file with the column path (relative to the table's folder), or `-`: paths on standard input, one per line.
    `group_by` is a column of the tables or a regular expression for the paths, as `data.group`; `option` is its name in
    messages. Without it, images have the groups of the tables' column `column`, where there is one.

    Of a model that reads features (`of_model`), the files hold rows or bags; tables of rows are CSV alone.

    `others`: {extension: number} of the files that are no images, which folders hold and globs match. `count` and
    iterating fill it.
    """

    def __init__(
        self, paths: Iterable[str], group_by: str | None = None, option: str = "--group-by", column: str | None = None
    ) -> None:
        """Raises `UserError` for a path that does not exist."""
        self.paths, self.group_by, self.option, self.others = tuple(paths), group_by, option, Counter[str]()
        self.column = column if group_by is None else group_by
        self.suffixes: tuple[str, ...] = ()  # of the files in folders; (): those of images
        if self.paths.count(STDIN) > 1:
            raise UserError("PATH: - (standard input) is given twice; give it once")
        for path in self.paths:
            if path != STDIN and not os.path.lexists(path) and not glob.has_magic(path):
                raise UserError(f"{path}: does not exist; name a file, a folder, a table or a quoted glob")
        try:
            self._expression = expression_of(group_by)
        except ValueError as error:
            raise UserError(f"{option}: {str(group_by)[:80]} is {error}") from error

    def of_model(self, encoder: EncoderConfig) -> Self:
        """Sets which files the model reads. Slides have the groups of a table if its bags are groups."""
        if encoder.reads_features:
            self.suffixes = SUFFIXES if encoder.reads_bags else OF_ROWS
        if self.column is None and encoder.settings.get("unit") == "group":
            self.column = "group"
        return self

    def __iter__(self) -> Iterator[Item]:
        """Raises `UserError` for a folder or table that cannot be read, and for an image without a group."""
        self.others.clear()
        for path in self.paths:
            yield from self._items(path)

    def count(self) -> int | None:
        """Lists all images once and returns their number; None if some are listed on standard input.

        Raises `UserError` as iterating does, and for a folder, glob or table without images. Standard input is not
        read.
        """
        self.others.clear()
        total = 0
        for path in self.paths:
            before = total
            for _ in self._items(path) if path != STDIN else ():
                pulse.beat()
                total += 1
            if total == before and path != STDIN:
                what = " or ".join(self.suffixes) or "image"
                problem = (
                    f"contains no {what} (known by its extension)" if os.path.isdir(path) else f"matches no {what}"
                )
                if self._is_table(path):
                    problem = "the table has no rows; add one per image"
                raise UserError(f"{path}: {problem}{f'; {count_files(self.others)}' if self.others else ''}")
        return None if STDIN in self.paths else total

    def _items(self, path: str) -> Iterator[Item]:
        """Yields the images of one path with their groups."""
        if self._is_table(path):
            items = _table_items(Path(path), self.column, self.group_by is not None, self.suffixes)
        else:
            items = (Item(file, file) for file in self._image_files(path))
        for item in items:
            yield item if self.suffixes == OF_ROWS else self.with_group(item, path)

    def with_group(self, item: Item, path: str = "") -> Item:
        """Returns an item of `path` with its group. Raises `UserError` if it has none, and needs one."""
        group: str | None = item.group
        if not group and self.group_by is not None:
            group = group_of(item.path.replace(os.sep, "/"), self._expression, self.option)
        if not group and self.group_by is not None:
            column = f"is not a column of {printable(path)} and " if self._is_table(path) else ""
            raise UserError(
                f"{self.option}: {self.group_by} {column}matches nothing in {item.path}; change it to match every path"
            )
        # `group_of` joins several parentheses by \0, which a table cannot show
        # in one form, as the groups of a table and of paths may meet
        return item._replace(group=one_form(str(group or "")).replace("\0", "/"))

    def _is_table(self, path: str) -> bool:
        kinds = TABLES[:1] if self.suffixes == OF_ROWS else TABLES
        return path.lower().endswith(kinds) and os.path.isfile(path)

    def _image_files(self, path: str) -> Iterator[str]:
        if path == STDIN:
            # bytes, as a path need not be UTF-8; a list from Windows ends its lines in \r\n
            lines = (os.fsdecode(line.removesuffix(b"\n").removesuffix(b"\r")) for line in sys.stdin.buffer)
            yield from filter(None, lines)
        elif os.path.lexists(path) and not os.path.isdir(path):
            yield path
        else:
            for file in _files(path) if os.path.isdir(path) else _matches(str(expand_user(path, "PATH"))):
                if file.lower().endswith(self.suffixes) if self.suffixes else is_image(file):
                    yield file
                else:
                    self.others[kind_of(file)] += 1


def _matches(pattern: str) -> Iterator[str]:
    """Yields the files that a glob matches. `**` is any number of folders; hidden files match nothing."""
    parts = pattern.replace(os.sep, "/").split("/")
    fixed = first_pattern(parts)
    root = "/".join(parts[:fixed]) or ("/" if fixed else "")
    if root and root == os.path.splitdrive(root)[0]:
        root += "/"  # C: alone is the current folder of that drive
    if os.path.isdir(root or "."):
        yield from _files(root, [part for part in parts[fixed:] if part])


def _files(folder: str, parts: Sequence[str] = ("**",)) -> Iterator[str]:
    """Yields the files at any depth in a folder ("": the current one) whose names below it match `parts`.

    They are in the order of their names. Links are followed, each folder once; `glob.iglob` would follow a link to a
    folder above 40 times, and pass over a folder that cannot be read. Raises `UserError` for such a folder.
    """
    visited = set[tuple[int, int]]()

    def walk(folder: str, above: tuple[str, ...]) -> Iterator[str]:
        status, names, folders = visible_entries(folder or ".", "PATH")
        if (identity := (status.st_dev, status.st_ino)) in visited:
            return
        visited.add(identity)
        for name in names:
            path, reached = os.path.join(folder, name), (*above, name)
            if name not in folders:
                if _match(reached, parts):
                    yield path
            elif _may_hold(reached, parts):
                yield from walk(path, reached)

    yield from walk(folder, ())


def _match(names: Sequence[str], parts: Sequence[str]) -> bool:
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return _match(names, parts[1:]) or _match(names[1:], parts)
    return fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:])


def _may_hold(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether files in a folder of these names may match."""
    start = parts.index("**") if "**" in parts else len(parts)
    fit = all(fnmatchcase(name, part) for name, part in zip(names, parts[:start], strict=False))
    return fit and (len(names) < len(parts) or start < len(parts))


def _table_items(file: Path, group_by: str | None, is_needed: bool, suffixes: tuple[str, ...]) -> Iterator[Item]:
    """Yields the images of a table, with their groups if they are a column of it.

    `is_needed`: a cell of that column without group is an error. `suffixes`: of slides, which the table may name.
    """
    for number, cells in _table_rows(file, group_by, PATHS if suffixes == SUFFIXES else PATHS[:1]):
        column = next(iter(cells))
        is_slide = column == SLIDE
        try:
            path = name_in(cells[column]) if is_slide else path_in(cells[column])
            column = str(group_by)
            has_group = column in cells and (is_needed or not is_empty(cells[column]))
            group = name_in(cells[column]) if has_group else ""
            # of a slide without a file, the name that is then missing says what was looked for
            path = [*files_of_slide(file.parent, path), f"{path}{SUFFIXES[0]}"][0] if is_slide else path
        except ValueError as error:
            raise UserError(f"{file}: row {number}, column {column}: {error}") from error
        yield Item(path, on_disk(os.path.dirname(file), path), group)


def _table_rows(file: Path, group_by: str | None, paths: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number of each row, and its cells in the first of the columns `paths` that there is, and in `group_by`
    if there is such a column."""

    def columns_of(header: list[str]) -> list[str]:
        name = next((name for name in paths if name in header), "path")
        columns = [column for column in dict.fromkeys((name, group_by)) if column in header]
        for column in columns:
            if header.count(column) > 1:
                raise UserError(f"{file}: two columns have the name {column}; rename one")
        if name not in columns:
            meant = column_meant("path", header)
            hint = f"; rename {meant} to path" if meant else ""
            raise UserError(f"{file}: there is no column path; found: {', '.join(header)}{hint}")
        return [column for column in columns if column is not None]

    if file.suffix.lower() == ".csv":
        rows = csv_rows(file)
        _, header = next(rows)
        positions = {column: header.index(column) for column in columns_of(header)}
        for number, row in rows:
            yield number, {column: row[position] for column, position in positions.items()}
        return
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            batches = table.iter_batches(ROWS_AT_ONCE, columns=columns_of(table.schema_arrow.names))
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as Parquet: {error}") from error


class Site(NamedTuple):
    """n labelled images of a new site, whose labels are numbers of the model's classes."""

    items: list[Item]
    labels: np.ndarray  # int64 [n]
    domain_names: tuple[str, ...]
    domains: np.ndarray  # int64 [n]
    groups: np.ndarray | None  # int64 [n]; None: unknown
    unlabelled: int = 0  # rows of the table that have no label yet, and are left out
    others: int = 0  # labelled rows of the table for another purpose, which are left out too

    def only(self, wanted: Sequence[str]) -> Site:
        """Returns the images of these domains. Raises `UserError` for a name that is not one of them."""
        wanted = [*map(one_form, wanted)]
        for name in wanted:
            if name not in self.domain_names:
                raise UserError(f"--domain: no domain {name}{did_you_mean(name, list(self.domain_names))}")
        numbers = [number for number, name in enumerate(self.domain_names) if name in wanted]
        return self.rows(np.flatnonzero(np.isin(self.domains, numbers)))

    def rows(self, rows: np.ndarray) -> Site:
        """Returns some of the images."""
        groups = None if self.groups is None else self.groups[rows]
        items = [self.items[row] for row in rows]
        return self._replace(items=items, labels=self.labels[rows], domains=self.domains[rows], groups=groups)


class _SiteTable(TableDataset):
    """A table that may leave the domain out: then its images are those of one site.

    Of a table with the column `for`, as `xdm-ft label` writes it, the rows of one purpose are read. Rows without label
    are counted and left out. A column of groups that is empty is none.
    """

    needed = ("path", "label")
    optional: ClassVar[Sequence[str]] = (*COLUMNS, FOR)
    reads_soft_labels: ClassVar[bool] = False

    def __init__(self, file: Path, group: str | None, purpose: Purpose, encoder: EncoderConfig | None) -> None:
        self.purpose, self.unlabelled, self.others, self.column = purpose, 0, 0, "path"
        self.of_features = encoder is not None and encoder.reads_features
        self.of_groups = encoder is not None and encoder.settings.get("unit") == "group"
        if encoder is not None and encoder.reads_bags and file.is_file():
            names = column_names(file)
            self.column = next((name for name in PATHS if name in names), "path")
        super().__init__(file=file, group=group, columns=TableColumns(path=self.column))

    def on_disk(self, folder: Path, path: str) -> str:
        names = files_of_slide(folder, path) if self.column == SLIDE else []
        return super().on_disk(folder, [*names, path][0])

    def exists(self, path: str) -> bool:
        return super().exists(path) or (self.of_features and super().exists(path.rpartition("#")[0]))

    def wanted(self, file: Path, cells: dict[str, list[object]], numbers: Sequence[int]) -> Sequence[int]:
        rows = list(range(len(numbers)))
        if FOR in cells:
            purposes = ["" if cell is None else str(cell).strip() for cell in cells.pop(FOR)]
            for number, purpose in zip(numbers, purposes, strict=True):
                if purpose not in get_args(Purpose):
                    problem = f'"{purpose}" is unknown; write {" or ".join(get_args(Purpose))}'
                    raise UserError(f"{printable(file)}: row {number}, column {FOR}: {problem}")
            rows = [row for row in rows if purposes[row] == self.purpose]
            if not rows:
                raise UserError(f"{printable(file)}: no row is marked {self.purpose} in the column {FOR}")
        labelled = [row for row in rows if not is_empty(cells["label"][row])]
        self.unlabelled = len(rows) - len(labelled)
        if self.of_groups and "group" in cells:  # else a bag would lack these slides
            of_labelled = {cells["group"][row] for row in labelled}
            for row in sorted({*rows} - {*labelled}):
                if cells["group"][row] in of_labelled:
                    problem = "another slide of its group has a label; fill it in for all"
                    raise UserError(f"{printable(file)}: row {numbers[row]}, column label: {problem}")
        self.others = sum(not is_empty(cell) for cell in cells["label"]) - len(labelled)
        if not labelled:
            marked = f" marked {self.purpose}" if len(rows) < len(numbers) else ""
            raise UserError(f"{printable(file)}: no row{marked} has a label; fill in the column label")
        if all(is_empty(cells["group"][row]) for row in labelled if "group" in cells):
            cells.pop("group", None)
        return labelled


class _SiteRows(FeatureTable):
    """A file of features that may leave the domain out."""

    needed: ClassVar[Sequence[str]] = (FEATURES, "label")


def is_empty(cell: object) -> bool:
    return cell is None or not str(cell).strip()


def read_site(
    path: str,
    class_names: Sequence[str],
    renamed: Mapping[str, str],
    group: str | None = None,
    purpose: Purpose = "evaluate",
    encoder: EncoderConfig | None = None,
) -> Site:
    """Lists labelled images, in the order of their paths or rows: `<class>/<image>`, `<domain>/<class>/<image>`, or a
    table.

    `renamed` are names that classes had in the training data: they are known too, if no class is called so. `group` is
    a regular expression as `data.group`; without it, groups are those of the table's column. `purpose`: which rows of a
    table with the column `for` are read. `encoder`: of a model that may read features; None: images. Raises `UserError`
    for a label that the model does not know, for a table without any label, and as `data: folder` and `data: table` do.
    """
    numbers = {one_form(name): number for number, name in enumerate(class_names)}
    numbers = {
        one_form(old): numbers[one_form(new)] for old, new in renamed.items() if one_form(new) in numbers
    } | numbers
    if len(whole := {whole_number(name): number for name, number in numbers.items()}) == len(numbers):
        numbers |= whole
    try:
        expression_of(group)
    except ValueError as error:
        raise UserError(f"--group: {str(group)[:80]} is {error}") from error
    source = expand_user(path, "SITE")
    unlabelled = others = 0
    is_table = path.lower().endswith(TABLES) and not source.is_dir()
    of_features = encoder is not None and encoder.reads_features
    table: _SiteRows | _SiteTable
    try:
        if encoder is not None and of_features and not encoder.reads_bags and path.lower().endswith(OF_ROWS):
            table = _SiteRows(file=source)
            names, labels, origin, hint = table.class_names, table.labels, f"{printable(source)}: column label", ""
            rows = range(len(labels))
            items = [Item(f"{path}#{table.row_id(row)}", table.content(row)) for row in rows]
            domain_names, domains, groups = table.domain_names, table.domains, table.groups
            if group is not None:
                groups = groups_of([item.path for item in items], group)[1]
        elif of_features and not is_table:
            raise UserError(f"{source}: the model reads features; name a table with path and label, or a file of rows")
        elif is_table:
            table = _SiteTable(source, group, purpose, encoder)
            unlabelled, others = table.unlabelled, table.others
            names, labels, origin, hint = table.class_names, table.labels, f"{printable(source)}: column label", ""
            items = [Item(shown, path) for shown, path in zip(table.shown, table.paths, strict=True)]
            domain_names, domains, groups = table.domain_names, table.domains, table.groups
        else:
            images, classes, domain_of = _labelled_images(source, numbers)
            (names, labels), origin, hint = index_names(classes), str(source), f" ({LAYOUTS})"
            items = [Item(path, path) for path in (os.path.join(source, image) for image in images)]
            domain_names, domains = index_names(domain_of)
            groups = None if group is None else groups_of(images, group)[1]
    except UserError as error:  # written for keys of a recipe
        of_recipe = "^data.(root|file): |, or set data.columns=.*|; data.root names.*"
        lines = (re.sub(of_recipe, "", str(line)).replace("data.group:", "--group:") for line in error.args)
        raise UserError(*lines) from error
    if converted := [name for name in names if name not in numbers and whole_number(name) in numbers]:
        logger.warning("%s: reads %s as the class %s", origin, converted[0], whole_number(converted[0]))
        numbers |= {name: numbers[whole_number(name)] for name in converted}
    unknown = [name for name in names if name not in numbers]
    if unknown:
        more = f", nor {plural(len(unknown) - 1, 'other label')} of the site" if len(unknown) > 1 else ""
        meant = did_you_mean(unknown[0], list(class_names))
        raise UserError(f'{origin}: the model has no class "{unknown[0]}"{more}{meant}{hint}')
    labels = np.array([numbers[name] for name in names], np.int64)[labels]
    return Site(items, labels, domain_names, domains, groups, unlabelled, others)


def _labelled_images(root: Path, numbers: Mapping[str, int]) -> tuple[list[str], list[str], list[str]]:
    """Returns the paths of the images below `root`, and the class and the domain of each.

    Folders are `<domain>/<class>/` or `<class>/`, judged by the names of known classes: if neither level has only
    known classes, the level that has some is that of the classes.
    """
    refuse_missing_folder(root, LAYOUTS)
    tree = images_below(root, depth=1)
    images = tree.images
    if not images:
        raise UserError(f"{root}: contains no images in class folders; {LAYOUTS}")
    levels = [path.split("/") for path in images]
    first = {printable(one_form(folders[0])) for folders in levels}
    second = {printable(one_form(folders[1])) for folders in levels if len(folders) > 2}
    if not first <= numbers.keys():
        remedy = "move the class folders up, or name one of the parts alone"
        refuse_splits(root, images, first - numbers.keys(), second - numbers.keys(), remedy)
    if first <= numbers.keys() or second.isdisjoint(numbers):
        _warn_of(root, describe_left_out(root, tree, ("class",)))
        return images, [folders[0] for folders in levels], [root.resolve().name] * len(images)
    levels = [folders for folders in levels if len(folders) > 2]
    _warn_of(root, describe_left_out(root, tree._replace(images=["/".join(folders) for folders in levels])))
    return ["/".join(folders) for folders in levels], [folders[1] for folders in levels], [f[0] for f in levels]


def _warn_of(root: Path, lines: Iterable[str]) -> None:
    for line in lines:
        logger.warning("%s: %s", root, line)
