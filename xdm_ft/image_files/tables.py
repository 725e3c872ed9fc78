"""Tables: the rows of a CSV file, and columns that name classes, domains, groups and splits. Also Arrow tables on disk
with a column of encoded image files, as the package `datasets` writes them.
"""

from __future__ import annotations

import csv
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from xdm_ft.image_files.files import index_names
from xdm_ft.images import Container, ImageDataset
from xdm_ft.images.decode import NAMED_AT_MOST, EncodedImages
from xdm_ft.runtime.errors import UserError, did_you_mean, join_names, printable
from xdm_ft.runtime.settings import Block
from xdm_ft.storage.cache_root import remembered
from xdm_ft.storage.lines import read_cell
from xdm_ft.storage.names import expand_user

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from pyarrow import ChunkedArray, Table

# the names of splits that data sets on the hub use → ours
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
CLASS_PREFIX = "p:"  # of columns of probabilities of a class, which may have the name of another column
MISSING = frozenset(
    ["#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
     "NaN", "NaT", "None", "n/a", "nan", "null"]
)  # fmt: skip
"""Texts that mean a missing value: those that `pandas.read_csv` takes for one, and that `astype(str)` makes of one.

A folder may have such a name: nobody creates it by accident.
"""


class Keys(Block):
    """The keys of KEY.json in a tar, as `data/webdataset.py` reads them."""

    label: Annotated[str, Field(description="key of the class: text or an integer; without it, KEY.cls holds it")] = (
        "label"
    )
    domain: Annotated[str | None, Field(description="key of the domain; null: the name of the tar's folder")] = None
    group: Annotated[
        str | None, Field(description="key of the patient, slide or sequence; null: images are independent")
    ] = None
    split: Annotated[
        str | None, Field(description="key with train, val or test; null: the data have no split of their own")
    ] = None


OWN_KEYS = Keys()


def name_in(cell: object) -> str:
    """Returns the name in a cell, without blanks around it: they are typing errors.

    Raises `ValueError` with the problem and what to do, if the cell is empty or stands for a missing value, or is
    neither text nor a number.
    """
    if not isinstance(cell, str | int | float | Decimal | None):
        kind = {"list": "list", "dict": "struct", "bytes": "byte string"}.get(type(cell).__name__, type(cell).__name__)
        raise ValueError(f"a name must be text or a number, not a {kind}; write it as text")
    name = "" if cell is None else str(cell).strip()
    if not name:
        raise ValueError("the cell is empty; fill it in")
    if name in MISSING or (not isinstance(cell, str) and not math.isfinite(cell or 0)):
        raise ValueError(f'"{name}" means a missing value; fill it in, or write another word if it is a name')
    return name


def alike(names: Sequence[str]) -> list[list[int]]:
    """Returns the numbers of names that mean the same to a reader: 1 and 1.0, Cat and cat."""
    numbers_of: dict[object, list[int]] = {}
    for number, name in enumerate(names):
        # NFKC: the letters of full width, ligatures
        value: object = "".join(unicodedata.normalize("NFKC", name).casefold().split())
        with suppress(ValueError):
            # Python reads 1_0 as 10, a reader does not
            value = float(str(value)) if math.isfinite(float(str(value))) and "_" not in str(value) else value
        numbers_of.setdefault(value, []).append(number)
    return [numbers for numbers in numbers_of.values() if len(numbers) > 1]


def on_disk(folder: str | Path, path: str) -> str:
    """Returns the path from a folder in the form that its files have there: é may be one character, or two (a Mac)."""
    if path.isascii():
        return os.path.join(folder, path)
    forms = [path, *(unicodedata.normalize(form, path) for form in ("NFC", "NFD"))]
    whole = [os.path.join(folder, form) for form in forms]
    return next(filter(os.path.isfile, whole), whole[0])


