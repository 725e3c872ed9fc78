"""What a row is compared with is named wherever its difference stands."""

from __future__ import annotations

import io
from typing import Any

import pytest
from example_runs import results_of, run_of
from made_runs import run
from test_headline import screen
from test_more_tables import two_sets

from xdm_ft.report.csv_rows import csv_rows
from xdm_ft.report.headline import show_headline
from xdm_ft.report.latex import latex
from xdm_ft.report.markdown import markdown, tables_of
from xdm_ft.report.page import differences
from xdm_ft.report.side_by_side import side_by_side
from xdm_ft.report.table_rows import ResultTable, reference_of
from xdm_ft.report.tables import as_text

MEANS = {"head alone": {"a": 0.5}, "last block": {"a": 0.6}, "sam": {"a": 0.7}}


def three_methods(last: str = "erm", mixed: str = "last block") -> dict[str, Any]:
    """ERM, ERM on the last block, and a method, with what the last two are compared with."""
    runs = two_sets()
    runs += [one | {"method": "last block"} for one in two_sets()[:4]]
    results = results_of(runs)
    for row in results["summary"]:
        if row["method"] != "erm":
            row["versus_erm"] = results["summary"][1]["versus_erm"] | {
                "reference": last if row["method"] == "last block" else mixed
            }
    return results


def first_table(results: dict[str, Any]) -> ResultTable:
    return next(tables_of(run_of(results)))


def test_one_reference_is_named_in_the_head() -> None:
    table = first_table(three_methods("last block", "last block"))
    assert "versus last block" in table.header and "versus erm" not in table.header and "versus" not in table.header
    assert {where: note[: len("versus last block: ")] for where, note in table.notes} == {
        "xdomainmix, last block": "versus last block: "
    }


def test_several_references_have_a_column() -> None:
    results = three_methods()
    table = first_table(results)
    place = table.header.index("difference")
    assert table.header[place : place + 2] == ("difference", "versus") and len(set(map(len, table.rows))) == 1
    assert [row[place : place + 2] for row in table.rows] == [
        ("–", "–"), ("+10.0", "last block"), ("+10.0", "erm")
    ]  # fmt: skip
    text, tex = markdown(run_of(results)), latex(tables_of(run_of(results)))
    assert "| difference | versus |" in text and "versus erm" not in text.split("## How to read")[0].split("- **")[0]
    assert "& difference & versus &" in tex and "& +10.0 & last block &" in tex
    rows = {row["method"]: row["compared_with"] for row in csv_rows(run_of(results)) if row["of"] == "mean"}
    assert rows == {"erm": None, "xdomainmix": "last block", "last block": "erm"}
    both, _ = side_by_side([run_of(results), run_of(results)])
    assert {"difference of its run", "versus of its run"} <= set(both.header)
    assert len({len(row) for row in both.rows} | {len(both.header)}) == 1


def test_the_last_screen_and_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(MEANS, chosen_by={"sam": 0.9})
    lines = screen(made, capsys, monkeypatch).splitlines()
    assert "vs head alone" in lines[1] and "erm" not in lines[1]
    panel = differences.panel(made)
    assert panel is not None and panel.tables[0].caption.startswith("Differences to head alone in")
    assert "versus" not in panel.tables[0].header and "less that of head alone" in panel.about

    for versus in (row.versus_erm for row in made.rows if row.method == "sam"):
        assert versus is not None
        versus["reference"] = "last block"
    lines = screen(made, capsys, monkeypatch).splitlines()
    assert lines[1].split()[-3:] == ["difference", "vs", "verdict"]
    assert lines[3].split()[-5:-2] == ["+10.0", "head", "alone"] and "+20.0  last block" in lines[4]
    show_headline(made)
    assert "+20.0  last block" in capsys.readouterr().out
    panel = differences.panel(made)
    assert panel is not None and [row[1].text for row in panel.tables[0].rows] == ["head alone", "last block"]
    assert panel.tables[0].header[:3] == ["method", "versus", "difference"] and "to erm" not in panel.figures[0].alt


def test_results_of_earlier_versions_name_it_in_the_note() -> None:
    results = three_methods()
    for row in results["summary"]:
        if row["versus_erm"]:
            named = row["versus_erm"].pop("reference")
            row["versus_erm"]["note"] = f"compared with {named}; images assumed independent"
    assert [reference_of(row, results) for row in results["summary"]] == [None, "last block", "erm"]
    for row in results["summary"]:
        if row["versus_erm"]:
            row["versus_erm"]["note"] = "images assumed independent"
    results["recipe"]["methods"] = [{"name": "erm", "label": "erm"}, "xdomainmix", "last block"]
    assert [reference_of(row, results) for row in results["summary"]] == [None, "erm", "erm"]
    assert "versus erm" in as_text([first_table(results)], io.StringIO())
