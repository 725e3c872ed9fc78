"""Tables as text for a terminal or a file, and the last screen of a run: its table in short, and what to do next.

On a terminal the last screen fits the terminal's size: domains, methods and notes that find no room are in results.md.
Output to a file or pipe has every method and domain.
"""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import SummaryRow
from xdm_ft.evaluation.verdicts import Comparison
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
    from rich.console import RenderableType
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
    parts: list[RenderableType] = []
    for section in sections:
        parts += [Text(encoded(section.title, encoding), style="bold")]
        parts += [Text(encoded(section.about, encoding), style="dim")]
        for table in section.tables:
            parts += [Text(encoded(table.caption, encoding), style="dim")]
            parts += _blocks(table, encoding, console.width if console.is_terminal else None)
        parts += [*(Text(encoded(note, encoding)) for note in section.notes), Text()]
    if not console.is_terminal:  # rich assumes 80 columns there and would fold the cells
        unbounded = console.options.update(width=UNBOUNDED)
        widths = [console.measure(part, options=unbounded).maximum for part in parts if not isinstance(part, Text)]
        console.width = max([MINIMUM_WIDTH, *widths])
    with console.capture() as captured:
        console.print(Group(*parts))
    return captured.get()


def _blocks(table: Table, encoding: str, width: int | None) -> list[Any]:
    """Returns the columns as rich's tables that fit `width` (None: one table); each begins with those of labels."""
    import rich.table
    from rich.cells import cell_len
    from rich.text import Text

    rows = [[encoded(cell.text, encoding) for cell in row] for row in table.rows]
    header = [encoded(title, encoding) for title in table.header]
    border = 3  # characters per column: two spaces and a line
    needed = [max(map(cell_len, column)) + border for column in zip(header, *rows, strict=True)]
    labels = list(range(table.labels))
    start = sum(needed[: table.labels]) + 1
    blocks, used = [labels[:]], start
    for i in range(table.labels, len(needed)):
        if width is not None and len(blocks[-1]) > len(labels) and used + needed[i] > width:
            blocks, used = [*blocks, labels[:]], start
        blocks[-1].append(i)
        used += needed[i]
    made = []
    for columns in blocks:
        block = rich.table.Table()
        for i in columns:
            block.add_column(Text(header[i]), justify="left" if i < table.labels else "right", overflow="fold")
        for row in rows:
            block.add_row(*(Text(row[i]) for i in columns))
        made.append(block)
    return made


def encoded(text: str, encoding: str) -> str:
    """Returns `plain` of the text, with escapes for characters that the encoding lacks."""
    return plain(text).encode(encoding, "backslashreplace").decode(encoding)


# ------------------------------------------------------------------------------------------------------ the last screen


class Column(NamedTuple):
    header: str
    cells: list[str]
    gap: int = GAP  # spaces before it
    left: bool = False  # whether the cells are aligned left

    @property
    def width(self) -> int:
        return max(map(_length, (self.header, *self.cells)))

    @property
    def needed(self) -> int:
        return self.gap + self.width

    def line(self, cell: str) -> str:
        text = _on_terminal(cell)
        fill = " " * (self.width - _length(text))
        return " " * self.gap + (text + fill if self.left else fill + text)


