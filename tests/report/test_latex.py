"""Tables as LaTeX: whatever names hold, it is text there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from example_runs import results_of, run_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_more_tables import two_sets

from xdm_ft.report.latex import escape, latex
from xdm_ft.report.markdown import tables_of
from xdm_ft.report.table_rows import ResultTable

HOSTILE = [
    "\\end{tabular}", "\\input{/etc/passwd}", "$x$", "a & b", "#1", "100%", "a_b", "^^5c", "~",
    "<script>alert(1)</script>", "|", '"q"', "`` ''", "[x]", "*", "a--b", "-1.3 to -0.2", "\\\\", "}", "{",
    "line\nbreak", "\x1b[31m", "%\n", "± × √ α − – — … →",
]  # fmt: skip
SPECIAL = re.compile(r"\\(?:textbackslash|textasciicircum|textasciitilde|textless|textgreater|textbar|textquotesingle|"
                     r"textasciigrave|textendash|textemdash|ldots|char34)\{\}|\\[{}$&#%_]|\{[\[\]*]\}|-\{\}|"
                     r"\$(?:\\pm|\\times|\\surd|\\alpha|\\rightarrow|-)\$")  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text() | st.lists(st.sampled_from([*HOSTILE, *"\\{}$&#%_^~"])).map("".join))
@example("".join(HOSTILE))
def test_nothing_in_a_name_is_a_command(name: str) -> None:
    assert not set(SPECIAL.sub("", escape(name))) & set('\\{}$&#%_^~<>|"`[]*\n')


def test_text_and_numbers() -> None:
    assert escape("sam_wide 5%") == r"sam\_wide 5\%"
    assert escape("-1.3 to -0.2") == "$-$1.3 to $-$0.2" and escape("ViT-16") == "ViT-16"
    assert escape("58.0 ± 1.0") == r"58.0 $\pm$ 1.0" and escape("–") == r"\textendash{}"
    assert escape("a--b") == "a-{}-b" and escape("\u202eabc") == r"\textbackslash{}u202eabc"


def test_a_table() -> None:
    text = latex(tables_of(run_of(results_of(two_sets()))))
    first, second, third = re.findall(r"\\begin\{table\}.*?\\end\{table\}", text, re.DOTALL)
    assert r"\begin{tabular}{lrrrrrrrr}" in first and r"\toprule" in first and r"\bottomrule" in first
    header, erm, mixed = [line.strip() for line in first.splitlines() if line.endswith(r"\\")]
    assert (
        header
        == r"method & a & b & mean $\pm$ stderr & versus erm & p here (Holm) & here & p elsewhere (Holm) & elsewhere \\"
    )
    assert erm.startswith(r"erm & 70.0 & 40.0 & 55.0 $\pm$ 0.0 & \textendash{}")
    assert mixed.startswith(r"xdomainmix & 80.0 & 50.0 & 65.0 $\pm$ 0.0 & +10.0 &") and mixed.endswith(
        r" no verdict & \textendash{} & unknown \\"
    )
    assert "caption{selection: train\\_val (the recipe" in first and "Other metrics" in second and "Cost" in third
    assert text.startswith("% needs \\usepackage{booktabs}\n") and "LuaLaTeX" not in text
    assert "LuaLaTeX" in latex([ResultTable("大", (), ("method",), (("erm",),))])


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX")
def test_it_compiles(tmp_path: Path) -> None:
    rows = tuple((name, name) for name in HOSTILE)
    table = ResultTable(" ".join(HOSTILE), rows, ("method", HOSTILE[0]), rows, rows)
    lines = [r"\documentclass{article}", *(rf"\def\{rule}rule{{\hline}}" for rule in ("top", "mid", "bottom"))]
    text = "\n".join([*lines, r"\begin{document}", latex([table]), r"\end{document}", ""])
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:]
