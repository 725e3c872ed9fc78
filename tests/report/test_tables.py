from __future__ import annotations

import copy
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from example_runs import comparison, run_of, with_comparisons

from xdm_ft.evaluation.verdicts import PValue
from xdm_ft.report.how_to_read import _NEEDS, how_to_read
from xdm_ft.report.manual import MANUAL
from xdm_ft.report.markdown import markdown
from xdm_ft.report.result_table import result_table
from xdm_ft.report.table_rows import groups
from xdm_ft.report.tables import as_text
from xdm_ft.runtime.terminal import write

EXAMPLE = Path(__file__).parent / "results_example.json"


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(EXAMPLE.read_text(encoding="utf-8"))


def tables(text: str, level: int = 2) -> list[list[list[str]]]:
    """The tables below headings of a level, each a list of rows of cells; escaped bars do not divide."""
    found: list[list[list[str]]] = []
    previous, inside = "", True
    for line in text.splitlines():
        if line.startswith("#"):
            inside = line.startswith("#" * level + " ")
        if line.startswith("|") and inside:
            if not previous.startswith("|"):
                found.append([])
            cells = line.replace("\\|", "\0").strip("|").split("|")
            found[-1].append([cell.strip().replace("\0", "|") for cell in cells])
        previous = line
    assert found
    return found


def printed(results: dict[str, Any]) -> None:
    """Prints the first table of each rule."""
    write(as_text([result_table(rows, results) for rows in groups(results)], sys.stdout))


def test_markdown_has_every_number_in_recipe_order(results: dict[str, Any]) -> None:
    table = tables(markdown(run_of(results)))[0]
    columns = ["method", "art", "sketch", "mean ± stderr", "seeds", "draws × gradients", "versus erm"]
    verdicts = [(f"95% {where} (unadjusted)", f"p {where} (Holm)", where) for where in ("here", "elsewhere")]
    assert table[0] == [*columns, *verdicts[0], *verdicts[1], "mixed steps"]
    rows = {row[0]: row[1:] for row in table[2:]}
    assert list(rows) == ["zero_shot", "erm", "xdomainmix", "sam|wide", "xdomainmix+sam"]
    assert rows["erm"] == ["61.0", "41.0", "51.0 ± 1.0", "2", "1 × 300", *["–"] * 8]
    # 7.0 ± half of the widths that the earlier version wrote: 10.24 and 25
    versus = ["+7.0", "+1.9 to +12.1", "–", "no verdict", "-5.5 to +19.5", "–", "unknown"]
    assert rows["xdomainmix"] == ["65.0", "51.0", "58.0 ± 1.0", "2", "1 × 300 to 400", *versus, "120 to 200"]
    # a difference that rounds to nothing has no sign of its own, one seed has no ±
    assert rows["zero_shot"][2:7] == ["50.0", "1", "1 × 0", "+0.0", "-2.1 to +2.1"]
    assert rows["sam|wide"][:5] == ["–", "–", "failed", "0", "1 × 600"]
    assert rows["xdomainmix+sam"][:5] == ["–", "–", "skipped", "0", "–"]


def test_both_verdicts_are_printed(results: dict[str, Any]) -> None:
    small, large = PValue(0.0041, 0.0082), PValue(0.00003, 1.0)
    rows = [
        comparison("xdomainmix", "erm", 0.07, "better", "better", p_here=small, p_elsewhere=PValue(0.01, 0.03)),
        comparison("zero_shot", "erm", 0.0, p_here=large, p_elsewhere=None, equal_within=0.01, error_elsewhere=0.0),
    ]
    shown = {row[0]: row[7:13] for row in tables(markdown(run_of(with_comparisons(results, *rows))))[0]}
    assert shown["xdomainmix"] == ["+1.9 to +12.1", "0.008", "better", "-56.5 to +70.5", "0.030", "better"]
    assert shown["zero_shot"][1:3] == ["1.000", "no clear difference, equal within 1 point"]
    assert shown["zero_shot"][4:] == ["–", "unknown"]
    one = [comparison("xdomainmix", "erm", 0.07, "better", sets=1, domains=1, p_here=PValue(0.00003, 0.0001))]
    table = tables(markdown(run_of(with_comparisons(results, *one))))[0]
    assert table[0][7:] == ["95% here (unadjusted)", "p here (Holm)", "here", "mixed steps"]
    assert {row[0]: row[8:10] for row in table}["xdomainmix"] == ["\\<0.001", "better on this domain"]


