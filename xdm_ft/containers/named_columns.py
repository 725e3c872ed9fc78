"""Columns of a table that name a class, a domain, a group or a split, as numbers: one small integer per row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xdm_ft.containers.cells import name_in
from xdm_ft.containers.files import numbered
from xdm_ft.runtime.errors import UserError, did_you_mean, printable

if TYPE_CHECKING:
    from pyarrow import Array, ChunkedArray

PLAIN = (str, int, float, type(None))
# the names of splits that data sets on the hub use → ours
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}


class Column(NamedTuple):
    """The cells of n rows: row i holds `values[codes[i]]`."""

    values: list[Any]  # different ones
    codes: np.ndarray  # int32 [n]

    @classmethod
    def of(cls, cells: Iterable[Any]) -> Column:
        """The column of these cells. Equal ones of different types, such as 1 and True, are different values."""
        numbers: dict[tuple[type, Any], int] = {}
        codes = [numbers.setdefault((type(cell), cell), len(numbers)) for cell in cells]
        return cls([cell for _, cell in numbers], np.array(codes, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[Column]) -> Column:
        """The rows of the parts, one part after the other."""
        values = cls.of(value for part in parts for value in part.values)
        firsts = np.cumsum([0, *(len(part.values) for part in parts)])
        rows = np.cumsum([0, *(len(part.codes) for part in parts)])
        codes = np.empty(rows[-1], np.int32)
        for part, first, row in zip(parts, firsts.tolist(), rows.tolist(), strict=False):
            codes[row : row + len(part.codes)] = values.codes[first:][part.codes]
        return cls(values.values, codes)

    def used(self) -> Column:
        """Returns the column without values that no row has."""
        used, codes = np.unique(self.codes, return_inverse=True)
        return Column([self.values[code] for code in used.tolist()], codes.astype(np.int32))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Returns the column as arrays; `Column.read` of them is the column again. Values must be JSON's."""
        text = json.dumps(self.values, allow_nan=True).encode()
        return {f"{name}.values": np.frombuffer(text, np.uint8), f"{name}.codes": self.codes}

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray], name: str) -> Column:
        return cls(json.loads(arrays[f"{name}.values"].tobytes()), arrays[f"{name}.codes"])


def column_of(cells: ChunkedArray, place: str, first: int) -> Column:
    """Returns the column of cells of Arrow. `place`: for messages, with {} for the row; `first`: row of the first cell.

    Raises `UserError` for a type that can not be a name.
    """
    import pyarrow

    if pyarrow.types.is_nested(cells.type):
        values, codes = cells.slice(0, 1).to_pylist(), np.zeros(len(cells), np.int32)
    else:
        if not pyarrow.types.is_dictionary(cells.type):
            cells = cells.dictionary_encode(null_encoding="encode")
        # a dictionary of the file itself leaves nulls to the codes
        one = one_array([cells.unify_dictionaries()] if cells.num_chunks else [cells])
        values, codes = one.dictionary.to_pylist(), one.indices.fill_null(len(one.dictionary)).to_numpy()
        values += [None] * bool(one.indices.null_count)
        codes = codes.astype(np.int32)
    for code, value in enumerate(values):
        if not isinstance(value, PLAIN) and not isinstance(value, Decimal) and (codes == code).any():
            try:
                name_in(value)
            except ValueError as error:
                raise UserError(f"{place.format(first + int(np.argmax(codes == code)))}: {error}") from None
    return Column([str(value) if isinstance(value, Decimal) else value for value in values], codes).used()


def one_array(parts: Sequence[ChunkedArray]) -> Array:
    import pyarrow

    chunks = [chunk for part in parts for chunk in part.chunks]
    return pyarrow.concat_arrays(chunks) if chunks else pyarrow.array([], parts[0].type)


def named(column: Column, where: str, name: str, classes: Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names that occur, and for every row its name's index (int64 [n]).

    Numbers are in their order, with the names `classes` if the table's type says them; other names are sorted. Raises
    `UserError` for the first row whose cell is no name.
    """
    texts, faults = list[str](), dict[int, str]()
    for code, value in enumerate(column.values):
        try:
            texts.append(name_in(value))
            if classes is not None and value not in range(len(classes)):
                raise ValueError("no value; add one, or remove the row")
        except ValueError as error:
            faults[code] = str(error)
    kinds = sorted({type(value).__name__ for value in column.values if value is not None})
    if len(kinds) > 1:
        raise UserError(f"{where}: column {name} has values of several types ({', '.join(kinds)}); write one type")
    if faults:
        row = int(np.flatnonzero(np.isin(column.codes, list(faults)))[0])
        raise UserError(f"{where}: row {row}, column {name}: {faults[int(column.codes[row])]}")
    if not all(isinstance(value, int) for value in column.values):
        names, index = numbered(texts)
        return names, index[column.codes]
    present, index = np.unique(np.array(column.values, dtype=np.int64), return_inverse=True)
    names = tuple(printable(str(i) if classes is None else classes[i]) for i in present.tolist())
    return names, index[column.codes]


def parts_of(where: str, names: tuple[str, ...], numbers: np.ndarray) -> np.ndarray:
    """Returns train, val or test for every row (str [n]). Raises `UserError` for another split."""
    for name in names:
        if name not in PARTS:
            raise UserError(f'{where}: the split "{name}" is unknown{did_you_mean(name, list(PARTS))}')
    return np.array([PARTS[name] for name in names])[numbers]
