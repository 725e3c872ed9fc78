"""The panels on costs and encoders: their numbers, the page that holds them, and none where there is nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from example_runs import encoder_about
from made_up_runs import recipe, write_run
from parsed import Page
from test_page import check_structure

from xdm_ft.report.page import costs, differences, write_page

ENCODERS = ("small", "large")
HOSTILE = '<b>"large" & co</b>'
METHODS = [f"{method} @ {encoder}" for encoder in ENCODERS for method in ("erm", "sam")]


def pair(first: str, second: str, **changes: Any) -> dict[str, Any]:
    """An entry of `encoder_pairs`."""
    interval = {"low": -0.1, "high": 0.02}
    values = {"difference": -0.04, "domains": interval, "seeds_and_images": interval, "p": 0.2, "p_holm": 0.4}
    names = {"selection": "train_val", "method": "erm", "first": first, "second": second}
    return names | values | {"verdict": "not distinguishable", "note": "images assumed independent"} | changes


def test_the_page_of_two_encoders(tmp_path: Path) -> None:
    pairs = [pair("small", "large"), pair("small", "large", method="sam", domains=None, p=None, p_holm=None)]
    encoders = {"small": encoder_about("small"), "large": encoder_about("large", pretraining=HOSTILE)}
    about = {"python": "3.11.7", "encoders": encoders}
    made = recipe(["erm", "sam"]) | {"encoder": None, "encoders": [{"label": None, "model": one} for one in ENCODERS]}
    write_page(write_run(tmp_path, methods=METHODS, environment=about, encoder_pairs=pairs, recipe=made))
    page = Page(tmp_path / "report.html")
    check_structure(page)
    _, erm, sam = page.table("First − second").rows
    assert erm[:3] == ["erm", "small − large", "-4.0"] and erm[3:] == [
        "-10.0 to +2.0", "-10.0 to +2.0", "0.200", "0.400", "not distinguishable"
    ]  # fmt: skip
    assert sam[3] == "not estimated" and sam[5:7] == ["–", "–"]
    assert (tmp_path / "plots" / "encoders.svg").is_file()
    shown = page.table("The encoders").by_first()["large"]
    assert shown["parameters"] == "5.7 million" and shown["pre-training"] == HOSTILE
    assert "pairs of encoders" in page.by_id("differences").text and "vit_small" not in page.by_id("environment").text


def test_a_page_of_one_encoder_has_neither(tmp_path: Path) -> None:
    run = write_run(tmp_path, methods=["erm", "sam"], seeds=1)
    assert differences.between_encoders(run) is None
    spent = {"erm": {"train_seconds": 2.0, "trained_parameters": 1540}, "sam": {"train_seconds": 4.0}}
    records = [dataclasses.replace(record, **spent[record.method]) for record in run.records]
    panel = costs.panel(dataclasses.replace(run, every=records))
    assert panel is not None and [len(table.rows) for table in panel.tables] == [2]
    assert [note.partition(":")[0] for note in panel.notes] == ["erm"], "of sam nothing was measured"
    assert [cell.text for cell in panel.tables[0].rows[0]] == ["erm", "1,540", "2.00", "–"]
    assert panel.tables[0].rows[0][1].value == 1540
