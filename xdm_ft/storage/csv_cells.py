"""Cells of CSV files. A spreadsheet computes a text that begins with =, +, -, @, a tab or an end of line as a formula,
so such a text begins with an apostrophe, which a spreadsheet takes for "this is text", and such a path with `./`. So
does a path that begins with a blank, which readers drop.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

PATH = "path"  # the column whose cells are paths
QUOTE, QUOTE_PATH = "'", "./"
# a text that looks as if it were quoted is quoted once more, so that reading gives it back
QUOTED, QUOTED_PATH = re.compile(r"'*[=+\-@\t\r\n]"), re.compile(r"(\./)*[=+\-@\t\r\n ]")


def csv_line(columns: Iterable[str], cells: Iterable[object]) -> str:
    """Returns the cells of these columns as a line of a CSV file. Numbers stay numbers, and None is an empty cell."""
    # with "\r\n" as its end of a row, the writer quotes both characters in cells
    text = io.StringIO()
    csv.writer(text).writerow(_written(column, cell) for column, cell in zip(columns, cells, strict=True))
    return text.getvalue().removesuffix("\r\n") + "\n"


def _written(column: str, cell: object) -> object:
    if isinstance(cell, bool):
        return str(cell).lower()
    if not isinstance(cell, str):
        return cell
    if column == PATH:
        return QUOTE_PATH + cell if QUOTED_PATH.match(cell) else cell
    return QUOTE + cell if QUOTED.match(cell) else cell


def read_cell(column: str, cell: str) -> str:
    """Returns the text from which `csv_line` made this cell. A path is that of the same file in any case."""
    if column == PATH:
        return cell[len(QUOTE_PATH) :] if cell.startswith(QUOTE_PATH) and QUOTED_PATH.match(cell) else cell
    return cell[len(QUOTE) :] if cell.startswith(QUOTE) and QUOTED.match(cell) else cell
