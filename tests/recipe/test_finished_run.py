"""The line about a finished run, which comes before anything is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from xdm_ft.recipe.text import parse, say_if_finished


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "xdm_ft")


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    caplog.clear()
    say_if_finished(parse(text, "r.yaml"))
    return caplog.messages


def finished(folder: str) -> None:
    Path(folder).mkdir(parents=True)
    for file in ("results.json", "results.md"):
        Path(folder, file).touch()


def test_of_a_finished_run_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(caplog, "name: one") == []
    finished("output/one")
    assert said(caplog, "name: one") == ["output/one: a finished run is here"]
    assert said(caplog, "{name: one, output: {dir: other}}") == []
    finished("other/one")
    assert said(caplog, "{name: one, output: {dir: other}}") == ["other/one: a finished run is here"]
    Path("other/one/state").mkdir()  # of a run that was interrupted
    assert said(caplog, "{name: one, output: {dir: other}}") == []
    monkeypatch.setenv("RANK", "1")
    assert said(caplog, "name: one") == []


@pytest.mark.parametrize("text", ["{}", "name: [one]", "{name: one, output: 3}", "{name: one, output: {dir: [a]}}"])
def test_of_a_recipe_with_other_faults(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, text) == []


def test_a_name_that_is_too_long_for_a_file(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, f"name: {'x' * 300}") == []
