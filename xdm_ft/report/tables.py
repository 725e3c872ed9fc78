"""Lays tables out as text, for a terminal or a file.

Each protocol line has its own table, and published numbers have separate tables: no column mixes two protocols.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, Literal, TextIO

from xdm_ft.report.table_rows import ResultTable
from xdm_ft.runtime.errors import printable

MINIMUM_WIDTH = 100  # characters, for output to a file or pipe


def as_text(tables: Iterable[ResultTable], out: TextIO) -> str:
    """Returns the tables as text for `out`: with colours, and in blocks of columns, if that is a terminal."""
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    console, encoding = Console(file=out), out.encoding or "utf-8"
    if isinstance(out, io.StringIO):  # FORCE_COLOR is about terminals
        console = Console(file=out, force_terminal=False, color_system=None)
    parts: list[Any] = []
    for shown in tables:
        parts += [Text(encoded(shown.heading, encoding), style="bold")]
        parts += [Text(encoded(f"{what}: {text}", encoding), style="dim") for what, text in shown.about]
        for columns in _blocks(shown, encoding, console.width if console.is_terminal else None):
            table = Table()
            for i in columns:
                justify: Literal["left", "right"] = "left" if i < shown.labels else "right"
                table.add_column(Text(encoded(shown.header[i], encoding)), justify=justify, overflow="fold")
            for row in shown.rows:
                table.add_row(*(Text(encoded(row[i], encoding)) for i in columns))
            parts.append(table)
        parts += [*(Text(encoded(f"{methods}: {note}", encoding)) for methods, note in shown.notes), Text()]
    if not console.is_terminal:  # rich assumes 80 columns there and would fold the cells
        unbounded = console.options.update(width=1 << 16)
        widths = (console.measure(part, options=unbounded).maximum for part in parts if isinstance(part, Table))
        console.width = max(MINIMUM_WIDTH, *widths, 0)
    with console.capture() as captured:
        console.print(Group(*parts))
    return captured.get()


def _blocks(shown: ResultTable, encoding: str, width: int | None) -> list[list[int]]:
    """Column numbers in blocks that fit `width` (None: one block); each block begins with the columns of labels."""
    from rich.cells import cell_len

    rows = (shown.header, *shown.rows)
    border = 3  # characters per column: two spaces and a line
    needed = [max(cell_len(encoded(row[i], encoding)) for row in rows) + border for i in range(len(shown.header))]
    labels = list(range(shown.labels))
    start = sum(needed[: shown.labels]) + 1
    blocks, used = [labels[:]], start
    for i in range(shown.labels, len(needed)):
        if width is not None and len(blocks[-1]) > len(labels) and used + needed[i] > width:
            blocks, used = [*blocks, labels[:]], start
        blocks[-1].append(i)
        used += needed[i]
    return blocks


def plain(text: str) -> str:
    """Returns the text on one line without control characters: names come from others, reasons have several lines."""
    return printable(" ".join(text.split()))


def encoded(text: str, encoding: str) -> str:
    """Returns `plain` of the text, with escapes for characters that the encoding lacks."""
    return plain(text).encode(encoding, "backslashreplace").decode(encoding)
