"""The panels on costs and encoders: their numbers, the page that holds them, and none where there is nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from example_runs import comparison, encoder_about
from made_up_runs import recipe, write_run
from parsed import Page
from test_page import check_structure

from xdm_ft.evaluation.verdicts import PValue
from xdm_ft.report.page import costs, differences, write_page

ENCODERS = ("small", "large")
HOSTILE = '<b>"large" & co</b>'
METHODS = [f"{method} @ {encoder}" for encoder in ENCODERS for method in ("erm", "sam")]


def test_the_page_of_two_encoders(tmp_path: Path) -> None:
    erm = comparison("erm @ small", "erm @ large", -0.04, p_here=PValue(0.2, 0.4))
    sam = comparison("sam @ small", "sam @ large", -0.04, "no verdict", error_elsewhere=None)
    pairs = [one.to_json() for one in (comparison("sam @ small", "erm @ small"), erm, sam)]
    encoders = {"small": encoder_about("small"), "large": encoder_about("large", pretraining=HOSTILE)}
    about = {"python": "3.11.7", "encoders": encoders}
    made = recipe(["erm", "sam"]) | {"encoder": None, "encoders": [{"label": None, "model": one} for one in ENCODERS]}
    write_page(write_run(tmp_path, methods=METHODS, environment=about, comparisons=pairs, recipe=made))
    page = Page(tmp_path / "report.html")
    check_structure(page)
    _, shown_erm, shown_sam = page.table("First − second").rows
    assert shown_erm[:3] == ["erm @ small − erm @ large", "erm @ large", "-4.0"]
    assert shown_erm[3:] == ["-9.1 to +1.1", "0.400", "no clear difference", "-67.5 to +59.5", "0.300", "unknown"]
    assert shown_sam[4:] == ["–", "no verdict", "not estimated", "–", "unknown"]
    assert (tmp_path / "plots" / "further.svg").is_file()
    shown = page.table("The encoders").by_first()["large"]
    assert shown["parameters"] == "5.7 million" and shown["pre-training"] == HOSTILE
    assert "corrected for all comparisons of the run" in page.by_id("further").text
    assert "vit_small" not in page.by_id("environment").text


def test_a_page_of_one_encoder_has_neither(tmp_path: Path) -> None:
    run = write_run(tmp_path, methods=["erm", "sam"], seeds=1)
    assert differences.further_panel(run) is None
    spent = {"erm": {"train_seconds": 2.0, "trained_parameters": 1540}, "sam": {"train_seconds": 4.0}}
    records = [dataclasses.replace(record, **spent[record.method]) for record in run.records]
    panel = costs.panel(dataclasses.replace(run, every=records))
    assert panel is not None and [len(table.rows) for table in panel.tables] == [2]
    assert [note.partition(":")[0] for note in panel.notes] == ["erm"], "of sam nothing was measured"
    assert [cell.text for cell in panel.tables[0].rows[0]] == ["erm", "1,540", "2.00", "–"]
    assert panel.tables[0].rows[0][1].value == 1540
