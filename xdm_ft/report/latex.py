"""Tables as LaTeX with booktabs, for a paper: each table is a float of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from xdm_ft.report.section import Section, Table
from xdm_ft.report.words import plain

LEFT_OUT = ("seeds", "draws × gradients", "mixed steps")  # columns for which a page is too narrow,
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


def latex(sections: Iterable[Section]) -> str:
    """Returns the tables as LaTeX, to be read by \\input."""
    text = "\n".join(_float(section, table) for section in sections for table in section.tables)
    return "\n".join([PREAMBLE, *([] if text.isascii() else [FONTS]), text])


def escape(text: str) -> str:
    """Returns the text so that LaTeX prints it. The minus sign of a number is a minus, not a hyphen."""
    minus = re.sub(r"(?<![^\s(])-(?=\d)", "−", plain(text))
    escaped = "".join(SIGNS.get(sign, sign) for sign in minus)
    return re.sub("-(?=-)", "-{}", escaped)  # two hyphens would become a dash


def _float(section: Section, table: Table) -> str:
    columns = [i for i, name in enumerate(table.header) if name not in LEFT_OUT and not name.startswith(LEFT_OUT_START)]
    caption = ". ".join(
        text.removesuffix(".") for text in (section.title, section.about, table.caption, *section.notes)
    )

    def row(cells: Sequence[str]) -> str:
        return "    " + " & ".join(escape(cells[i]) for i in columns) + r" \\"

    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape(f'{caption}.')}}}",
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
    return "\n".join(lines)
