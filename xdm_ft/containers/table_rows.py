"""The rows of a CSV file, one after the other."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.csv_cells import read_cell


def csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (number, cells) of each row of a CSV file that is UTF-8 with commas. The first is the header, number 1.

    Blank lines are skipped, and counted. Every row has as many cells as the header, whose names have no blanks around
    them. Cells are as they were before `storage.csv_cells` quoted formulas. Raises `UserError`.
    """
    number = 1
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(reader, [])]
            yield 1, header
            for number, row in enumerate(reader, start=2):
                if row and len(row) != len(header):
                    raise UserError(
                        f"{printable(file)}: row {number}: the row has {len(row)} cells, but the header has "
                        f"{len(header)}; quote cells that contain commas"
                    )
                if row:
                    yield number, [read_cell(column, cell) for column, cell in zip(header, row, strict=True)]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{printable(file)}: the text is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except csv.Error as error:
        raise UserError(f"{printable(file)}: row {number + 1}: {error}") from error
