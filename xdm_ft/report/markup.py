"""Sections as Markdown, which results.md is made of, and their tables as LaTeX with booktabs, for a paper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from xdm_ft.report.finished import Run
from xdm_ft.report.section import Section
from xdm_ft.report.sentence import sentence
from xdm_ft.report.words import plain

LEFT_OUT = ("seeds", "draws × gradients", "mixed steps")  # columns for which a page of LaTeX is too narrow,
LEFT_OUT_START = "95% "  # and those that begin so; results.csv has them
SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\char34{}", "`": r"\textasciigrave{}", "'": r"\textquotesingle{}",
    "[": "{[}", "]": "{]}", "*": "{*}",  # after \\ they would be its arguments
    "±": r"$\pm$", "×": r"$\times$", "√": r"$\surd$", "α": r"$\alpha$", "−": "$-$",
    "–": r"\textendash{}", "—": r"\textemdash{}", "…": r"\ldots{}", "→": r"$\rightarrow$",
}  # fmt: skip
PREAMBLE = r"% needs \usepackage{booktabs}"
FONTS = "% has names beyond ASCII: use LuaLaTeX or XeLaTeX, and a font that has their characters"


def markdown(run: Run, sections: Iterable[Section]) -> str:
    """Returns the text of results.md: the finding, and of these sections those that have a table."""
    start = [
        f"# {escape_markdown(str(run.results['recipe']['name']))}",
        "",
        f"**{escape_markdown(sentence(run))}**",
        "",
    ]
    return "\n".join([*start, *markdown_lines(section for section in sections if section.tables)])


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
    """Returns the tables as LaTeX, to be read by \\input: each table is a float of its own."""
    lines: list[str] = []
    for section, table in [(one, table) for one in sections for table in one.tables]:
        columns = [
            i for i, name in enumerate(table.header) if name not in LEFT_OUT and not name.startswith(LEFT_OUT_START)
        ]

        def row(cells: Sequence[str], columns: Sequence[int] = columns) -> str:
            return "    " + " & ".join(escape_latex(cells[i]) for i in columns) + r" \\"

        sentences = (section.title, section.about, table.caption, *section.notes)
        caption = ". ".join(text.removesuffix(".") for text in sentences)
        lines += [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escape_latex(f'{caption}.')}}}",
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
    return "\n".join([PREAMBLE, *([] if text.isascii() else [FONTS]), text])


def escape_latex(text: str) -> str:
    """Returns the text so that LaTeX prints it. The minus sign of a number is a minus, not a hyphen."""
    minus = re.sub(r"(?<![^\s(])-(?=\d)", "−", plain(text))
    escaped = "".join(SIGNS.get(sign, sign) for sign in minus)
    return re.sub("-(?=-)", "-{}", escaped)  # two hyphens would become a dash
