"""Tables as text for a terminal or a file, and the last screen of a run: its table in short, and what to do next.

On a terminal the last screen fits the terminal's size: domains, methods and notes that find no room are in results.md.
Output to a file or pipe has every method and domain.
"""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import SummaryRow
from xdm_ft.report.comparisons import beside_rows, difference_text, here_words, reference_names, what_it_finds
from xdm_ft.report.finished import ORACLE, Run, split_row
from xdm_ft.report.section import Section, Table
from xdm_ft.report.sentence import sentence
from xdm_ft.report.words import (
    CHEATING,
    EMPTY,
    each_once,
    in_unit,
    number,
    oracle_mark,
    plain,
    versus_columns,
    with_spread,
)  # fmt: skip
from xdm_ft.runtime.errors import plural, printable
from xdm_ft.runtime.terminal import write
from xdm_ft.storage.run_directory import ANALYSIS, MARKDOWN, PAGE

if TYPE_CHECKING:
    from rich.text import Text

MINIMUM_WIDTH = 100  # characters, for output to a file or pipe
UNBOUNDED = 1 << 16
GAP = 2  # spaces between columns
MIN_WIDTH = 5  # characters of a domain's column: those of a value
MAX_NAME = 24  # characters of a method's name
MAX_NOTES = 3  # on a terminal
MIN_METHODS = 3  # rows that are shown even if the terminal is lower
PROMPT = 1  # lines of the terminal that stay for the shell


def as_text(sections: Iterable[Section], out: TextIO) -> str:
    """Returns the tables as text for `out`: with colours, and in blocks of columns, if that is a terminal."""
    from rich.console import Console, Group
    from rich.text import Text

    console, encoding = Console(file=out), out.encoding or "utf-8"
    if isinstance(out, io.StringIO):  # FORCE_COLOR is about terminals
        console = Console(file=out, force_terminal=False, color_system=None)
    parts: list[Any] = []
    for section in sections:
        parts += [Text(encoded(section.title, encoding), style="bold")]
        parts += [Text(encoded(section.about, encoding), style="dim")]
        for table in section.tables:
            parts += [Text(encoded(table.caption, encoding), style="dim")]
            parts += _blocks(table, encoding, console.width if console.is_terminal else UNBOUNDED)
        parts += [*(Text(encoded(note, encoding)) for note in section.notes), Text()]
    if not console.is_terminal:  # rich assumes 80 columns there and would fold the cells
        unbounded = console.options.update(width=UNBOUNDED)
        widths = [console.measure(part, options=unbounded).maximum for part in parts if not isinstance(part, Text)]
        console.width = max([MINIMUM_WIDTH, *widths])
    with console.capture() as captured:
        console.print(Group(*parts))
    return captured.get()


def _blocks(table: Table, encoding: str, width: int) -> Iterator[Any]:
    """Yields the columns as rich's tables that fit `width`; each begins with those of labels."""
    import rich.table
    from rich.cells import cell_len
    from rich.text import Text

    rows = [[encoded(cell.text, encoding) for cell in row] for row in table.rows]
    header = [encoded(title, encoding) for title in table.header]
    border = 3  # characters per column: two spaces and a line
    needed = [max(map(cell_len, column)) + border for column in zip(header, *rows, strict=True)]
    labels = list(range(table.labels))
    blocks, used = [labels], sum(needed[: table.labels]) + 1
    for i in range(table.labels, len(needed)):
        if len(blocks[-1]) > len(labels) and used + needed[i] > width:
            blocks, used = [*blocks, labels], sum(needed[: table.labels]) + 1
        blocks[-1] = [*blocks[-1], i]
        used += needed[i]
    for columns in blocks:
        block = rich.table.Table()
        for i in columns:
            block.add_column(Text(header[i]), justify="left" if i < table.labels else "right", overflow="fold")
        for row in rows:
            block.add_row(*(Text(row[i]) for i in columns))
        yield block


def encoded(text: str, encoding: str) -> str:
    """Returns `plain` of the text, with escapes for characters that the encoding lacks."""
    return plain(text).encode(encoding, "backslashreplace").decode(encoding)


# ------------------------------------------------------------------------------------------------------ the last screen


class Column(NamedTuple):
    header: str
    cells: Sequence[str]
    gap: int = GAP  # spaces before it
    left: bool = False  # whether the cells are aligned left

    @property
    def width(self) -> int:
        return max(map(_length, (self.header, *self.cells)))

    def text(self, cell: str) -> str:
        fill = " " * (self.width - _length(cell))
        return " " * self.gap + (_on_terminal(cell) + fill if self.left else fill + _on_terminal(cell))