def whole_number(name: str) -> str:
    """Returns 0 of 0.0, as pandas writes whole numbers of a column with empty cells; other names as they are."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", name)


def csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (number, cells) of each row of a CSV file that is UTF-8 with commas. The first is the header, number 1.

    Blank lines are skipped, and counted. Every row has as many cells as the header, whose names have no blanks around
    them. Cells are as they were before `storage.lines.csv_line` quoted formulas. Raises `UserError`.
    """
    number = 1
    try:
        # -sig: spreadsheets begin a file with a byte order mark, which would be part of the first column's name
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(reader, [])]
            for sign, name in (("\t", "tabs"), (";", "semicolons"), ("|", "bars")):
                if len(header) == 1 and sign in header[0]:
                    raise UserError(f"{file}: the columns are separated by {name}; save it with commas")
            yield 1, header
            for number, row in enumerate(reader, start=2):
                if row and len(row) != len(header):
                    raise UserError(
                        f"{file}: row {number}: the row has {len(row)} cells, but the header has "
                        f"{len(header)}; quote cells that contain commas"
                    )
                if row:
                    yield number, [read_cell(column, cell) for column, cell in zip(header, row, strict=True)]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: the text is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except csv.Error as error:
        raise UserError(f"{file}: row {number + 1}: {error}") from error


def name_columns(
    dataset: ImageDataset,
    table: Table,
    source: str,
    columns: Mapping[str, str | None],
    class_names: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Sets the data set's classes and, where `columns` names a column for them, its domains, groups and splits.

    `columns`: {label, domain, group or split: column of the table, None: there is none}. `class_names`: {column of
    integers: the names that its type gives to them}. `source` names the table in messages. Raises `UserError` for the
    first row whose cell is not a name.
    """
    numbers = {
        key: number_names(table[name], source, name, (class_names or {}).get(name))
        for key, name in columns.items()
        if name is not None
    }
    dataset.class_names, dataset.labels = numbers["label"]
    if "domain" in numbers:
        dataset.domain_names, dataset.domains = numbers["domain"]
    if "group" in numbers:
        dataset.group_names, dataset.groups = numbers["group"]
    if "split" in numbers:
        dataset.splits = parts_of(source, *numbers["split"])


def number_names(
    cells: ChunkedArray, source: str, column: str, class_names: Sequence[str] | None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names that occur, and for every row its name's index (int64 [n]).

    Integers are in their order, other names are sorted. Raises `UserError` for the first row whose cell is not a name.
    """
    import pyarrow

    if not pyarrow.types.is_dictionary(cells.type):
        cells = cells.dictionary_encode()
    array = pyarrow.concat_arrays(cells.unify_dictionaries().chunks)
    # a dictionary of the file itself leaves nulls to the codes
    dictionary = [*array.dictionary.to_pylist(), None]
    occurring, codes = np.unique(array.indices.fill_null(len(dictionary) - 1).to_numpy(), return_inverse=True)
    values = [dictionary[code] for code in occurring.tolist()]
    texts, faults = list[str](), dict[int, str]()
    for code, value in enumerate(values):
        try:
            texts.append(name_in(value))
            if class_names is not None and value not in range(len(class_names)):
                raise ValueError("no value; add one, or remove the row")
        except ValueError as error:
            faults[code] = str(error)
    if faults:
        row = int(np.flatnonzero(np.isin(codes, list(faults)))[0])
        raise UserError(f"{source}: row {row}, column {column}: {faults[int(codes[row])]}")
    if not all(isinstance(value, int) for value in values):
        names, index = index_names(texts)
        return names, index[codes]
    present, index = np.unique(np.array(values, dtype=np.int64), return_inverse=True)
    names, merged = index_names(
        [str(i) if class_names is None else class_names[i] for i in present.tolist()], in_order=True
    )
    return names, merged[index][codes]


def encode_names(cells: ChunkedArray, source: str) -> ChunkedArray:
    """Returns the cells as dictionary<text, int64, double or bool>, or of the type null if all are missing.

    Raises `UserError`, which begins with `source`, if their type is neither text nor a number.
    """
    import pyarrow
    from pyarrow import types

    kind = cells.type.value_type if types.is_dictionary(cells.type) else cells.type
    if types.is_null(kind):
        return cells
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_decimal)
    if any(is_kind(kind) for is_kind in is_text):
        kind = pyarrow.string()
    elif types.is_integer(kind):
        kind = pyarrow.int64()
    elif types.is_floating(kind):
        kind = pyarrow.float64()
    elif not types.is_boolean(kind):
        raise UserError(f"{source}: a name must be text or a number, not a {kind}; write it as text")
    try:
        return cells.cast(kind).dictionary_encode()
    except pyarrow.ArrowInvalid as error:  # an integer beyond 64 bits with a sign
        raise UserError(f"{source}: {error}; write it as text") from error


