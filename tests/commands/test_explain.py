"""`xdm-ft explain` covers every word that tables, screen and sentence use."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from xdm_ft.cli.explain import TOPICS
from xdm_ft.cli.parser import main
from xdm_ft.evaluation.verdicts import EQUAL, NO_VERDICT
from xdm_ft.protocol.splits import Rule
from xdm_ft.report.comparisons import ELSEWHERE, HERE
from xdm_ft.report.manual import MANUAL


def test_every_word_of_a_table_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(MANUAL) == TOPICS
    assert main(["explain"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    rules = get_args(Rule)
    assert len(rules) == 4 and len(HERE + ELSEWHERE) == 6
    columns = ["versus", *(column.removesuffix(" (unadjusted)") for column in HERE + ELSEWHERE)]
    for word in (*columns, *rules, EQUAL, NO_VERDICT, "draws × gradients", "mixed steps", "last step picked"):
        assert f" {word}: " in text, word


def test_what_is_said_of_a_table_holds_for_every_table() -> None:
    """Training may see test domains, and what is best on the part that oracle reads is no best value of the rest."""
    assert "never trained" not in MANUAL["table"]["a domain's column"]
    oracle = MANUAL["selection"]["oracle"]
    assert "part of the test images" in oracle and "Nor is it an upper bound" in oracle
    assert not any("at most" in text or "could gain" in text for text in MANUAL["selection"].values())


def test_a_topic_alone_and_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "verdict"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("VERDICT\n  here: ") and "SELECTION" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["explain", "verdict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"verdict": MANUAL["verdict"]}
