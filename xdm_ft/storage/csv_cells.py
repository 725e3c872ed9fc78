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
# what stands in front of which texts: one that looks as if it were quoted is quoted again, so that it is read back
TEXT_RULE = "'", re.compile(r"'*[=+\-@\t\r\n]")
PATH_RULE = "./", re.compile(r"(\./)*[=+\-@\t\r\n ]")


def csv_line(columns: Iterable[str], cells: Iterable[object]) -> str:
    """Returns the cells of these columns as a line of a CSV file. Numbers stay numbers, and None is an empty cell."""
    # with "\r\n" as its end of a row, the writer quotes both characters in cells
    text, row = io.StringIO(), list[object]()
    for column, cell in zip(columns, cells, strict=True):
        if isinstance(cell, bool):
            cell = str(cell).lower()
        elif isinstance(cell, str):
            quote, quoted = PATH_RULE if column == PATH else TEXT_RULE
            cell = quote + cell if quoted.match(cell) else cell
        row.append(cell)
    csv.writer(text).writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


def read_cell(column: str, cell: str) -> str:
    """Returns the text from which `csv_line` made this cell. A path is that of the same file in any case."""
    quote, quoted = PATH_RULE if column == PATH else TEXT_RULE
    return cell.removeprefix(quote) if quoted.match(cell) else cell