def show_headline(run: Run) -> None:
    """Prints the last screen to standard output. Colours follow rich: only on a terminal, not if NO_COLOR is set."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    room = None
    if console.is_terminal:
        room = console.size
    else:
        console.width = UNBOUNDED  # rich assumes 80 columns there and would fold the text
    above = [Text(_on_terminal(_title(run)), style="bold")]
    finds = what_it_finds(run.results, run.own_rule, run.metric)
    below = [Text(_on_terminal(line), style="dim") for line in finds] + [Text(), Text(_on_terminal(sentence(run)))]
    below += [Text(_on_terminal(note), style="yellow") for note in _notes(run, MAX_NOTES if room else None)]
    below += [Text(), *(_line(what, text) for what, text in _files(run))]
    shown = run.own_rows
    if room is not None:
        used = sum(len(console.render_lines(part, pad=False)) for part in (*above, *below)) + PROMPT
        shown = _most_important(run, room.height - used - 1)  # 1: the header
    table = _table(run, shown, None if room is None else room.width)
    hidden = len(run.own_rows) - len(shown)
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
    """The lines of the headline table, at most `width` characters long if the names of methods let it; [] if empty."""
    from rich.text import Text

    if not rows:
        return []
    mark = oracle_mark(run.own_rule)
    name, *more = _names(run, rows, width is None)
    rest = [Column(f"mean{mark}", [with_spread(row.to_json(), row.stderr) for row in rows])]
    if beside := beside_rows(run.results, run.own_rule):
        shown = [beside.get(row.method) for row in rows]
        rest += _versus(run, shown, width is None)
        rest += [Column("here", [(one and here_words(one, run.metric)) or EMPTY for one in shown], left=True)]
        if any(one.sets > 1 for one in beside.values()):
            rest += [Column("elsewhere", [one.elsewhere if one else EMPTY for one in shown], left=True)]
    room = None if width is None else width - sum(column.needed for column in (name, *more, *rest))
    columns = [name, *more, *_domains(run, rows, room), *rest]
    lines = [Text("".join(column.line(column.header) for column in columns).rstrip(), style="bold")]
    for i in range(len(rows)):
        line = Text()
        for column in columns:
            line.append(column.line(column.cells[i]), style=_style(column.cells[i]))
        line.rstrip()
        lines.append(line)
    return lines


def _names(run: Run, rows: Sequence[SummaryRow], whole: bool) -> list[Column]:
    """The names of the rows; with several encoders, methods and encoders have a column each and share the width."""
    methods, encoders = zip(*(split_row(row.method, run.results) for row in rows), strict=True)
    if not any(encoders):
        return [Column("method", [name if whole else _cut(name, MAX_NAME) for name in methods], gap=0, left=True)]
    return [
        Column("method", list(methods) if whole else _cut_apart(methods, MAX_NAME // 2), gap=0, left=True),
        Column("encoder", [one or EMPTY for one in encoders] if whole else _cut_apart(encoders, MAX_NAME // 2)),
    ]


def _versus(run: Run, rows: Sequence[Comparison | None], whole: bool) -> list[Column]:
    """The differences, and what they are to: in the header, or in a column where rows differ in it."""
    names = reference_names(rows, run.results)
    if not whole:
        short = _cut_apart(names, MAX_NAME // 2)
        names = [name and cut for name, cut in zip(names, short, strict=True)]
    columns = versus_columns(names, [difference_text(row, run.metric) for row in rows], "vs").items()
    return [Column(head, list(cells), left=place > 0) for place, (head, cells) in enumerate(columns)]


def _cut_apart(names: Sequence[str | None], width: int) -> list[str]:
    """Returns the names in at most `width` characters, or more if different names would become equal."""
    known = [name or EMPTY for name in names]
    while len({_cut(name, width) for name in known}) < len({*known}):
        width += 1
    return [_cut(name, width) for name in known]


def _style(cell: str) -> str:
    first = cell.partition(" ")[0]
    return {"better": "green", "worse": "red", "failed": "red", "skipped": "yellow"}.get(first, "")


def _domains(run: Run, rows: Sequence[SummaryRow], room: int | None) -> list[Column]:
    """A column per held-out domain, its name cut where it must be; if they need more than `room`, the worst domain."""
    names = list(dict.fromkeys(name for row in run.own_rows for name in row.per_test_domain))
    cells = {
        name: [number(row.per_test_domain.get(name, {}).get("mean"), run.metric) for row in rows] for name in names
    }
    full = [Column(name, cells[name]) for name in names]
    if room is None or sum(column.needed for column in full) <= room:
        return full
    widest = max((column.width for column in full), default=0)
    for width, gap in ((width, gap) for width in range(widest, MIN_WIDTH - 1, -1) for gap in (GAP, 1)):
        short = [Column(_cut(name, width), cells[name], gap) for name in names]
        if sum(column.needed for column in short) <= room and len({column.header for column in short}) == len(names):
            return short
    worst = Column("worst domain", [_worst(run, row) for row in rows])
    return [worst] if worst.needed <= room else []


def _worst(run: Run, row: SummaryRow) -> str:
    sign = 1 if HIGHER_IS_BETTER[run.metric] else -1
    means = {name: values["mean"] for name, values in row.per_test_domain.items()}
    known = {name: sign * mean for name, mean in means.items() if mean is not None}
    if not known:
        return EMPTY
    name = min(known, key=lambda name: known[name])
    return f"{_cut(name, 12)} {number(means[name], run.metric)}"


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
        compared = beside.get(row.method)
        if row.method == run.chosen:
            return 0
        return 1 if compared is None and row.mean is not None else 2 - (compared is not None and compared.is_found)

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


def _files(run: Run) -> list[tuple[str, str]]:
    """Where the files are, and the next command: (what, text) of each line."""
    lines = [("tables", f"{run.path / MARKDOWN} (how to read them: xdm-ft explain)")]
    if (run.path / PAGE).exists():
        lines = [("page", str(run.path / PAGE)), *lines]
    if (run.path / ANALYSIS).exists():  # it is not read: a damaged one must not spoil the last screen of a run
        lines += [("measures", f"{run.path / ANALYSIS} (what they mean: xdm-ft explain analysis)")]
    if run.records:
        lines += [("models", str(run.path / "models"))]
    failed = any(entry["status"] == "failed" for entry in run.results["runs"])
    if failed:
        lines += [("next", "repair the cause and run the same command: only failed models train")]
    if run.records and run.own_rule != ORACLE:
        lines += [("export" if failed else "next", f"xdm-ft export {shlex.quote(str(run.path))} DIR")]
    return lines


def _line(what: str, text: str) -> Text:
    from rich.text import Text

    return Text(f"{what:<8} ", style="dim").append(_on_terminal(text), style="not dim")


def _length(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(_on_terminal(text))


def _cut(name: str, width: int) -> str:
    """Returns the name in at most `width` characters: its end is replaced by "…"."""
    from rich.cells import set_cell_size

    name = printable(name)
    return name if _length(name) <= width else set_cell_size(name, max(1, width - 1)).rstrip() + "…"


def _on_terminal(text: str) -> str:
    return encoded(text, sys.stdout.encoding or "utf-8")