def test_markdown_says_what_a_reader_must_know(results: dict[str, Any]) -> None:
    text = markdown(run_of(results))
    assert text.startswith("# pets\\_\\*demo\\*\n")
    assert "- **sam\\|wide**: 1 of 2 runs failed: the loss is nan at step 7\n" in text
    assert "- **xdomainmix+sam**: 1 of 2 runs skipped: needs 2 training domains, there is 1\n" in text
    assert "- **zero_shot**: versus erm: variation between domains not estimated; no verdict: it needs 3 seeds" in text
    assert "± is the standard error over seeds" in text
    assert "not adjusted for the number of comparisons" in text
    assert "corrected for all comparisons of the run" in text and "if p here (Holm) is below 0.05 " in text
    assert "Fewer than 3 seeds are complete" in text
    assert text.rstrip().endswith("*Environment: python 3.11.7, libraries.torch 2.15.0*")
    assert all("\n" not in line and line == line.rstrip() for line in text.splitlines())


def test_protocols_never_share_a_table(results: dict[str, Any]) -> None:
    text = markdown(run_of(results))
    assert text.count("**Protocol:**") == len(tables(text)) == 2
    for table, mean in zip(tables(text), ("58.0 ± 1.0", "60.0 ± 1.0"), strict=True):
        assert [row[3] for row in table if row[0] == "xdomainmix"] == [mean]
    assert "(oracle: picked on the test domain)" in text.split("**Protocol:**")[2]
    assert "oracle" not in text.split("\n## ")[1]


def test_the_oracle_is_marked_wherever_it_shows(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = "selection: oracle — CHEATING: the step was picked on test-domain images; not a result"
    first, second, _ = markdown(run_of(results)).split("\n## ")[1:]
    assert first.startswith("selection: train_val (the recipe's rule)\n") and second.startswith(mark + "\n")
    assert tables(second)[0][0][0] == "method (oracle)" and "mean ± stderr (oracle)" in tables(second)[0][0]
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("NO_COLOR", "1"), ("COLUMNS", "90")):
        monkeypatch.setenv(name, value)
    printed(results)
    before, after = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).split(mark)
    headers = [line for line in after.splitlines() if "method" in line and line.startswith("┃")]
    assert len(headers) > 1  # every block of columns says it
    assert all("method (oracle)" in line for line in headers) and "oracle" not in before


def test_the_recipes_own_rule_comes_first(results: dict[str, Any]) -> None:
    results["recipe"]["protocol"] = {"selection": "train_val"}
    results["summary"].reverse()
    headings = re.findall(r"^## (selection: .*)$", markdown(run_of(results)), re.MULTILINE)
    assert [heading.split()[1] for heading in headings] == ["train_val", "oracle"]
    results["recipe"]["protocol"] = {"selection": "oracle"}
    headings = re.findall(r"^## (selection: .*)$", markdown(run_of(results)), re.MULTILINE)
    assert [heading.split()[1] for heading in headings] == ["oracle", "train_val"]
    assert "CHEATING" in headings[0] and "the recipe's rule" not in "".join(headings)
    [metrics] = [table for table in tables(markdown(run_of(results)), level=3) if "NLL" in table[0]][:1]
    assert metrics[0][0] == "method (oracle)"


def test_two_kinds_of_spread_never_share_a_column(results: dict[str, Any]) -> None:
    results["summary"] = results["summary"][:5]
    for row, kind in zip(results["summary"], ("of DomainBed", "of WILDS", "of WILDS"), strict=False):
        row["spread_as_published"] = {"kind": kind, "value": 0.01}
    found = [{row[0] for row in table[2:]} for table in tables(markdown(run_of(results)))]
    assert sorted(found, key=sorted) == [{"erm", "zero_shot"}, {"sam|wide", "xdomainmix+sam"}, {"xdomainmix"}]


def test_unequal_budgets_are_told(results: dict[str, Any]) -> None:
    note = "- **unequal budgets**: 1 × 300: erm; 1 × 300 to 400: xdomainmix; 1 × 600: sam\\|wide\n"
    assert markdown(run_of(results)).count(note) == 2
    assert "draws of hyper-parameters × gradients that one model takes." in markdown(run_of(results))
    for row in results["summary"]:
        if row["method"] != "zero_shot":  # takes no gradient steps
            row["budget"] = {"draws": 20, "gradient_evaluations": {"low": 300, "high": 300}}
    assert "**unequal budgets**" not in markdown(run_of(results)) and "| 20 × 300 |" in markdown(run_of(results))