def show_headline(run: Run) -> None:
    """Prints the last screen to standard output. Colours follow rich: only on a terminal, not if NO_COLOR is set."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    is_terminal, size = console.is_terminal, console.size
    if not is_terminal:
        console.width = UNBOUNDED  # rich assumes 80 columns there and would fold the text
    above = [Text(_on_terminal(_title(run)), style="bold")]
    lines = [*what_it_finds(run.results, run.own_rule, run.metric)]
    below = [Text(_on_terminal(line), style="dim") for line in lines] + [Text(), Text(_on_terminal(sentence(run)))]
    below += [Text(_on_terminal(note), style="yellow") for note in _notes(run, MAX_NOTES if is_terminal else None)]
    below += [Text()]
    for what, text in _files(run):
        below.append(Text(f"{what:<8} ", style="dim").append(_on_terminal(text), style="not dim"))
    rows = run.own_rows
    if is_terminal:
        used = sum(len(console.render_lines(part, pad=False)) for part in (*above, *below)) + PROMPT
        rows = _most_important(run, size.height - used - 1)  # 1: the header
    table = _table(run, rows, size.width if is_terminal else None) if rows else []
    hidden = len(run.own_rows) - len(rows)
    more = [Text(f"and {hidden} more in results.md", style="dim")] if hidden else []
    with console.capture() as captured:
        for part in (*above, *table, *more, *below):
            console.print(part)
    write(captured.get())


def _title(run: Run) -> str:
    name = run.results["recipe"]["name"]
    if not run.own_rows:
        return str(name)
    on = f" on {run.results['tested_on']}" if "tested_on" in run.results else ""
    if run.own_rule == ORACLE:
        return f"{name}: {in_unit(run.metric)}{on}; selection: {ORACLE} — {CHEATING}"
    seeds = {row.n for row in run.own_rows if row.stderr is not None}
    return f"{name}: {in_unit(run.metric)}{on}" + (f", ± standard error ({max(seeds)} seeds)" if seeds else "")


def _table(run: Run, rows: Sequence[SummaryRow], width: int | None) -> list[Text]:
    """The lines of the headline table, at most `width` characters long if the names of methods let it."""
    from rich.text import Text

    def cut(names: Sequence[str | None], most: int = MAX_NAME // 2) -> list[str]:
        return [name or EMPTY for name in names] if width is None else _cut_apart(names, most)

    methods, encoders = zip(*(split_row(row.method, run.results) for row in rows), strict=True)
    if any(encoders):  # a column each, which share the width
        names = [Column("method", cut(methods), gap=0, left=True), Column("encoder", cut(encoders))]
    else:
        cut_names = list(methods) if width is None else [_cut(method, MAX_NAME) for method in methods]
        names = [Column("method", cut_names, gap=0, left=True)]

    mean = [with_spread(row.to_json(), row.stderr) for row in rows]
    after = [Column(f"mean{oracle_mark(run.own_rule)}", mean)]
    if beside := beside_rows(run.results, run.own_rule):
        compared = [beside.get(row.method) for row in rows]
        references = reference_names(compared, run.results)
        references = [name and short for name, short in zip(references, cut(references), strict=True)]
        differences = [difference_text(row, run.metric) for row in compared]
        versus = versus_columns(references, differences, "vs").items()
        after += [Column(head, cells, left=i > 0) for i, (head, cells) in enumerate(versus)]
        here = [(row and here_words(row, run.metric)) or EMPTY for row in compared]
        after.append(Column("here", here, left=True))
        if any(row.sets > 1 for row in beside.values()):
            after.append(Column("elsewhere", [row.elsewhere if row else EMPTY for row in compared], left=True))

    room = None if width is None else width - sum(column.gap + column.width for column in (*names, *after))
    columns = [*names, *_domains(run, rows, room), *after]
    lines = [Text("".join(column.text(column.header) for column in columns).rstrip(), style="bold")]
    styles = {"better": "green", "worse": "red", "failed": "red", "skipped": "yellow"}
    for i in range(len(rows)):
        line = Text()
        for column in columns:
            line.append(column.text(column.cells[i]), style=styles.get(column.cells[i].partition(" ")[0], ""))
        line.rstrip()
        lines.append(line)
    return lines


def _domains(run: Run, rows: Sequence[SummaryRow], room: int | None) -> list[Column]:
    """A column per held-out domain, its name cut where it must be; if they need more than `room`, the worst domain."""
    names = list(dict.fromkeys(name for row in run.own_rows for name in row.per_test_domain))
    means = [{name: row.per_test_domain.get(name, {}).get("mean") for name in names} for row in rows]
    full = [Column(name, [number(of_row[name], run.metric) for of_row in means]) for name in names]
    widest = max((column.width for column in full), default=0)
    cuts = ((width, gap) for width in range(widest, MIN_WIDTH - 1, -1) for gap in (GAP, 1))
    for shown in (full, *([Column(_cut(c.header, width), c.cells, gap) for c in full] for width, gap in cuts)):
        fits = room is None or sum(column.gap + column.width for column in shown) <= room
        if fits and (shown is full or len({column.header for column in shown}) == len(names)):
            return shown

    cells, sign = [], 1 if HIGHER_IS_BETTER[run.metric] else -1
    for of_row in means:
        signed = {name: sign * mean for name, mean in of_row.items() if mean is not None}
        name = min(signed, key=lambda name: signed[name], default=None)
        cells.append(EMPTY if name is None else f"{_cut(name, 12)} {number(of_row[name], run.metric)}")
    worst = Column("worst domain", cells)
    return [worst] if room is None or worst.gap + worst.width <= room else []


def _most_important(run: Run, lines: int) -> list[SummaryRow]:
    """The rows that fit in so many lines, in the recipe's order.

    First come the method that validation prefers, the references, and methods with a verdict; then the others.
    """
    rows = run.own_rows
    if len(rows) <= lines:
        return rows
    fitting = max(MIN_METHODS, lines - 1)  # one line says how many there are besides
    beside = beside_rows(run.results, run.own_rule)

    def rank(row: SummaryRow) -> int:
        comparison = beside.get(row.method)
        if row.method == run.chosen:
            return 0
        return (
            1 if comparison is None and row.mean is not None else 2 - (comparison is not None and comparison.is_found)
        )

    kept = {row.method for row in sorted(rows, key=rank)[:fitting]}
    return [row for row in rows if row.method in kept]


def _notes(run: Run, most: int | None) -> list[str]:
    """What went wrong: methods with failed, skipped or missing models, each reason once; at most `most` lines."""
    notes = each_once((row.method, row.reason) for row in run.own_rows)
    fits = run.final_fits.items()
    notes += [f"final fit of {method}: {fit['reason']}" for method, fit in fits if fit["status"] == "failed"]
    if most is not None:
        notes = [_cut(" ".join(note.split()), 2 * 78) for note in notes]
        if len(notes) > most:
            notes = [*notes[: most - 1], f"{plural(len(notes) - most + 1, 'more note')} in results.md"]
    return notes


def _files(run: Run) -> Iterator[tuple[str, str]]:
    """Where the files are, and the next command: (what, text) of each line."""
    if (run.path / PAGE).exists():
        yield "page", str(run.path / PAGE)
    yield "tables", f"{run.path / MARKDOWN} (how to read them: xdm-ft explain)"
    if (run.path / ANALYSIS).exists():  # it is not read: a damaged one must not spoil the last screen of a run
        yield "measures", f"{run.path / ANALYSIS} (what they mean: xdm-ft explain analysis)"
    if run.records:
        yield "models", str(run.path / "models")
    failed = any(entry["status"] == "failed" for entry in run.results["runs"])
    if failed:
        yield "next", "repair the cause and run the same command: only failed models train"
    if run.records and run.own_rule != ORACLE:
        yield "export" if failed else "next", f"xdm-ft export {shlex.quote(str(run.path))} DIR"


def _cut_apart(names: Sequence[str | None], width: int) -> list[str]:
    """Returns the names in at most `width` characters, or more if different names would become equal."""
    full = [name or EMPTY for name in names]
    while len({_cut(name, width) for name in full}) < len({*full}):
        width += 1
    return [_cut(name, width) for name in full]


def _cut(name: str, width: int) -> str:
    """Returns the name in at most `width` characters: its end is replaced by "…"."""
    from rich.cells import set_cell_size

    name = printable(name)
    return name if _length(name) <= width else set_cell_size(name, max(1, width - 1)).rstrip() + "…"


def _length(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(_on_terminal(text))


def _on_terminal(text: str) -> str:
    return encoded(text, sys.stdout.encoding or "utf-8")
