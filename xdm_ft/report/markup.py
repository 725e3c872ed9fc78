"""Sections as Markdown (results.md), as text, and as LaTeX for a paper; tables as HTML for a notebook."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from xdm_ft.report import Section, Table
from xdm_ft.report.headline import details, sentence
from xdm_ft.report.words import encode_text, plain
from xdm_ft.results.run import Run

LEFT_OUT = ("seeds", "draws × gradients", "mixed steps")  # columns for which a page of LaTeX is too narrow,
LEFT_OUT_STARTS = "95% here", "95% elsewhere"  # and those that begin so; results.csv has them
SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\char34{}", "`": r"\textasciigrave{}", "'": r"\textquotesingle{}",
    "[": "{[}", "]": "{]}", "*": "{*}",  # after \\ they would be its arguments
    "±": r"$\pm$", "×": r"$\times$", "√": r"$\surd$", "α": r"$\alpha$", "−": "$-$",
    "–": r"\textendash{}", "—": r"\textemdash{}", "…": r"\ldots{}", "→": r"$\rightarrow$",
}  # fmt: skip
MIN_WIDTH, MAX_WIDTH = 100, 120  # characters, of text for a file or pipe; columns beyond it stand in a block below
UNBOUNDED = 1 << 16
PREAMBLE = r"% needs \usepackage{booktabs}"
NOTEBOOK = """<p><strong>{{ title|plain }}</strong></p>
{%- for table in tables %}
<table>
{%- if table.caption %}<caption>{{ table.caption|plain }}</caption>{% endif %}
{%- if table.header %}
<thead><tr>{% for name in table.header %}<th>{{ name|plain }}</th>{% endfor %}</tr></thead>{% endif %}
<tbody>
{%- for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell.text|plain }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table>
{%- endfor %}
"""
FONTS = "% has names beyond ASCII: use LuaLaTeX or XeLaTeX, and a font that has their characters"


def markdown(run: Run, sections: Iterable[Section]) -> str:
    """Returns the text of results.md: the finding with its details, and of these sections those that have a table."""
    name, finding = escape_markdown(run.recipe.name), escape_markdown(sentence(run))
    lines = markdown_lines(section for section in sections if section.tables)
    more = [escape_markdown(text), ""] if (text := details(run)) else []
    return "\n".join([f"# {name}", "", f"**{finding}**", "", *more, *lines])


def markdown_lines(sections: Iterable[Section]) -> Iterator[str]:
    """Yields the lines of sections: headings, tables and notes, without figures."""

    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(map(escape_markdown, cells)) + " |"

    for section in sections:
        yield from (f"## {escape_markdown(section.title)}", "", escape_markdown(section.about), "")
        for table in section.tables:
            yield from (f"**{escape_markdown(table.caption)}**", "", row(table.header))
            yield "|" + "---|" * table.labels + "---:|" * (len(table.header) - table.labels)
            yield from (row(f"{cell.text} {cell.note}".rstrip() for cell in cells) for cells in table.rows)
            yield ""
        if section.notes:
            yield from (*(f"- {escape_markdown(note)}" for note in section.notes), "")


def escape_markdown(text: str) -> str:
    """Escapes what Markdown would interpret. An underscore between letters or digits has no meaning there and stays."""
    return re.sub(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])", lambda m: "\\" + m[0], plain(text))


def latex(sections: Iterable[Section]) -> str:
    """Returns the tables as LaTeX, to be read by \\input: each table is a float of its own.

    Its caption is one sentence. Comments above it have its protocol and notes, and say how to read it.
    """
    lines: list[str] = []
    tables = [(section, table, i) for section in sections for i, table in enumerate(section.tables, 1)]
    for of, table, number in tables:
        titles = enumerate(table.header)
        columns = [i for i, title in titles if title not in LEFT_OUT and not title.startswith(LEFT_OUT_STARTS)]

        def row(cells: Sequence[str], columns: Sequence[int] = columns) -> str:
            return "    " + " & ".join(escape_latex(cells[i]) for i in columns) + r" \\"

        caption = of.caption or table.caption
        if not of.caption and not caption.startswith(of.title):
            caption = f"{of.title}: {caption[:1].lower()}{caption[1:]}"
        lines += [
            *(f"% {plain(text)}" for text in (of.about, table.caption, *of.notes)),
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escape_latex(caption)}}}",
            rf"  \label{{tab:xdm-ft-{of.id}{f'-{number}' if number > 1 else ''}}}",
            rf"  \begin{{tabular}}{{{''.join('l' if i < table.labels else 'r' for i in columns)}}}",
            r"    \toprule",
            row(table.header),
            r"    \midrule",
            *(row([cell.text for cell in cells]) for cells in table.rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    text = "\n".join(lines)
    is_ascii = all(line.isascii() for line in lines if not line.startswith("%"))
    return "\n".join([PREAMBLE, *([] if is_ascii else [FONTS]), text])


def escape_latex(text: str) -> str:
    """Returns the text so that LaTeX prints it. The minus sign of a number is a minus, not a hyphen."""
    minus = re.sub(r"(?<![^\s(])-(?=\d)", "−", plain(text))
    escaped = "".join(SIGNS.get(sign, sign) for sign in minus)
    return re.sub("-(?=-)", "-{}", escaped)  # two hyphens would become a dash


def as_text(sections: Iterable[Section], out: TextIO) -> str:
    """Returns the tables as text for `out`, in blocks of columns that fit; with colours if that is a terminal."""
    from rich.console import Console, Group
    from rich.text import Text

    console, encoding = Console(file=out), out.encoding or "utf-8"
    if isinstance(out, io.StringIO):  # FORCE_COLOR is about terminals
        console = Console(file=out, force_terminal=False, color_system=None)
    parts: list[Any] = []
    for section in sections:
        parts += [Text(encode_text(section.title, encoding), style="bold")]
        parts += [Text(encode_text(section.about, encoding), style="dim")]
        for table in section.tables:
            parts += [Text(encode_text(table.caption, encoding), style="dim")]
            parts += _blocks(table, encoding, console.width if console.is_terminal else MAX_WIDTH)
        parts += [*(Text(encode_text(note, encoding)) for note in section.notes), Text()]
    if not console.is_terminal:  # rich assumes 80 columns there and would fold the cells
        unbounded = console.options.update(width=UNBOUNDED)
        widths = [console.measure(part, options=unbounded).maximum for part in parts if not isinstance(part, Text)]
        console.width = max([MIN_WIDTH, *widths])
    with console.capture() as captured:
        console.print(Group(*parts))
    return captured.get()


def _blocks(table: Table, encoding: str, width: int) -> Iterator[Any]:
    """Yields the columns as rich's tables that fit `width`; each begins with those of labels."""
    import rich.table
    from rich.cells import cell_len
    from rich.text import Text

    lines = [table.header, *([cell.text for cell in row] for row in table.rows)]
    header, *rows = [[encode_text(text, encoding) for text in line] for line in lines]
    border = 3  # characters per column: two spaces and a line
    needed = [max(map(cell_len, column)) + border for column in zip(header, *rows, strict=True)]
    labels = list(range(table.labels))
    blocks = [labels]
    for i in range(table.labels, len(needed)):
        if len(blocks[-1]) > len(labels) and sum(needed[j] for j in (*blocks[-1], i)) + 1 > width:
            blocks.append(labels)
        blocks[-1] = [*blocks[-1], i]
    for columns in blocks:
        block = rich.table.Table()
        for i in columns:
            block.add_column(Text(header[i]), justify="left" if i < table.labels else "right", overflow="fold")
        for row in rows:
            block.add_row(*(Text(row[i]) for i in columns))
        yield block


def notebook_html(title: str, tables: Sequence[Table]) -> str:
    """Returns the title and the tables as a notebook shows them."""
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters["plain"] = plain
    return environment.from_string(NOTEBOOK).render(title=title, tables=tables)
