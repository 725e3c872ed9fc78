"""Your own images in a table: a CSV or Parquet file with the columns path, label, domain; optional: group, split."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from xdm_ft.containers.files import GroupPattern, ImageFiles, groups_of, numbered
from xdm_ft.containers.tables import csv_rows, name_in
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.storage.names import expand_user

NEEDED = ("path", "label", "domain")
OPTIONAL = ("group", "split")
PARTS = ["train", "val", "test"]


class Table(ImageFiles):
    """One image per row, in the order of the table. Other columns are ignored, and blanks around names too.

    Messages number the rows of a CSV file as a spreadsheet does: the header is row 1, and blank lines count. The first
    row of a Parquet file is row 1.
    """

    needed: ClassVar[Sequence[str]] = NEEDED  # columns that the table must have

    def __init__(
        self,
        *,
        file: Annotated[
            Path, Field(description="CSV or Parquet file with columns path, label, domain; optional: group, split")
        ],
        root: Annotated[
            Path | None, Field(description="folder at which relative paths start; null: the folder of the table")
        ] = None,
        group: GroupPattern = None,
    ) -> None:
        columns = _Columns(expand_user(file, "data.file"), self.needed)
        folder = columns.file.parent if root is None else expand_user(root, "data.root")
        paths = columns.values["path"]
        self.base, self.shown = folder, [os.path.join(folder, path) for path in paths]
        self.paths = [os.path.abspath(path) for path in self.shown]
        columns.refuse_repeated(self.paths)
        missing = [i for i, path in enumerate(self.paths) if not os.path.isfile(path)]
        if missing:
            named = ", ".join(self.shown[i] for i in missing[:NAMED_AT_MOST])
            problem = f"the file does not exist; {len(missing)} of {len(paths)} are missing: {named}"
            columns.fault(missing[0], "path", problem)
        self.class_names, self.labels = numbered(columns.values["label"])
        self.domain_names, self.domains = numbered(columns.values.get("domain", [columns.file.stem] * len(paths)))
        if group is not None:  # the recipe overrides the table
            self.groups = groups_of(paths, group)
        elif "group" in columns.values:
            self.groups = numbered(columns.values["group"])[1]
        if "split" in columns.values:
            self.splits = np.array(columns.values["split"])


class _Columns:
    """The checked cells of a table as text: `values[column]` has an entry per row, `rows` their row numbers."""

    def __init__(self, file: Path, needed: Sequence[str]) -> None:
        self.file = file
        reader = {".csv": _read_csv, ".parquet": _read_parquet}.get(file.suffix.lower())
        if reader is None:
            raise UserError(f"data.file: {file} does not end in .csv or .parquet; name a table that does")
        if not file.is_file():
            problem = "is not a file" if file.exists() else "does not exist"
            raise UserError(f"data.file: {file} {problem}; name a CSV or Parquet file")
        cells, self.rows = reader(file, needed)
        if not self.rows:
            raise UserError(f"{file}: the table has no rows; add one per image")
        texts = {"path": path_in, "split": _split_in}
        self.values = {column: self._read(column, cells[column], texts.get(column, name_in)) for column in cells}

    def _read(self, column: str, cells: Sequence[object], text_in: Callable[[object], str]) -> list[str]:
        """Returns the text of every cell. Raises `UserError` for the first one for which `text_in` raises."""
        texts, problems = list[str](), dict[int, str]()
        for i, cell in enumerate(cells):
            try:
                texts.append(text_in(cell))
            except ValueError as error:
                problems[i] = str(error)
        if problems:
            (first, problem), *others = problems.items()
            self.fault(first, column, problem, sum(other == problem for _, other in others))
        return texts

    def refuse_repeated(self, paths: list[str]) -> None:
        """Raises `UserError` if two rows name the same file. `paths` are absolute: a/../b.png repeats b.png."""
        first: dict[str, int] = {}
        repeated = [i for i, path in enumerate(paths) if first.setdefault(path, i) != i]
        if repeated:
            i = repeated[0]
            before = self.rows[first[paths[i]]]
            self.fault(i, "path", f"{self.values['path'][i]} is already in row {before}; remove one", len(repeated) - 1)

    def fault(self, i: int, column: str, problem: str, more: int = 0) -> None:
        """Raises `UserError` for image i. `more` is the number of other rows with the same fault."""
        others = f" (and {more} more rows like it)" if more else ""
        place = f"{printable(self.file)}: row {self.rows[i]}, column {column}"
        raise UserError(f"{place}: {problem}{others}")


def path_in(cell: object) -> str:
    """Returns the path in a cell, blanks and all. Raises `ValueError` with the problem and what to do."""
    if not isinstance(cell, str | None):
        raise ValueError(f"a path must be text, not {type(cell).__name__}; write it as text")
    if not cell:
        raise ValueError("the cell is empty; fill it in")
    return cell  # blanks and all: the name of a file may contain them


def _split_in(cell: object) -> str:
    part = name_in(cell)
    if part not in PARTS:
        raise ValueError(f'"{part}" is not a split{did_you_mean(part, PARTS)}')
    return part


def _check_header(file: Path, header: list[str], needed: Sequence[str]) -> None:
    missing = [column for column in needed if column not in header]
    if missing:
        raise UserError(f"{file}: there is no column {', '.join(missing)}; found: {', '.join(header)}")
    twice = [column for column in (*NEEDED, *OPTIONAL) if header.count(column) > 1]
    if twice:
        raise UserError(f"{file}: two columns have the name {twice[0]}; rename one")


def _read_csv(file: Path, needed: Sequence[str]) -> tuple[dict[str, list[object]], list[int]]:
    """Returns {column: cells} and the number of every row. The file is UTF-8 with commas and a header."""
    rows = csv_rows(file)
    _, header = next(rows)
    _check_header(file, header, needed)
    position = {column: header.index(column) for column in (*NEEDED, *OPTIONAL) if column in header}
    numbers, cells = list[int](), list[list[str]]()
    for number, row in rows:
        numbers.append(number)
        cells.append(row)
    return {column: [row[i] for row in cells] for column, i in position.items()}, numbers


def _read_parquet(file: Path, needed: Sequence[str]) -> tuple[dict[str, list[object]], list[int]]:
    """Returns {column: cells} and the number of every row."""
    import pyarrow
    import pyarrow.parquet

    try:
        header = pyarrow.parquet.read_schema(file).names
        _check_header(file, header, needed)
        table = pyarrow.parquet.read_table(file, columns=[name for name in (*NEEDED, *OPTIONAL) if name in header])
        cells = {name: table.column(name).to_pylist() for name in table.column_names}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: can not be read as Parquet: {error}") from error
    return cells, list(range(1, table.num_rows + 1))
