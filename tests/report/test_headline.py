"""The last screen: everything fits the terminal, nothing hidden is lost silently, output to a file is whole."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from example_runs import comparison, made_run

from xdm_ft.report.finished import Run
from xdm_ft.report.headline import sentence, show_headline

PACS = {"art_painting": 0.67, "cartoon": 0.53, "photo": 0.93, "sketch": 0.41}
METHODS = ("erm", "xdomainmix", "xdomainmix+sam", "groupdro", "coral", "mixup")
SIX = {name: {domain: value + i / 100 for domain, value in PACS.items()} for i, name in enumerate(METHODS)}
Screen = Callable[..., list[str]]


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Screen:
    """What a terminal of a size shows, without colours."""

    def show(run: Run, width: int = 80, height: int = 24) -> list[str]:
        for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(width)), ("LINES", str(height))):
            monkeypatch.setenv(name, value)
        show_headline(run)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert all(len(line) <= width and line.isprintable() for line in lines), lines
        assert len(lines) < height or height < 20
        return lines

    return show


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_six_methods_on_four_domains_fit_80_by_24(screen: Screen) -> None:
    made = made_run(SIX, verdicts={"mixup": "better, better", "coral": "worse"})
    lines = screen(made)
    assert lines[0] == "made: accuracy in % on domains never trained on, ± standard error (3 seeds)"
    assert lines[1].split() == ["method", "worst", "domain", "mean", "vs", "erm", "here", "elsewhere"]
    assert lines[2].split() == ["erm", "sketch", "41.0", "63.5", "±", "0.4", "–", "–", "–"]
    assert lines[3].split()[-6:] == ["0.4", "+1.0", "no", "clear", "difference", "unknown"]
    assert lines[6].split()[-3:] == ["+4.0", "worse", "unknown"] and lines[7].split()[-2:] == ["better", "better"]
    assert "5 comparisons with 80% probability" in words(lines) and "with 4 domains nothing below" in words(lines)
    assert words([sentence(made)]) in words(lines)
    assert all(name in words(lines) for name in ("results.md", "xdm-ft export output/made DIR", "xdm-ft explain"))
    cut = screen(made, 90)
    assert cut[1].split()[:6] == ["method", "art_…", "cart…", "photo", "sket…", "mean"]
    assert cut[2].split()[:5] == ["erm", "67.0", "53.0", "93.0", "41.0"]
    assert all(name in screen(made, 120)[1] for name in PACS)


def test_many_domains_become_the_worst_one(screen: Screen) -> None:
    many = {f"site {i}": 0.5 + i / 100 for i in range(12)}
    values = {"erm": many, "mix": {name: value + 0.1 for name, value in many.items()}}
    text = words(screen(made_run(values)))
    assert "worst domain" in text and text.count("site 0 50.0") == 1 and "site 0 60.0" in text and "site 5" not in text
    assert "site 11 0.610" in words(screen(made_run(values, metric="nll"))), "the largest loss is the worst"
    places = {f"location_{number}": 0.5 for number in (38, 43, 46, 100)}
    equal = made_run({"erm": places, "mix": places})
    assert "loca…" not in words(screen(equal, 90)), "names that would be equal when cut"


def test_methods_without_a_line_are_counted(screen: Screen) -> None:
    values = {name: PACS for name in ["erm", *(f"method {i:02}" for i in range(30))]}
    made = made_run(values, chosen_by={"method 25": 0.9}, verdicts={"method 28": "worse"})
    lines = screen(made)
    shown = [name for name in values if any(line.startswith(f"{name} ") for line in lines)]
    assert {"erm", "method 25", "method 28"} <= set(shown) and shown == sorted(shown), "in the recipe's order"
    assert f"and {31 - len(shown)} more in results.md" in words(lines)
    low = words(screen(made, height=5))
    assert "method 25 " in low and "and 28 more in results.md" in low


def test_a_pipe_gets_every_method_and_domain(capsys: pytest.CaptureFixture[str]) -> None:
    names = {f"a domain with the long name {i}": 0.1371 for i in range(8)}
    show_headline(made_run({f"method {i:02}": names for i in range(40)}))
    text = capsys.readouterr().out
    assert all(name in text.splitlines()[1] for name in names) and "\x1b" not in text
    assert text.count("13.7") == 40 * 9 + 2 and "…" not in text and "more in" not in text


def test_failures_are_named_and_what_to_do_next(screen: Screen) -> None:
    final = {"final_fits": {"erm": {"status": "failed", "reason": "the loss is nan\nat step 7"}}}
    made = made_run(SIX, failed=["xdomainmix", "coral"])
    made = dataclasses.replace(made, results=made.results | final)
    text = words(screen(made))
    assert "xdomainmix, coral: 1 of 12 runs failed: the loss was not finite" in text
    assert "final fit of erm: the loss is nan at step 7" in text and "only failed models train" in text
    rows = [dataclasses.replace(row, reason=f"{row.method} {'reason ' * 60}") for row in made.own_rows]
    assert "5 more notes in results.md" in words(screen(dataclasses.replace(made, rows=rows)))
    text = words(screen(dataclasses.replace(made, rows=[], every=[], results=made.results | {"runs": []})))
    assert "No model has been trained yet." in text and "export" not in text
    text = words(screen(made_run(SIX, rule="oracle")))
    assert "CHEATING: the step was picked on test-domain images; not a result" in text and "mean (oracle)" in text
    assert "xdm-ft export" not in text


def test_names_and_paths_are_text(screen: Screen) -> None:
    evil = {"erm": {"\x1b[31m|a": 0.5}, "[red]x[/red]\n\x9b2J大": {"\x1b[31m|a": 0.6}}
    text = words(screen(made_run(evil, path=Path("out put/\x1b[2J"))))
    assert "[red]x[/red]" in text and "大" in text
    assert shlex.quote("out put/\x1b[2J").replace("\x1b", "\\x1b") in text


def test_encoders_have_a_column_and_fit_80_by_24(screen: Screen) -> None:
    encoders = ("mobilenetv2_100.ra_in1k", "mobilenetv2_035.ra_in1k")
    values = {f"{name} @ {encoder}": SIX[name] for encoder in encoders for name in METHODS[:4]}
    pair = comparison(f"erm @ {encoders[0]}", f"erm @ {encoders[1]}", 0.1, "better")
    made = made_run(values, chosen_by={f"erm @ {encoders[1]}": 0.99}, encoders=encoders, further=[pair])
    lines = screen(made)
    assert lines[1].split()[:2] == ["method", "encoder"]
    assert len({tuple(line.split()[:2]) for line in lines[2:10]}) == 8, "cut names stay apart"
    assert "under erm, mobilenetv2_035.ra_in1k is -10.0 against" in words(lines)
    assert screen(made, 140)[1].split()[:6] == ["method", "encoder", *PACS]
