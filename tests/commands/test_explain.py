"""`xdm-ft explain` covers every word that tables, screen and sentence use."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from xdm_ft.cli import TOPICS, main
from xdm_ft.evaluation.comparison import EQUAL, NO_VERDICT
from xdm_ft.protocol.splits import Rule
from xdm_ft.report.manual import MANUAL
from xdm_ft.report.table_rows import VERSUS


def test_every_word_of_a_table_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(MANUAL) == TOPICS
    assert main(["explain"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    rules = get_args(Rule)
    assert len(rules) == 4 and len(VERSUS) == 6
    columns = [column.removesuffix(" (unadjusted)") for column in VERSUS if column != "verdict"]
    for word in (*columns, *rules, EQUAL, NO_VERDICT, "draws × gradients", "mixed steps", "last step picked"):
        assert f" {word}: " in text, word


def test_a_topic_alone_and_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "verdict"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("VERDICT\n  better, worse: ") and "SELECTION" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["explain", "verdict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"verdict": MANUAL["verdict"]}
