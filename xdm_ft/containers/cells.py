"""The cells of a table that name a class, a domain, a group or a split."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from decimal import Decimal

MISSING = frozenset(
    ["#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
     "NaN", "NaT", "None", "n/a", "nan", "null"]
)  # fmt: skip
"""Texts that mean a missing value: those that `pandas.read_csv` takes for one, and that `astype(str)` makes of one.

A folder may have such a name: nobody creates it by accident.
"""


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
    """Returns the numbers of names that mean the same to a reader: 1 and 1.0, Cat and cat, é in either encoding."""
    found: dict[object, list[int]] = {}
    for number, name in enumerate(names):
        # NFKC maps the two encodings of an accented letter (one character, or letter and accent) to one
        text = "".join(unicodedata.normalize("NFKC", name).casefold().split())
        found.setdefault(_value(text), []).append(number)
    return [numbers for numbers in found.values() if len(numbers) > 1]


def _value(text: str) -> object:
    """Returns the number that a text is, or the text."""
    try:
        return float(text) if math.isfinite(float(text)) and "_" not in text else text
    except ValueError:
        return text