def test_results_without_budgets_are_still_readable(results: dict[str, Any]) -> None:
    for row in results["summary"]:
        del row["budget"]
    text = markdown(run_of(results))
    assert "58.0 ± 1.0" in text and "gradient" not in text.split("*Environment")[0].lower()


@pytest.mark.parametrize("key", ["protocol", "selection", "metric", "split"])
def test_whatever_differs_divides(results: dict[str, Any], key: str) -> None:
    results["summary"] = results["summary"][:5]
    results["summary"][1][key] = "nll" if key == "metric" else "another"
    assert len(tables(markdown(run_of(results)))) == 2


def test_losses_are_no_percentages(results: dict[str, Any]) -> None:
    for row in results["summary"]:
        row["metric"] = "nll"
    text = markdown(run_of(results))
    assert [row[3] for row in tables(text)[0] if row[0] == "erm"] == ["0.510 ± 0.010"]
    assert "- **numbers**: NLL on test images" in text


def test_without_erm_there_are_no_columns_for_it(results: dict[str, Any]) -> None:
    results["summary"] = [row for row in results["summary"] if row["method"] == "erm"]
    assert tables(markdown(run_of(results)))[0][0][:-1] == ["method", "art", "sketch", "mean ± stderr", "seeds"]


def test_before_any_model_is_trained(results: dict[str, Any]) -> None:
    results["summary"] = results["runs"] = []
    assert "No model has been trained yet." in markdown(run_of(results))


def hostile(results: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(results)
    for row in changed["summary"]:
        row["per_test_domain"] = {"\x1b[31m<b>|*x*": row["per_test_domain"].get("art", {"mean": None, "std": None})}
        row["protocol"] = "data\n\n# not a title [link](x) [red]no markup[/red]"
    return changed


def test_names_are_text_in_markdown(results: dict[str, Any]) -> None:
    text = markdown(run_of(hostile(results)))
    assert "\x1b" not in text and "\n# not a title" not in text
    assert "| method | \\\\x1b\\[31m\\<b\\>\\|\\*x\\* |" in text
    assert len({len(row) for row in tables(text)[0]}) == 1


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
    header = next(line for line in text.splitlines() if "method" in line)
    assert all(name in header for name in names)
    assert text.count("13.7 │") == 2 * 5 * 8
    assert "…" not in text


def test_piped_output_has_at_least_100_columns(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    results["summary"] = [row for row in results["summary"] if row["method"] == "erm"]
    printed(results)
    lines = capsys.readouterr().out.splitlines()
    assert 80 < max(len(line.rstrip()) for line in lines) <= 100


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
    headers = [line for line in lines if line.startswith("┃ method")]
    assert len(headers) == {50: 17, 80: 8, 300: 2}[width]
    found = "".join(line for line in lines if line.startswith("┃"))
    for name in (
        "art",
        "sketch",
        "mean ± stderr",
        "draws × gradients",
        "versus erm",
        "95% elsewhere (unadjusted)",
        "p elsewhere (Holm)",
        "mixed steps",
    ):
        assert found.count(name) == 2


def test_an_ascii_output_is_no_crash(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    printed(results)
    sys.stdout.flush()
    assert rb"58.0 \xb1 1.0" in written.getvalue()


def test_only_what_the_tables_need_is_explained(results: dict[str, Any]) -> None:
    every = {word for words in MANUAL.values() for word in words}
    whole = {one.title: one.text for one in how_to_read(results)}
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
    less = {one.title for one in how_to_read(results)}
    assert less & {"selected hyper-parameters", "at the edge of its range"} and "mean ±" in less
    gone = {*MANUAL["comparison"], *MANUAL["verdict"], "oracle", "mixed steps", "failed, skipped"}
    assert len(gone) > 10 and not less & gone
    results["comparisons"] = [comparison("sam").to_json()]
    assert {"equal within", "look", "95% here", "no verdict"} <= {one.title for one in how_to_read(results)}
    results["summary"] = []
    assert how_to_read(results) == []


def test_what_not_every_table_needs_is_a_word_of_the_manual() -> None:
    assert set(_NEEDS) <= {word for topic, words in MANUAL.items() for word in (topic, *words)} and len(_NEEDS) > 8
