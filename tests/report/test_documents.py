"""Golden documents of the three runs, and names that must stay text in each kind of document."""

from __future__ import annotations

import copy
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_runs import comparison, run_of
from hypothesis import example as example_of
from hypothesis import given, settings
from hypothesis import strategies as st

from xdm_ft.report.finished import Run
from xdm_ft.report.manual import _NEEDS, MANUAL, how_to_read
from xdm_ft.report.markup import escape_latex, latex, markdown
from xdm_ft.report.section import Section, Table, cells
from xdm_ft.report.sections import brief_sections, sections, table_sections
from xdm_ft.report.text import as_text, show_headline
from xdm_ft.runtime.terminal import write

GOLDEN = Path(__file__).parent / "golden"


def figures(run: Run) -> str:
    """What figures say to those who do not see them."""
    shown = [figure for section in sections(run) for figure in section.figures]
    return "".join(f"{figure.name}\n  {figure.alt}\n  {figure.caption}\n" for figure in shown)


DOCUMENTS: dict[str, Callable[[Run], str]] = {
    "md": lambda run: (
        markdown(run, sections(run)) if run.path.name != "example" else markdown(run, brief_sections(run))
    ),
    "figures.txt": figures,
    "tex": lambda run: latex(table_sections(run, run.rules)),
    "txt": lambda run: as_text(table_sections(run, run.rules), io.StringIO()),
}


@pytest.mark.parametrize(
    "name",
    ["example.md", "example.tex", "example.txt", "run.md", "run.figures.txt", "searched.md",
     "searched.figures.txt"],
)  # fmt: skip
def test_golden_documents(name: str, request: pytest.FixtureRequest) -> None:
    """Every number, note, caption and order. XDM_FT_GOLDEN=write writes the files, which the change shows then."""
    run, _, kind = name.partition(".")
    text = DOCUMENTS[kind](request.getfixturevalue(run))
    if os.environ.get("XDM_FT_GOLDEN") == "write":
        (GOLDEN / name).write_text(text, encoding="utf-8", newline="")
    assert text == (GOLDEN / name).read_bytes().decode()


def document(results: dict[str, Any]) -> str:
    run = run_of(results)
    return markdown(run, brief_sections(run))


def table(results: dict[str, Any], id_: str, number: int = 0) -> list[list[str]]:
    """The header and the rows of a table."""
    run = run_of(results)
    [shown] = [section.tables[number] for section in table_sections(run, run.rules) if section.id == id_]
    return [list(shown.header), *([cell.text for cell in row] for row in shown.rows)]


