"""The last screen: everything fits the terminal, nothing hidden is lost silently, output to a file is whole."""

from __future__ import annotations

import dataclasses
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
from example_runs import comparison
from made_runs import run

from xdm_ft.report.finished import Run
from xdm_ft.report.sentence import sentence
from xdm_ft.report.text import show_headline

PACS = {"art_painting": 0.67, "cartoon": 0.53, "photo": 0.93, "sketch": 0.41}
METHODS = ("erm", "xdomainmix", "xdomainmix+sam", "groupdro", "coral", "mixup")
SIX = {name: {domain: value + place / 100 for domain, value in PACS.items()} for place, name in enumerate(METHODS)}
Terminal = pytest.MonkeyPatch


def screen(run: Run, capsys: pytest.CaptureFixture[str], patched: Terminal, width: int = 80, height: int = 24) -> str:
    """What a terminal of this size shows, without colours."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(width)), ("LINES", str(height))):
        patched.setenv(name, value)
    capsys.readouterr()
    show_headline(run)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert all(len(line) <= width for line in text.splitlines()), text
    return text


def test_six_methods_on_four_domains_fit_80_by_24(capsys: pytest.CaptureFixture[str], monkeypatch: Terminal) -> None:
    made = run(SIX, verdicts={"mixup": "better, better", "coral": "worse"})
    text = screen(made, capsys, monkeypatch)
    assert len(text.splitlines()) < 24
    lines = text.splitlines()
    assert lines[0] == "made: accuracy in % on domains never trained on, ± standard error (3 seeds)"
    assert lines[1].split() == ["method", "worst", "domain", "mean", "vs", "erm", "here", "elsewhere"]
    assert lines[2].split() == ["erm", "sketch", "41.0", "63.5", "±", "0.4", "–", "–", "–"]
    assert lines[3].split()[-6:] == ["0.4", "+1.0", "no", "clear", "difference", "unknown"]
    assert lines[6].split()[-3:] == ["+4.0", "worse", "unknown"] and lines[7].split()[-2:] == ["better", "better"]
    assert "5 comparisons with 80% probability" in " ".join(text.split()) and "with 4 domains nothing below" in text
    assert " ".join(sentence(made).split()) in " ".join(text.split())
    assert "results.md" in text and "xdm-ft export output/made DIR" in text and "xdm-ft explain" in text
    cut = screen(made, capsys, monkeypatch, width=90).splitlines()
    assert cut[1].split()[:6] == ["method", "art_…", "cart…", "photo", "sket…", "mean"]
    assert cut[2].split()[:5] == ["erm", "67.0", "53.0", "93.0", "41.0"]
    wide = screen(made, capsys, monkeypatch, width=120)
    assert all(name in wide.splitlines()[1] for name in PACS)


def test_many_domains_become_the_worst_one(capsys: pytest.CaptureFixture[str], monkeypatch: Terminal) -> None:
    many = {f"site {i}": 0.5 + i / 100 for i in range(12)}
    values = {"erm": many, "mix": {name: value + 0.1 for name, value in many.items()}}
    text = screen(run(values), capsys, monkeypatch)
    assert "worst domain" in text and text.count("site 0 50.0") == 1 and "site 0 60.0" in text and "site 5" not in text
    losses = screen(run(values, metric="nll"), capsys, monkeypatch)
    assert "site 11 0.610" in losses  # the largest loss is the worst


def test_names_that_would_be_equal_when_cut_are_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: Terminal
) -> None:
    places = {f"location_{number}": 0.5 for number in (38, 43, 46, 100)}
    assert "loca…" not in screen(run({"erm": places, "mix": places}), capsys, monkeypatch)


def test_methods_without_a_line_are_counted(capsys: pytest.CaptureFixture[str], monkeypatch: Terminal) -> None:
    values = {name: PACS for name in ["erm", *(f"method {i:02}" for i in range(30))]}
    made = run(values, chosen_by={"method 25": 0.9}, verdicts={"method 28": "worse"})
    text = screen(made, capsys, monkeypatch)
    assert len(text.splitlines()) < 24
    shown = [name for name in values if re.search(rf"^{name} ", text, re.MULTILINE)]
    assert {"erm", "method 25", "method 28"} <= set(shown) and f"and {31 - len(shown)} more in results.md" in text
    assert shown == sorted(shown)  # the recipe's order stays
    low = screen(made, capsys, monkeypatch, height=5)
    assert "method 25 " in low and "and 28 more in results.md" in low


def test_a_pipe_gets_every_method_and_domain(capsys: pytest.CaptureFixture[str]) -> None:
    names = {f"a domain with the long name {i}": 0.1371 for i in range(8)}
    show_headline(run({f"method {i:02}": names for i in range(40)}))
    text = capsys.readouterr().out
    header = text.splitlines()[1]
    assert all(name in header for name in names) and "\x1b" not in text
    assert text.count("13.7") == 40 * 9 + 2 and "…" not in text and "more in" not in text


def test_failures_are_named_and_what_to_do_next(capsys: pytest.CaptureFixture[str], monkeypatch: Terminal) -> None:
    made = run(SIX, failed=["xdomainmix", "coral"])
    final = {"final_fits": {"erm": {"status": "failed", "reason": "the loss is nan\nat step 7"}}}
    made = dataclasses.replace(made, results=made.results | final)
    text = " ".join(screen(made, capsys, monkeypatch).split())
    assert "xdomainmix, coral: 1 of 12 runs failed: the loss was not finite" in text
    assert "final fit of erm: the loss is nan at step 7" in text and "only failed models train" in text
    rows = [dataclasses.replace(row, reason=f"{row.method} {'reason ' * 60}") for row in made.own_rows]
    many = dataclasses.replace(made, rows=rows)
    assert len(screen(many, capsys, monkeypatch).splitlines()) < 24
    nothing = dataclasses.replace(made, rows=[], every=[], results=made.results | {"runs": []})
    text = screen(nothing, capsys, monkeypatch)
    assert "No model has been trained yet." in text and "export" not in text


def test_the_oracle_is_no_result(capsys: pytest.CaptureFixture[str], monkeypatch: Terminal) -> None:
    text = " ".join(screen(run(SIX, rule="oracle"), capsys, monkeypatch).split())
    assert "CHEATING: the step was picked on test-domain images; not a result" in text and "mean (oracle)" in text
    assert "xdm-ft export" not in text


def test_names_and_paths_are_text(capsys: pytest.CaptureFixture[str], monkeypatch: Terminal) -> None:
    evil = {"erm": {"\x1b[31m|a": 0.5}, "[red]x[/red]\n\x9b2J大": {"\x1b[31m|a": 0.6}}
    made = run(evil, path=Path("out put/\x1b[2J"))
    text = screen(made, capsys, monkeypatch)
    assert "[red]x[/red]" in text and "大" in text
    assert all(line.isprintable() for line in text.splitlines())
    assert shlex.quote("out put/\x1b[2J").replace("\x1b", "\\x1b") in text
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    show_headline(run(SIX))
    assert rb"63.5 \xb1 0.4" in written.getvalue()


def test_encoders_have_a_column_and_fit_80_by_24(capsys: pytest.CaptureFixture[str], monkeypatch: Terminal) -> None:
    encoders = ("mobilenetv2_100.ra_in1k", "mobilenetv2_035.ra_in1k")
    values = {f"{name} @ {one}": SIX[name] for one in encoders for name in METHODS[:4]}
    pair = comparison(f"erm @ {encoders[0]}", f"erm @ {encoders[1]}", 0.1, "better")
    made = run(values, chosen_by={f"erm @ {encoders[1]}": 0.99}, encoders=encoders, further=[pair])
    text = screen(made, capsys, monkeypatch)
    assert len(text.splitlines()) < 24
    lines = text.splitlines()
    assert lines[1].split()[:2] == ["method", "encoder"]
    rows = [line.split()[:2] for line in lines[2:10]]
    assert len({tuple(row) for row in rows}) == 8, f"cut names stay apart: {rows}"
    assert "under erm, mobilenetv2_035.ra_in1k is -10.0 against" in " ".join(text.split())
    wide = screen(made, capsys, monkeypatch, width=140).splitlines()
    assert wide[1].split()[:6] == ["method", "encoder", "art_painting", "cartoon", "photo", "sketch"]
