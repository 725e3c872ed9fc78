"""Your own images in a table: CSV or Parquet with the columns path, label, domain; optional: group, split, p:CLASS."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from xdm_ft.image_files.files import GroupPattern, ImageFiles, groups_of, index_names
from xdm_ft.image_files.tables import (
    CLASS_PREFIX,
    MISSING,
    PATH_COLUMNS,
    TableColumns,
    column_meant,
    csv_rows,
    is_of_class,
    name_in,
    on_disk,
)
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.runtime.errors import UserError, did_you_mean, not_there, one_form, plural, printable
from xdm_ft.storage.names import expand_user

NEEDED = ("path", "label", "domain")
COLUMNS = (*NEEDED, "group", "split")
PARTS = ["train", "val", "test"]
ROUNDING = 1e-3  # of probabilities in a table
Fault = Callable[[int, str, str, int], UserError]


class TableDataset(ImageFiles):
    """One image per row, in the order of the table. Other columns are ignored, and blanks around names too.

    Messages number the rows of a CSV file as a spreadsheet does: the header is row 1, and blank lines count. The first
    row of a Parquet file is row 1.

    Columns p:CLASS, one for every class as the labels name it, are soft labels: the shares of experts' votes, for
    example. A row in which they are all empty has its label alone.
    """

    needed: ClassVar[Sequence[str]] = NEEDED  # columns that the table must have
    optional: ClassVar[Sequence[str]] = COLUMNS  # columns that are read, if there are any
    reads_soft_labels: ClassVar[bool] = True  # whether columns p:CLASS are read

    def __init__(
        self,
        *,
        file: Annotated[
            Path,
            Field(
                description="CSV or Parquet file with columns path, label, domain; optional: group, split, and "
                "p:CLASS of every class (probabilities)"
            ),
        ],
        root: Annotated[
            Path | None, Field(description="folder at which relative paths start; null: the folder of the table")
        ] = None,
        group: GroupPattern = None,
        columns: Annotated[TableColumns, Field(description="names of the columns")] = PATH_COLUMNS,
    ) -> None:
        file = expand_user(file, "data.file")
        called = {column: getattr(columns, column, column) for column in self.optional}
        # a column that the recipe names must be there
        needed = dict.fromkeys((*self.needed, *(key for key in columns.model_fields_set if called[key] != key)))
        cells, numbers, ignored = read_cells(file, [*needed], called, self.reads_soft_labels)
        if group is not None and "group" in cells:  # the recipe overrides the table
            del cells["group"]
            ignored = [*ignored, called["group"]]
        self.columns = [called.get(column, column) for column in cells], ignored
        rows = self.wanted(file, cells, numbers)
        cells = {column: [values[row] for row in rows] for column, values in cells.items()}
        numbers = [numbers[row] for row in rows]

        def fault(i: int, column: str, problem: str, more: int = 0) -> UserError:
            """Returns the error of image i. `more` is the number of other rows with the same fault."""
            others = f" (and {plural(more, 'more row')} like it)" if more else ""
            row = f"row {numbers[i]}, column {called.get(column, column)}"
            return UserError(f"{printable(file)}: {row}: {problem}{others}")

        def texts(column: str) -> list[str]:
            text_in = {"path": path_in, "split": split_in}.get(column, name_in)
            values, problems = list[str](), dict[int, str]()
            for i, cell in enumerate(cells[column]):
                try:
                    values.append(text_in(cell))
                except ValueError as error:
                    problems[i] = str(error)
            if problems:
                (first, problem), *others = problems.items()
                raise fault(first, column, problem, sum(other == problem for _, other in others))
            return values

        of_classes = {column: cells.pop(column) for column in [*cells] if is_of_class(column)}
        values = {column: texts(column) for column in cells}
        paths, folder = values["path"], file.parent if root is None else expand_user(root, "data.root")
        self.base, self.shown = folder, [os.path.join(folder, path) for path in paths]
        # so that a/../b.png repeats b.png
        self.paths = [os.path.abspath(self.on_disk(folder, path)) for path in paths]
        first_of: dict[str, int] = {}
        repeated = [i for i, path in enumerate(self.paths) if first_of.setdefault(path, i) != i]
        if repeated:
            before = numbers[first_of[self.paths[repeated[0]]]]
            problem = f"{paths[repeated[0]]} is already in row {before}; remove one"
            raise fault(repeated[0], "path", problem, len(repeated) - 1)
        missing = [i for i, path in enumerate(self.paths) if not self.exists(path)]
        if missing:
            named = ", ".join(self.shown[i] for i in missing[:NAMED_AT_MOST])
            hint = "write / instead of \\; " if "\\" in paths[missing[0]] else ""
            problem = (
                f"the file does not exist; {hint}{len(missing)} of {len(paths)} are missing: {named}; paths start at "
                f"{printable(folder)}; data.root names another folder"
            )
            raise fault(missing[0], "path", problem)

        self.class_names, self.labels = index_names(values["label"])
        if of_classes:
            self.soft_labels = soft_labels_of(file, of_classes, self.class_names, self.labels, fault)
        self.domain_names, self.domains = index_names(values.get("domain", [file.stem] * len(paths)))
        if group is not None:
            self.group_names, self.groups = groups_of(paths, group)
        elif "group" in values:
            self.group_names, self.groups = index_names(values["group"])
        if "split" in values:
            self.splits = np.array(values["split"])

    def on_disk(self, folder: Path, path: str) -> str:
        """Returns the file that a cell names."""
        return on_disk(folder, path)

    def exists(self, path: str) -> bool:
        return os.path.isfile(path)

    def wanted(self, file: Path, cells: dict[str, list[object]], numbers: Sequence[int]) -> Sequence[int]:
        """Returns the rows that are read: all. `numbers`: those of the rows in messages."""
        return range(len(numbers))


def path_in(cell: object) -> str:
    """Returns the path in a cell, blanks and all. Raises `ValueError` with the problem and what to do."""
    if not isinstance(cell, str | None):
        raise ValueError(f"a path must be text, not {type(cell).__name__}; write it as text")
    if not cell:
        raise ValueError("the cell is empty; fill it in")
    return cell  # blanks and all: the name of a file may contain them


def split_in(cell: object) -> str:
    part = name_in(cell)
    if part not in PARTS:
        raise ValueError(f'"{part}" is not a split{did_you_mean(part, PARTS)}')
    return part


def soft_labels_of(
    file: Path, cells: Mapping[str, Sequence[object]], classes: Sequence[str], labels: np.ndarray, fault: Fault
) -> np.ndarray:
    """Returns soft labels, float32 [N,C] with rows of sum 1, from {column p:CLASS: N cells} and labels int64 [N].

    A row of empty cells is one-hot. Raises `UserError` if there is not one column for each of the `classes`, and
    `fault(row, column, problem, more)` for the first row that is no distribution, or whose label is not among the most
    probable, both up to `ROUNDING`.
    """
    columns = [f"{CLASS_PREFIX}{name}" for name in classes]
    named = {CLASS_PREFIX + printable(one_form(name.strip()[len(CLASS_PREFIX) :].strip())): name for name in cells}
    if len(named) < len(cells):
        twice = next(name for name in cells if name not in named.values())
        raise UserError(f"{file}: column {twice}: another column is of the same class; remove one")
    for name in named:
        if name not in columns:
            raise UserError(f"{file}: column {name}: no label has this name{did_you_mean(name, columns)}")
    for name in columns:
        if name not in named:
            raise UserError(f"{file}: there is no column {name}; add it, or leave out all columns {CLASS_PREFIX}CLASS")
    p = np.array([[_probability(cell) for cell in cells[named[name]]] for name in columns]).T  # float64 [N,C]
    empty = np.isnan(p).all(1)
    p[empty] = np.eye(len(classes))[labels[empty]]
    if (wrong := np.argwhere(~(p >= 0))).size:
        problem = f"must be a number from 0 to 1, unless all {CLASS_PREFIX} of the row are empty"
        raise fault(int(wrong[0, 0]), columns[wrong[0, 1]], problem, len(np.unique(wrong[:, 0])) - 1)
    total, of_label, largest = p.sum(1), p[np.arange(len(p)), labels], p.max(1)
    if (rows := np.flatnonzero(np.abs(total - 1) > ROUNDING)).size:
        problem = f"the columns {CLASS_PREFIX} of the row sum to {total[rows[0]]:.6g}; they must sum to 1"
        raise fault(int(rows[0]), columns[0], problem, len(rows) - 1)
    if (rows := np.flatnonzero(of_label < largest - ROUNDING)).size:
        row = int(rows[0])
        likely = f"{columns[p[row].argmax()]} is {largest[row]:.6g}"
        problem = f"is {of_label[row]:.6g}, and {likely}; the label must be among the most probable"
        raise fault(row, columns[labels[row]], problem, len(rows) - 1)
    return (p / total[:, None]).astype(np.float32)


def _probability(cell: object) -> float:
    """Returns the number in a cell; NaN for an empty one, −1 for text that is no number."""
    try:
        return math.nan if cell is None or str(cell).strip() in MISSING | {""} else float(str(cell))
    except ValueError:
        return -1.0


def read_cells(
    file: Path, needed: Sequence[str], called: Mapping[str, str], reads_soft_labels: bool, key: str = "data.file"
) -> tuple[dict[str, list[object]], list[int], list[str]]:
    """Returns {column: cells} of our columns, the number of every row, and the other columns.

    `called`: {our name of a column that is read, if there is one: its name in the table}. Columns p:CLASS keep theirs.
    `key`: of the recipe, which names the table. Raises `UserError`.
    """
    kind = file.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise UserError(f"{key}: {file} does not end in .csv or .parquet; name a table that does")
    if not file.is_file():
        problem = "is not a file" if file.exists() else not_there(file)
        raise UserError(f"{key}: {file} {problem}; name a CSV or Parquet file")
    header = column_names(file)
    folded = {str(name).strip().casefold() for name in header}
    label = called["label"].casefold()
    probability = label.replace("label", "probability")  # predict --top-k writes label_1 and probability_1 too
    predicted = label.replace("label", "predicted")  # which the table that `label` writes has
    if {label, probability} <= folded and probability != label and predicted not in folded:
        raise UserError(
            f"{file}: the column {probability} shows that {label} holds predictions; rename {label} to predicted, and "
            "write the true classes into a new column label"
        )
    of_classes = [name for name in header if is_of_class(name)] if reads_soft_labels else []
    if of_classes and "probability" in folded:
        raise UserError(
            f"{file}: the column probability shows that {of_classes[0]} holds predictions; leave out the columns "
            f"{CLASS_PREFIX}CLASS, or write the votes into them and leave out probability"
        )
    called = {**called, **{name: name for name in of_classes}}
    missing = [column for column in needed if called[column] not in header]
    if missing:
        free = [name for name in header if name not in called.values()]
        meant = {column: name for column in missing if (name := column_meant(column, free))}
        differ = [f"{name} to {column}" for column, name in meant.items() if name != column]
        renamed = ", ".join(differ) or "the columns"
        keys = ", ".join(f"{column}: {meant.get(column, 'NAME')}" for column in missing)
        what = f"there is no column {', '.join(called[column] for column in missing)}; found: {', '.join(header)}"
        raise UserError(f"{file}: {what}; rename {renamed}, or set data.columns={{{keys}}}")
    columns = [column for column, name in called.items() if name in header]
    twice = [called[column] for column in columns if header.count(called[column]) > 1]
    if twice:
        raise UserError(f"{file}: two columns have the name {twice[0]}; rename one")
    names = [called[column] for column in columns]
    if kind == ".csv":
        _, *numbered_rows = csv_rows(file)
        numbers = [number for number, _ in numbered_rows]
        read: dict[str, list[object]] = {n: [row[header.index(n)] for _, row in numbered_rows] for n in names}
    else:
        read = _from_parquet(file, lambda parquet: parquet.read_table(file, columns=names).to_pydict())
        numbers = list(range(1, 1 + len(read[names[0]])))
    if not numbers:
        raise UserError(f"{file}: the table has no rows; add one per image")
    cells = {column: read[called[column]] for column in columns}
    return cells, numbers, [name for name in header if name not in names]


def column_names(file: Path) -> list[str]:
    """Returns the names of a table's columns. Raises `UserError`."""
    if file.suffix.lower() == ".csv":
        return next(csv_rows(file))[1]
    names: list[str] = _from_parquet(file, lambda parquet: parquet.read_schema(file).names)
    return names


def _from_parquet(file: Path, read: Callable[[Any], Any]) -> Any:
    """Returns what `read(pyarrow.parquet)` returns. Raises `UserError` for a damaged file."""
    import pyarrow.parquet

    try:
        return read(pyarrow.parquet)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as Parquet: {error}") from error
