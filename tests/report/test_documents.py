from __future__ import annotations

import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_runs import comparison, run_of, with_comparisons
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xdm_ft.evaluation.verdicts import PValue
from xdm_ft.report.latex import escape, latex
from xdm_ft.report.manual import _NEEDS, MANUAL, how_to_read
from xdm_ft.report.markdown import markdown
from xdm_ft.report.section import Section, Table, texts
from xdm_ft.report.sections import brief_sections, table_sections
from xdm_ft.report.text import as_text
from xdm_ft.runtime.terminal import write

EXAMPLE = Path(__file__).parent / "results_example.json"


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(EXAMPLE.read_text(encoding="utf-8"))


def document(results: dict[str, Any]) -> str:
    run = run_of(results)
    return markdown(run, brief_sections(run))


def table(results: dict[str, Any], id_: str, number: int = 0) -> list[list[str]]:
    """The header and the rows of a table."""
    run = run_of(results)
    [shown] = [section.tables[number] for section in table_sections(run, run.rules) if section.id == id_]
    return [list(shown.header), *([cell.text for cell in row] for row in shown.rows)]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown document, each a list of rows of cells; escaped bars do not divide."""
    found: list[list[list[str]]] = []
    previous = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                found.append([])
            cells = line.replace("\\|", "\0").strip("|").split("|")
            found[-1].append([cell.strip().replace("\0", "|") for cell in cells])
        previous = line
    assert found
    return found


def printed(results: dict[str, Any]) -> None:
    run = run_of(results)
    write(as_text(table_sections(run, run.rules), sys.stdout))


GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["results.md", "tables.tex", "tables.txt"])
def test_the_documents_of_an_example(results: dict[str, Any], name: str) -> None:
    """Every number in the order of the recipe, each note, and hostile names. XDM_FT_GOLDEN=write writes the files."""
    rows = [
        comparison("xdomainmix", "erm", 0.07, "better", "better", p_here=PValue(0.0041, 0.0082)),
        comparison("zero_shot", "erm", 0.0, p_here=PValue(0.00003, 1.0), p_elsewhere=None, equal_within=0.01),
        comparison("zero_shot", "xdomainmix", -0.07, "no verdict", error=None),
    ]
    run = run_of(with_comparisons(results, *rows))
    sections = list(table_sections(run, run.rules))
    made = {
        "results.md": lambda: markdown(run, brief_sections(run)),
        "tables.tex": lambda: latex(sections),
        "tables.txt": lambda: as_text(sections, io.StringIO()),
    }[name]()
    if os.environ.get("XDM_FT_GOLDEN") == "write":
        (GOLDEN / name).write_text(made, encoding="utf-8")
    assert made == (GOLDEN / name).read_text(encoding="utf-8")


def test_numbers_by_hand(results: dict[str, Any]) -> None:
    header, *rows = table(results, "results")
    assert header == ["method", "art", "sketch", "mean ± stderr", "seeds", "draws × gradients", "mixed steps"]
    assert rows == [
        ["zero_shot", "50.0", "50.0", "50.0", "1", "1 × 0", "–"],  # one seed has no ±
        ["erm", "61.0", "41.0", "51.0 ± 1.0", "2", "1 × 300", "–"],
        ["xdomainmix", "65.0", "51.0", "58.0 ± 1.0", "2", "1 × 300 to 400", "120 to 200"],
        ["sam|wide", "–", "–", "failed", "0", "1 × 600", "–"],
        ["xdomainmix+sam", "–", "–", "skipped", "0", "–", "–"],
    ]
    # 7.0 ± half of the widths that the earlier version wrote: 10.24 and 25
    compared = {row[0]: row[1:] for row in table(results, "differences")[1:]}
    assert compared["xdomainmix"] == [
        "erm",
        "+7.0",
        "+1.9 to +12.1",
        "–",
        "no verdict",
        "-5.5 to +19.5",
        "–",
        "unknown",
    ]
    assert compared["zero_shot"][1:3] == ["+0.0", "-2.1 to +2.1"], "what rounds to nothing has no sign of its own"
    text = document(results)
    assert "- sam\\|wide: 1 of 2 runs failed: the loss is nan at step 7\n" in text
    assert "- unequal budgets: 1 × 300: erm; 1 × 300 to 400: xdomainmix; 1 × 600: sam\\|wide\n" in text
    assert all("\n" not in line and line == line.rstrip() for line in text.splitlines())


def test_the_oracle_is_marked_wherever_it_shows(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = "selection: oracle — CHEATING: the step was picked on test-domain images; not a result"
    before, after = document(results).split(f"## Results, {mark}")
    assert before.count("oracle") == 0 and "| method (oracle) | art | sketch | mean ± stderr (oracle) |" in after
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("NO_COLOR", "1"), ("COLUMNS", "90")):
        monkeypatch.setenv(name, value)
    printed(results)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    before, after = text.split("selection: oracle — CHEATING", 1)
    headers = [line for line in after.splitlines() if "method" in line and line.startswith("┃")]
    assert len(headers) > 1  # every block of columns says it
    assert all("method (oracle)" in line for line in headers) and "oracle" not in before


def test_the_recipes_own_rule_comes_first(results: dict[str, Any]) -> None:
    results["summary"].reverse()
    for own, other in (("train_val", "oracle"), ("oracle", "train_val")):
        results["recipe"]["protocol"] = {"selection": own}
        headings = re.findall(r"^## Results, selection: (\w+)", document(results), re.MULTILINE)
        assert headings == [own, other]
    assert "the recipe's rule" not in document(results) and table(results, "metrics")[0][0] == "method (oracle)"


@pytest.mark.parametrize("key", ["protocol", "metric", "split", "spread_as_published"])
def test_no_column_mixes_what_differs(results: dict[str, Any], key: str) -> None:
    results["summary"] = results["summary"][:5]
    other = {"metric": "nll", "spread_as_published": {"kind": "of WILDS", "value": 0.01}}.get(key, "another")
    results["summary"][1][key] = other
    assert [row[0] for row in table(results, "results", 1)[1:]] == ["erm"]
    assert len(table(results, "results")[1:]) == 4


def test_losses_are_no_percentages(results: dict[str, Any]) -> None:
    for row in results["summary"]:
        row["metric"] = "nll"
    assert [row[3] for row in table(results, "results") if row[0] == "erm"] == ["0.510 ± 0.010"]
    assert "| numbers | NLL on test images" in document(results)


def test_before_any_model_is_trained(results: dict[str, Any]) -> None:
    results["summary"] = results["runs"] = []
    assert "No model has been trained yet." in document(results)


def hostile(results: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(results)
    for row in changed["summary"]:
        row["per_test_domain"] = {"\x1b[31m<b>|*x*": row["per_test_domain"].get("art", {"mean": None, "std": None})}
        row["protocol"] = "data\n\n# not a title [link](x) [red]no markup[/red]"
    return changed


def test_names_are_text_in_markdown(results: dict[str, Any]) -> None:
    text = document(hostile(results))
    assert "\x1b" not in text and "\n# not a title" not in text and text.startswith("# pets\\_\\*demo\\*\n")
    assert "| method | \\\\x1b\\[31m\\<b\\>\\|\\*x\\* |" in text
    assert all(len({len(row) for row in table}) == 1 for table in tables(text))


def test_names_are_text_on_a_terminal(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    printed(hostile(results))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "[red]no markup[/red]" in text


def test_piped_output_is_whole(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a domain with the long name {i}" for i in range(8)]
    for row in results["summary"]:
        row["per_test_domain"] = {name: {"mean": 0.1371, "std": None} for name in names}
    printed(results)
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if line.startswith("┃ method"))
    assert all(name in header for name in names)
    assert text.count("13.7 │") == 2 * 5 * 8
    assert "…" not in text


@pytest.mark.parametrize("width", [50, 80, 300])
def test_narrow_terminals_get_blocks_of_columns(
    results: dict[str, Any], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    printed(results)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line) for line in lines) <= width
    titles = "".join(line for line in lines if line.startswith("┃"))
    assert titles.count("draws × gradients") == titles.count("p elsewhere (Holm)") == 2
    assert len([line for line in lines if line.startswith("┃ method")]) > (20 if width == 50 else 4)


def test_an_ascii_output_is_no_crash(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    printed(results)
    sys.stdout.flush()
    assert rb"58.0 \xb1 1.0" in written.getvalue()


def test_only_what_the_tables_need_is_explained(results: dict[str, Any]) -> None:
    every = {word for words in MANUAL.values() for word in words}
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


def test_what_not_every_table_needs_is_a_word_of_the_manual() -> None:
    assert set(_NEEDS) <= {word for topic, words in MANUAL.items() for word in (topic, *words)} and len(_NEEDS) > 8


# ------------------------------------------------------------------------------------------------------------ LaTeX

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


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX")
def test_it_compiles(tmp_path: Path) -> None:
    rows = [texts(name, name) for name in HOSTILE]
    every = " ".join(HOSTILE)
    section = Section("id", every, every, tables=[Table(every, ("method", HOSTILE[0]), rows)], notes=HOSTILE)
    lines = [r"\documentclass{article}", *(rf"\def\{rule}rule{{\hline}}" for rule in ("top", "mid", "bottom"))]
    text = "\n".join([*lines, r"\begin{document}", latex([section]), r"\end{document}", ""])
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:]