def printed(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What a terminal shows, without colours."""
    run = run_of(results)
    write(as_text(table_sections(run, run.rules), sys.stdout))
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def test_the_oracle_is_marked_wherever_it_shows(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = "selection: oracle — CHEATING: the step was picked on test-domain images; not a result"
    before, after = document(results).split(f"## Results, {mark}")
    assert before.count("oracle") == 0 and "| method (oracle) | art | sketch | mean ± stderr (oracle) |" in after
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("NO_COLOR", "1"), ("COLUMNS", "90")):
        monkeypatch.setenv(name, value)
    before, after = printed(results, capsys).split("selection: oracle — CHEATING", 1)
    headers = [line for line in after.splitlines() if "method" in line and line.startswith("┃")]
    assert len(headers) > 1  # every block of columns says it
    assert all("method (oracle)" in line for line in headers) and "oracle" not in before
    results["summary"].reverse()
    for own, other in (("train_val", "oracle"), ("oracle", "train_val")):
        results["recipe"]["protocol"] = {"selection": own}
        headings = re.findall(r"^## Results, selection: (\w+)", document(results), re.MULTILINE)
        assert headings == [own, other], "the recipe's own rule comes first"
    assert "the recipe's rule" not in document(results) and table(results, "metrics")[0][0] == "method (oracle)"


@pytest.mark.parametrize("key", ["protocol", "metric", "split", "spread_as_published"])
def test_no_column_mixes_what_differs(results: dict[str, Any], key: str) -> None:
    results["summary"] = results["summary"][:5]
    other = {"metric": "nll", "spread_as_published": {"kind": "of WILDS", "value": 0.01}}.get(key, "another")
    results["summary"][1][key] = other
    assert [row[0] for row in table(results, "results", 1)[1:]] == ["erm"]
    assert len(table(results, "results")[1:]) == 4


def test_losses_are_no_percentages_and_nothing_may_be_trained(results: dict[str, Any]) -> None:
    for row in results["summary"]:
        row["metric"] = "nll"
    assert [row[3] for row in table(results, "results") if row[0] == "erm"] == ["0.510 ± 0.010"]
    assert "| numbers | NLL on test images" in document(results)
    results["summary"] = results["runs"] = []
    assert "No model has been trained yet." in document(results)


def test_names_are_text(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    evil = copy.deepcopy(results)
    for row in evil["summary"]:
        row["per_test_domain"] = {"\x1b[31m<b>|*x*": row["per_test_domain"].get("art", {"mean": None, "std": None})}
        row["protocol"] = "data\n\n# not a title [link](x) [red]no markup[/red]"
    text = document(evil)
    assert "\x1b" not in text and "\n# not a title" not in text and text.startswith("# pets\\_\\*demo\\*\n")
    assert "| method | \\\\x1b\\[31m\\<b\\>\\|\\*x\\* |" in text
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.replace("\\|", "").count("|") for line in lines.splitlines()}) == 1
    shown = printed(evil, capsys)
    assert "\x1b" not in shown and "[red]no markup[/red]" in shown


def test_tables_fit_what_they_are_printed_to(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a domain with the long name {i}" for i in range(8)]
    wide = copy.deepcopy(results)
    for row in wide["summary"]:
        row["per_test_domain"] = {name: {"mean": 0.1371, "std": None} for name in names}
    piped = printed(wide, capsys)
    header = next(line for line in piped.splitlines() if line.startswith("┃ method"))
    assert all(name in header for name in names) and piped.count("13.7 │") == 2 * 5 * 8 and "…" not in piped
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    for width in (50, 80, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = printed(results, capsys).splitlines()
        assert max(len(line) for line in lines) <= width
        titles = "".join(line for line in lines if line.startswith("┃"))
        assert titles.count("draws × gradients") == titles.count("p elsewhere (Holm)") == 2
        assert len([line for line in lines if line.startswith("┃ method")]) > (20 if width == 50 else 4)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.delenv("FORCE_COLOR")
    run = run_of(results)
    write(as_text(table_sections(run, run.rules), sys.stdout))
    show_headline(run)
    sys.stdout.flush()
    assert written.getvalue().count(rb"58.0 \xb1 1.0") == 6


def test_only_what_the_tables_need_is_explained(results: dict[str, Any]) -> None:
    every = {word for words in MANUAL.values() for word in words}
    assert set(_NEEDS) <= {*MANUAL, *every} and len(_NEEDS) > 8
    whole = how_to_read(results)
    assert next(iter(whole)) == "numbers" and whole["oracle"] == MANUAL["selection"]["oracle"]
    assert every - set(whole) == {
        "val_domain", "cross_domain", "selected hyper-parameters", "published numbers", "at the edge of its range",
        "trained parameters", "peak memory", "METHOD @ ENCODER", "first − second", "ms per image", "features on disk",
        "equal within", "look",
        *MANUAL["analysis"],
    }  # fmt: skip
    results["summary"] = [row for row in results["summary"] if row["method"] == "erm" and row["selection"] != "oracle"]
    results["runs"] = [run | {"trial": 1} for run in results["runs"] if run["method"] == "erm"]
    results["recipe"] |= {"report": {"margin": 1.0}}
    results |= {"comparisons": [], "looks": [{}, {}]}
    less = set(how_to_read(results))
    assert less & {"selected hyper-parameters", "at the edge of its range"} and "mean ±" in less
    gone = {*MANUAL["comparison"], *MANUAL["verdict"], "oracle", "mixed steps", "failed, skipped"}
    assert len(gone) > 10 and not less & gone
    results["comparisons"] = [comparison("sam").to_json()]
    assert {"equal within", "look", "95% here", "no verdict"} <= set(how_to_read(results))
    results["summary"] = []
    assert how_to_read(results) == {}


# --------------------------------------------------------------------------------------------------------------- LaTeX

HOSTILE = [
    "\\end{tabular}", "\\input{/etc/passwd}", "$x$", "a & b", "#1", "100%", "a_b", "^^5c", "~",
    "<script>alert(1)</script>", "|", '"q"', "`` ''", "[x]", "*", "a--b", "-1.3 to -0.2", "\\\\", "}", "{",
    "line\nbreak", "\x1b[31m", "%\n", "± × √ α − – — … →",
]  # fmt: skip
SPECIAL = re.compile(r"\\(?:textbackslash|textasciicircum|textasciitilde|textless|textgreater|textbar|textquotesingle|"
                     r"textasciigrave|textendash|textemdash|ldots|char34)\{\}|\\[{}$&#%_]|\{[\[\]*]\}|-\{\}|"
                     r"\$(?:\\pm|\\times|\\surd|\\alpha|\\rightarrow|-)\$")  # fmt: skip


@settings(max_examples=60)
@given(st.text() | st.lists(st.sampled_from([*HOSTILE, *"\\{}$&#%_^~"])).map("".join))
@example_of("".join(HOSTILE))
def test_nothing_in_a_name_is_a_command(name: str) -> None:
    assert not set(SPECIAL.sub("", escape_latex(name))) & set('\\{}$&#%_^~<>|"`[]*\n')


def test_text_and_numbers() -> None:
    pairs = {
        "sam_wide 5%": r"sam\_wide 5\%", "-1.3 to -0.2": "$-$1.3 to $-$0.2", "ViT-16": "ViT-16",
        "58.0 ± 1.0": r"58.0 $\pm$ 1.0", "–": r"\textendash{}", "a--b": "a-{}-b",
        "\u202eabc": r"\textbackslash{}u202eabc",
    }  # fmt: skip
    assert {text: escape_latex(text) for text in pairs} == pairs


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX")
def test_it_compiles(tmp_path: Path) -> None:
    every = " ".join(HOSTILE)
    rows = [cells(name, name) for name in HOSTILE]
    section = Section("id", every, every, tables=[Table(every, ("method", HOSTILE[0]), rows)], notes=HOSTILE)
    lines = [r"\documentclass{article}", *(rf"\def\{rule}rule{{\hline}}" for rule in ("top", "mid", "bottom"))]
    text = "\n".join([*lines, r"\begin{document}", latex([section]), r"\end{document}", ""])
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:]
