"""The tables of a run: results.md and the terminal, both from the results.json dictionary and nothing else.

One table per protocol line: numbers from two protocols never share a column, published ones and ours neither.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xdm_ft.evaluation.comparison import SEEDS
from xdm_ft.report.published import published_sheets
from xdm_ft.report.table_rows import IN_PERCENT, Results, Sheet, groups, sheet

MINIMUM_WIDTH = 100  # columns of a table that does not go to a terminal


def markdown(results: Results) -> str:
    """The text of results.md."""
    lines = [f"# {_escape(str(results['recipe']['name']))}", "", _escape(_how_to_read(results)), ""]
    for part in _sheets(results):
        lines += [f"## {_escape(part.heading)}", ""]
        for what, text in part.about:
            lines += [f"**{what}:** {_escape(text)}", ""]
        lines += [_markdown_row(part.header), "|" + "---|" + "---:|" * (len(part.header) - 1)]
        lines += [_markdown_row(row) for row in part.rows] + [""]
        notes = [f"- **{_escape(methods)}**: {_escape(note)}" for methods, note in part.notes]
        lines += [*notes, ""] if notes else []
    return "\n".join([*lines, f"*Environment: {_escape(_environment(results))}*", ""])


def print_table(results: Results) -> None:
    """The same tables on standard output, their columns in several blocks where the terminal is too narrow for one.

    Output that goes to no terminal is as wide as it needs to be. Colours follow rich: none there, none with NO_COLOR.
    """
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout)
    parts: list[Any] = []
    for shown in _sheets(results):
        parts += [Text(_plain(shown.heading), style="bold")]
        parts += [Text(_plain(f"{what}: {text}"), style="dim") for what, text in shown.about]
        for columns in _blocks(shown, console.width if console.is_terminal else None):
            table = Table()
            for i in columns:
                table.add_column(Text(_plain(shown.header[i])), justify="left" if i == 0 else "right", overflow="fold")
            for row in shown.rows:
                table.add_row(*(Text(_plain(row[i])) for i in columns))
            parts.append(table)
        parts += [*(Text(_plain(f"{methods}: {note}")) for methods, note in shown.notes), Text()]
    parts.append(Text(_how_to_read(results), style="dim"))
    if not console.is_terminal:
        unbounded = console.options.update(width=1 << 16)
        widths = (console.measure(part, options=unbounded).maximum for part in parts if isinstance(part, Table))
        console.width = max(MINIMUM_WIDTH, *widths, 0)
    with console.capture() as captured:
        console.print(Group(*parts))
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(captured.get().encode(encoding, "replace").decode(encoding))  # no crash on an ASCII terminal


def _blocks(shown: Sheet, width: int | None) -> list[list[int]]:
    """The columns in blocks that fit `width` (None: all in one), each beginning with the methods."""
    from rich.cells import cell_len

    rows = (shown.header, *shown.rows)
    needed = [
        max(cell_len(_plain(row[i])) for row in rows) + 3 for i in range(len(shown.header))
    ]  # 3: two spaces and a rule
    blocks, used = [[0]], needed[0] + 1
    for i in range(1, len(needed)):
        if width is not None and len(blocks[-1]) > 1 and used + needed[i] > width:
            blocks, used = [*blocks, [0]], needed[0] + 1
        blocks[-1].append(i)
        used += needed[i]
    return blocks


def _sheets(results: Results) -> Iterator[Sheet]:
    """Ours, each with what was published under it."""
    for rows in groups(results):
        yield sheet(rows, results)
        yield from published_sheets(rows, results)


def _how_to_read(results: Results) -> str:
    metrics = dict.fromkeys(row["metric"] for row in results["summary"])
    if not metrics:
        return "No model has been trained yet."
    units = [f"{m.replace('_', ' ')}{' in %' if m in IN_PERCENT else ''}" for m in metrics]
    tested_on = f" of {results['tested_on']}" if "tested_on" in results else ""
    text = (
        f"How to read: {', '.join(units)} on test images{tested_on}; ± is the standard error over "
        "seeds, held-out domains averaged within a seed: standard deviation (ddof 1) / √n. DomainBed prints it with "
        "ddof 0, which is √(1 − 1/n) of that; WILDS prints the standard deviation (ddof 1), √n times as much. "
    )
    if any("budget" in row for row in results["summary"]):
        text += "Draws × gradients: draws of hyper-parameters × gradient evaluations per model. "
    return text + (
        "Versus erm is the difference, paired by held-out domain and seed, with 95% intervals (t) over held-out "
        "domains and over seeds and test images (groups of them where known), not adjusted for the number of methods. "
        "p is the larger one of the two; with one held-out set it is that over seeds and images, and the verdict is "
        f"about this set only. p (Holm) is corrected for all methods of the table: below 0.05 there is a verdict. With "
        f"fewer than {SEEDS} seeds there is none."
    )


def _environment(results: Results) -> str:
    return ", ".join(f"{key} {value}" for key, value in _flat(results["environment"]))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(text: str) -> str:
    """One line without control characters: names come from folders, and a terminal obeys escape sequences."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _escape(text: str) -> str:
    """Text that Markdown shows as it is. An underscore between letters or digits marks nothing and stays."""
    return re.sub(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])", lambda m: "\\" + m[0], _plain(text))


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"
