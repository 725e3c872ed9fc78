"""The reports at the end of a run: written once, mended by the next start, and no reason to lose a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from small_runs import recipe

from xdm_ft.experiment import run
from xdm_ft.report import written
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Section
from xdm_ft.report.sections import brief_sections

RUN = Path("output/small")
ONE = ("methods=[erm]", "protocol.test_domains=[sketch]", "report.page=true", "training.steps=2")
REPORTS = ("results.md", "results.csv", "report.html", "reports.json")


def changed(before: dict[Path, int]) -> set[str]:
    """Names of the files of the run directory that changed since `before`, which is brought up to date."""
    now = {path: path.stat().st_mtime_ns for path in RUN.iterdir() if path.is_file() and path.name != "run.lock"}
    found = {path.name for path, time in now.items() if before.get(path) != time}
    before |= now
    return found


@pytest.fixture
def fault(small_pacs: None, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What drawing the page raises: the last of the list, if there is one."""
    raised: list[BaseException] = []

    def draw(found: Run) -> list[Section]:
        assert found.records and found.rows and found.own_rows[0].method == "erm"
        if raised:
            raise raised[-1]
        (found.path / "report.html").write_text("page")
        return list(brief_sections(found))

    monkeypatch.setattr(written, "write_page", draw)
    return raised


def test_a_finished_run_leaves_its_reports_and_growth_renews_them(fault: list[BaseException]) -> None:
    files: dict[Path, int] = {}
    assert not run(recipe(*ONE)).failed
    assert changed(files) == {"recipe.yaml", "results.json", *REPORTS}
    run(recipe(*ONE))
    assert changed(files) == set()
    run(recipe(*ONE, "methods=[erm,linear_probe]"))
    assert changed(files) == {"recipe.yaml", "results.json", *REPORTS}
    assert "| linear_probe |" in (RUN / "results.md").read_text()
    assert (RUN / "results.csv").read_text().count("\nsmall,") == 2 * 2  # methods, mean and one set


@pytest.mark.parametrize("name", ["results.md", pytest.param("report.html", marks=pytest.mark.slow)])
def test_a_kill_between_results_and_reports_is_mended(
    name: str, fault: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(written, {"results.md": "markdown", "report.html": "write_page"}[name], killed)
        with pytest.raises(Killed):
            run(recipe(*ONE))
    assert (RUN / "results.json").exists() and not (RUN / name).exists() and (RUN / "state").exists()
    files: dict[Path, int] = {}
    changed(files)
    assert not run(recipe(*ONE)).failed
    assert name in changed(files) <= {*REPORTS} and not (RUN / "state").exists()


@pytest.mark.slow
def test_a_fault_of_the_page_does_not_lose_the_run(
    fault: list[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    fault.append(ZeroDivisionError("a fault of ours"))
    assert not run(recipe(*ONE)).failed
    assert (RUN / "results.md").exists() and not (RUN / "report.html").exists() and not (RUN / "state").exists()
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "report.html: can not be drawn" in record.message and record.exc_info is not None