def join_tables(tables: Sequence[Table], source: str) -> Table:
    """Returns the rows of the tables, one table after the other. Raises `UserError` if types of a column differ."""
    import pyarrow

    for column in tables[0].column_names:
        kinds = {table.schema.field(column).type for table in tables} - {pyarrow.null()}
        if len(kinds) > 1:
            named = ", ".join(sorted(str(getattr(kind, "value_type", kind)) for kind in kinds))
            raise UserError(f"{source}: column {column} has values of several types ({named}); write one type")
    return pyarrow.concat_tables(tables, promote_options="permissive")


def remember_table(key: str, make: Callable[[], Table]) -> Table:
    """Returns what `make` returned for this key, or returns now: see `remembered`."""
    import pyarrow

    def to_arrays() -> dict[str, np.ndarray]:
        table, stream = make(), pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
        return {"table": np.frombuffer(stream.getvalue(), np.uint8)}

    return pyarrow.ipc.open_stream(pyarrow.py_buffer(remembered(key, to_arrays)["table"])).read_all()


def parts_of(source: str, names: tuple[str, ...], numbers: np.ndarray) -> np.ndarray:
    """Returns train, val or test for every row (str [n]). Raises `UserError` for another split."""
    for name in names:
        if name not in PARTS:
            raise UserError(f'{source}: the split "{name}" is unknown{did_you_mean(name, list(PARTS))}')
    return np.array([PARTS[name] for name in names])[numbers]


MEANINGS = {
    "path": "file filename filepath image img photo", "label": "class target y diagnosis category truth species",
    "domain": "site hospital center centre source camera location scanner region", "group": "patient subject slide",
    "split": "fold subset partition",
}  # fmt: skip
"""{column: names that other tables give to it}"""


def column_meant(column: str, names: Sequence[str]) -> str | None:
    """Returns the name that stands for a column of ours elsewhere, or is a mistyped one; None: there is none."""
    meanings = {column, f"{column}s", *MEANINGS.get(column, "").split()}
    for name in names:
        words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
        while len(words) > 1 and words[-1] in (("name",) if column == "path" else ("name", "id", "code")):
            words.pop()
        if words and words[-1] in meanings:
            return name
    alike = [name for name in names if name[:1].casefold() == column[:1].casefold()]
    close = get_close_matches(column, alike, n=1, cutoff=0.8)
    return close[0] if close else None


def no_column(key: str, source: str, name: str, names: Sequence[str]) -> UserError:
    """Returns the error that a table lacks the column `name` of the key `data.columns.key`."""
    meant = column_meant(name, names) or column_meant(key, names)
    hint = f'did you mean "{meant}"?' if meant else f"known: {', '.join(names)}"
    return UserError(f'data.columns.{key}: {source} has no column "{name}"; {hint}')


def is_of_class(column: str) -> bool:
    """Returns whether a column has the name p:CLASS, in small or capital letters."""
    return column.strip().casefold().startswith(CLASS_PREFIX)


