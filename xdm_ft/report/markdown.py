"""results.md: the finding as a sentence, and the tables of every section."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, Table
from xdm_ft.report.sentence import sentence
from xdm_ft.report.words import plain


def markdown(run: Run, sections: Iterable[Section]) -> str:
    """Returns the text of results.md: of these sections those that have a table."""
    start = [f"# {escape(str(run.results['recipe']['name']))}", "", f"**{escape(sentence(run))}**", ""]
    return "\n".join([*start, *markdown_lines(one for one in sections if one.tables)])


def markdown_lines(sections: Iterable[Section]) -> Iterator[str]:
    """Yields the lines of sections: headings, tables and notes, without figures."""
    for section in sections:
        yield from (f"## {escape(section.title)}", "", escape(section.about), "")
        for table in section.tables:
            yield from _lines_of(table)
        if section.notes:
            yield from (*(f"- {escape(note)}" for note in section.notes), "")


def _lines_of(table: Table) -> Iterator[str]:
    yield from (f"**{escape(table.caption)}**", "", _row(table.header))
    yield "|" + "---|" * table.labels + "---:|" * (len(table.header) - table.labels)
    yield from (_row(map(_text, row)) for row in table.rows)
    yield ""


def _text(cell: Cell) -> str:
    return f"{cell.text} {cell.note}".rstrip()


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(escape, cells)) + " |"


def escape(text: str) -> str:
    """Escapes what Markdown would interpret. An underscore between letters or digits has no meaning there and stays."""
    return re.sub(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])", lambda m: "\\" + m[0], plain(text))
