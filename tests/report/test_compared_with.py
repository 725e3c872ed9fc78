"""What a row is compared with is named wherever its difference stands."""

from __future__ import annotations

from typing import Any

import pytest
from example_runs import comparison, results_of, run_of, with_comparisons
from made_runs import run
from test_headline import screen
from test_more_tables import two_sets

from xdm_ft.report.csv_rows import csv_rows
from xdm_ft.report.headline import show_headline
from xdm_ft.report.latex import latex
from xdm_ft.report.markdown import markdown, tables_of
from xdm_ft.report.page import differences
from xdm_ft.report.side_by_side import side_by_side
from xdm_ft.report.table_rows import ResultTable

MEANS = {"head alone": {"a": 0.5}, "last block": {"a": 0.6}, "sam": {"a": 0.7}}


def three_methods(last: str = "erm", mixed: str = "last block") -> dict[str, Any]:
    """ERM, ERM on the last block, and a method, with what the last two are compared with."""
    runs = two_sets()
    runs += [one | {"method": "last block"} for one in two_sets()[:4]]
    rows = [comparison(name, second) for name, second in (("xdomainmix", mixed), ("last block", last))]
    return with_comparisons(results_of(runs), *rows)


def first_table(results: dict[str, Any]) -> ResultTable:
    return next(tables_of(run_of(results)))


def test_one_reference_is_named_in_the_head() -> None:
    table = first_table(three_methods("last block", "last block"))
    assert "versus last block" in table.header and "versus erm" not in table.header and "versus" not in table.header
    assert {where: note.partition(": ")[0] for where, note in table.notes if where != "this table"} == {
        "xdomainmix, last block": "versus last block"
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
    rows = {row["method"]: row.get("compared_with") for row in csv_rows(run_of(results)) if row["of"] == "mean"}
    assert rows == {"erm": None, "xdomainmix": "last block", "last block": "erm"}
    both, _ = side_by_side([run_of(results), run_of(results)], [])
    assert {"difference of its run", "versus of its run"} <= set(both.header)
    assert len({len(row) for row in both.rows} | {len(both.header)}) == 1


def test_the_last_screen_and_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(MEANS, chosen_by={"sam": 0.9})
    lines = screen(made, capsys, monkeypatch).splitlines()
    assert "vs head alone" in lines[1] and "erm" not in lines[1]
    panel = differences.panel(made)
    assert panel is not None and panel.tables[0].caption.startswith("Differences to head alone in")
    assert "less that of head alone" in panel.about

    made.results["comparisons"][1]["second"] = "last block"
    lines = screen(made, capsys, monkeypatch).splitlines()
    assert lines[1].split()[-3:] == ["difference", "vs", "here"]
    assert lines[3].split()[-6:] == ["+10.0", "head", "alone", "no", "clear", "difference"]
    assert "+20.0  last block" in lines[4]
    show_headline(made)
    assert "+20.0  last block" in capsys.readouterr().out
    panel = differences.panel(made)
    assert panel is not None and [row[1].text for row in panel.tables[0].rows] == ["head alone", "last block"]
    assert panel.tables[0].header[:3] == ["method", "versus", "difference"] and "to erm" not in panel.figures[0].alt
