"""Writes the tables of a run to results.md and to the terminal, from the content of results.json alone.

Each protocol line has its own table, and published numbers have separate tables: no column mixes two protocols.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from xdm_ft.errors import printable
from xdm_ft.evaluation.comparison import SEEDS
from xdm_ft.report.published import published_tables
from xdm_ft.report.table_rows import IN_PERCENT, Results, ResultTable, groups, result_table
from xdm_ft.terminal import write

MINIMUM_WIDTH = 100  # characters, for output to a file or pipe


def markdown(results: Results) -> str:
    """Returns the text of results.md."""
    lines = [f"# {_escape(str(results['recipe']['name']))}", "", _escape(_how_to_read(results)), ""]
    for part in _all_tables(results):
        lines += [f"## {_escape(part.heading)}", ""]
        for what, text in part.about:
            lines += [f"**{what}:** {_escape(text)}", ""]
        lines += [_markdown_row(part.header), "|" + "---|" + "---:|" * (len(part.header) - 1)]
        lines += [_markdown_row(row) for row in part.rows] + [""]
        notes = [f"- **{_escape(methods)}**: {_escape(note)}" for methods, note in part.notes]
        lines += [*notes, ""] if notes else []
    environment = ", ".join(f"{key} {value}" for key, value in _flat(results["environment"]))
    return "\n".join([*lines, f"*Environment: {_escape(environment)}*", ""])


def print_table(results: Results) -> None:
    """Prints the same tables to standard output.

    If the terminal is too narrow, the columns of a table are printed in several blocks. Output to a file or pipe is as
    wide as necessary. Colours follow rich: only in a terminal, and not if NO_COLOR is set.
    """
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout)
    parts: list[Any] = []
    for shown in _all_tables(results):
        parts += [Text(_on_terminal(shown.heading), style="bold")]
        parts += [Text(_on_terminal(f"{what}: {text}"), style="dim") for what, text in shown.about]
        for columns in _blocks(shown, console.width if console.is_terminal else None):
            table = Table()
            for i in columns:
                justify: Literal["left", "right"] = "left" if i == 0 else "right"
                table.add_column(Text(_on_terminal(shown.header[i])), justify=justify, overflow="fold")
            for row in shown.rows:
                table.add_row(*(Text(_on_terminal(row[i])) for i in columns))
            parts.append(table)
        parts += [*(Text(_on_terminal(f"{methods}: {note}")) for methods, note in shown.notes), Text()]
    parts.append(Text(_on_terminal(_how_to_read(results)), style="dim"))
    if not console.is_terminal:  # rich assumes 80 columns there and would fold the cells
        unbounded = console.options.update(width=1 << 16)
        widths = (console.measure(part, options=unbounded).maximum for part in parts if isinstance(part, Table))
        console.width = max(MINIMUM_WIDTH, *widths, 0)
    with console.capture() as captured:
        console.print(Group(*parts))
    write(captured.get())


def _blocks(shown: ResultTable, width: int | None) -> list[list[int]]:
    """Column numbers in blocks that fit `width` (None: one block); each block begins with the column of methods."""
    from rich.cells import cell_len

    rows = (shown.header, *shown.rows)
    border = 3  # characters per column: two spaces and a line
    needed = [max(cell_len(_on_terminal(row[i])) for row in rows) + border for i in range(len(shown.header))]
    blocks, used = [[0]], needed[0] + 1
    for i in range(1, len(needed)):
        if width is not None and len(blocks[-1]) > 1 and used + needed[i] > width:
            blocks, used = [*blocks, [0]], needed[0] + 1
        blocks[-1].append(i)
        used += needed[i]
    return blocks


def _all_tables(results: Results) -> Iterator[ResultTable]:
    """Yields our tables, each followed by the published numbers for it."""
    for rows in groups(results):
        yield result_table(rows, results)
        yield from published_tables(rows, results)


def _how_to_read(results: Results) -> str:
    metrics = dict.fromkeys(row["metric"] for row in results["summary"])
    if not metrics:
        return "No model has been trained yet."
    units = [f"{m.replace('_', ' ')}{' in %' if m in IN_PERCENT else ''}" for m in metrics]
    tested_on = f" of {results['tested_on']}" if "tested_on" in results else ""
    text = (
        f"How to read: {', '.join(units)} on test images{tested_on}. ± is the standard error over seeds: standard "
        "deviation (ddof 1) / √n, after held-out domains are averaged within a seed. DomainBed prints it with ddof 0, "
        "which is √(1 − 1/n) times as large; WILDS prints the standard deviation (ddof 1), √n times as large. "
    )
    if any("budget" in row for row in results["summary"]):
        text += "Draws × gradients: draws of hyper-parameters × gradient evaluations per model. "
    return text + (
        "Versus erm is the difference to erm, paired by held-out domain and seed. Its 95% intervals (t) are over "
        "held-out domains, and over seeds and test images (groups of images where known); they are not adjusted for "
        "the number of methods. p is the larger p of the two tests; with one held-out set it is that over seeds and "
        "images, and the verdict is about this set only. p (Holm) is corrected for all methods of the table: below "
        f"0.05 the verdict is better or worse. With fewer than {SEEDS} seeds there is no verdict."
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(text: str) -> str:
    """Returns the text on one line without control characters: names come from others, reasons have several lines."""
    return printable(" ".join(text.split()))


def _on_terminal(text: str) -> str:
    """Returns `_plain` of the text, with escapes for characters that standard output can not encode."""
    encoding = sys.stdout.encoding or "utf-8"
    return _plain(text).encode(encoding, "backslashreplace").decode(encoding)


def _escape(text: str) -> str:
    """Escapes what Markdown would interpret. An underscore between letters or digits has no meaning there and stays."""
    return re.sub(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])", lambda m: "\\" + m[0], _plain(text))


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"