def soft_labels_not_read(source: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the line of `ImageDataset.left_out` on columns, or keys, p:CLASS where they are not read."""
    unread = join_names([printable(name) for name in names if is_of_class(name)], NAMED_AT_MOST)
    remedy = "not read as soft labels; write the images as files, and list them in a table (data.name: table)"
    return (f"{source}: {unread}: {remedy}",) if unread else ()


class Columns(Block):
    """The names of the table's columns."""

    image: Annotated[str, Field(description="column of the images: encoded image files as bytes")] = "image"
    label: Annotated[str, Field(description="column of the class: text or an integer")] = "label"
    domain: Annotated[
        str | None, Field(description="column of the domain; null: each split of the data is a domain")
    ] = "domain"
    group: Annotated[
        str | None, Field(description="column of the patient, slide or sequence; null: images are independent")
    ] = None
    split: Annotated[
        str | None, Field(description="column with train, val or test; null: the data has no split of its own")
    ] = None


OWN_COLUMNS = Columns()


class TableColumns(Block):
    """The names of the columns of a table of paths."""

    path: Annotated[str, Field(description="column of the paths of the images")] = "path"
    label: Annotated[str, Field(description="column of the class")] = "label"
    domain: Annotated[str, Field(description="column of the domain")] = "domain"
    group: Annotated[str, Field(description="column of the patient, slide or sequence, if there is one")] = "group"
    split: Annotated[str, Field(description="column with train, val or test, if there is one")] = "split"


PATH_COLUMNS = TableColumns()


class SlideColumns(Block):
    """The names of the columns of a table of slides."""

    slide: Annotated[str, Field(description="column of the slide: the name of its file without .h5, .pt or .npy")] = (
        "slide"
    )
    file: Annotated[str, Field(description="column of the path of its file from the folder, if there is one")] = "file"
    label: Annotated[str, Field(description="column of the class")] = "label"
    domain: Annotated[str, Field(description="column of the domain")] = "domain"
    group: Annotated[str, Field(description="column of the patient, if there is one")] = "group"
    split: Annotated[str, Field(description="column with train, val or test, if there is one")] = "split"


SLIDE_COLUMNS = SlideColumns()


def load(read: Callable[[], DatasetDict], source: str, remedy: str) -> DatasetDict:
    """Returns what `read` loads with `datasets`. Raises `UserError`, one line that ends with `remedy`."""
    from datasets.config import HF_DATASETS_CACHE
    from datasets.exceptions import DatasetsError

    expand_user(HF_DATASETS_CACHE, "HF_HOME")  # `datasets` would write to a folder of the name ~
    try:
        return read()
    except (DatasetsError, OSError, ValueError) as error:  # Arrow raises ValueError for a damaged Parquet file
        cause = error.__cause__ or error
        reason = " ".join(printable(f"{type(cause).__name__}: {cause}").split())[:200]
        raise UserError(f"{source}: cannot be read ({reason}); {remedy}") from error


class ImageTable(EncodedImages):
    """Row i is row i of the table. Images are decoded here, not by `datasets`: pixels equal those of `Folder`."""

    table: Dataset  # the image column only
    column: str
    where: str  # name of the data for messages

    def _fill(self, parts: Mapping[str, Dataset], columns: Columns, source: str, use_splits: bool = False) -> None:
        """Concatenates `parts`, {name of the split: table}. Raises `UserError` if a column is missing or has gaps."""
        import pyarrow
        from datasets import ClassLabel, concatenate_datasets
        from datasets import Image as ImageFeature

        self.where, self.column = source, columns.image
        self.left_out = soft_labels_not_read(
            source, dict.fromkeys(chain(*(part.column_names for part in parts.values())))
        )
        wanted = [name for name in columns.model_dump().values() if name is not None]
        for key, name in columns.model_dump().items():
            for part in parts.values():
                if name is not None and name not in part.column_names:
                    raise no_column(key, source, name, part.column_names)
        try:
            table = concatenate_datasets([part.select_columns(wanted) for part in parts.values()])
        except ValueError as error:
            raise UserError(f"{source}: the splits have different types of columns: {error}") from error
        if isinstance(table.features[columns.image], ImageFeature):
            table = table.cast_column(columns.image, ImageFeature(decode=False))  # else reading a row decodes it
        self.table = table.select_columns([columns.image])
        files = tuple(part["filename"] for part in table.cache_files)
        self.container = Container(files, columns.image) if files else None
        of_part = np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])
        self.domain_names, merged = index_names([*parts], in_order=True)
        self.domains = merged[of_part]
        names = {name: feature.names for name, feature in table.features.items() if isinstance(feature, ClassLabel)}
        cells = {name: encode_names(table.data.column(name), f"{source}: column {name}") for name in wanted[1:]}
        name_columns(self, pyarrow.table(cells), source, columns.model_dump(exclude={"image"}), names)
        if use_splits and columns.split is None:
            self.splits = parts_of(source, tuple(parts), of_part)

    def name(self, row: int) -> str:
        return f"{self.where}, {self.name_in_data(row)}"

    def name_in_data(self, row: int) -> str:
        value = self.table[int(row)][self.column]
        path = value.get("path") if isinstance(value, dict) else None
        return f"row {row}" + (f" ({printable(os.path.basename(path))})" if path else "")

    def content(self, row: int) -> str | bytes:
        value = self.table[int(row)][self.column]
        if isinstance(value, dict):
            return value["bytes"] if value["bytes"] is not None else os.path.abspath(value["path"] or "")
        return value if isinstance(value, bytes) else b""  # b"" does not decode and is reported as such
