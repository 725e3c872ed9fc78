"""The reports at the end of a run: written once, mended by the next start, and no reason to lose a run."""

import logging
from pathlib import Path

import pytest
from small_runs import recipe

from xdm_ft.cli.library import run
from xdm_ft.report import written
from xdm_ft.report.sections import brief_sections
from xdm_ft.storage.run_directory import MEASURED

RUN = Path("output/small")
ONE = ("methods=[erm]", "protocol.test_domains=[sketch]", "report.page=true", "training.steps=2")
REPORTS = ("results.md", "results.csv", "report.html", "reports.json")


def changed(before):
    """Names of the files of the run directory that changed since `before`, which is brought up to date."""
    now = {path: path.stat().st_mtime_ns for path in RUN.iterdir() if path.is_file() and path.name != "run.lock"}
    names = {path.name for path, time in now.items() if before.get(path) != time}
    before |= now
    return names


@pytest.fixture(autouse=True)
def faults(small_pacs, monkeypatch):
    """Drawing the page is quick, and raises the last of these."""
    raised = []

    def draw(finished):
        assert finished.records and finished.rows and finished.recipe_rows[0].method == "erm"
        if raised:
            raise raised[-1]
        (finished.path / "report.html").write_text("page")
        return list(brief_sections(finished))

    monkeypatch.setattr(written, "write_page", draw)
    return raised


def test_a_finished_run_leaves_its_reports_and_growth_renews_them():
    files = {}
    assert not run(recipe(*ONE)).failed
    assert changed(files) == {"recipe.yaml", "results.json", MEASURED, *REPORTS}
    run(recipe(*ONE))
    assert changed(files) == set()
    run(recipe(*ONE, "methods=[erm,linear_probe]"))
    assert changed(files) == {"recipe.yaml", "results.json", MEASURED, *REPORTS}
    assert "| linear_probe |" in (RUN / "results.md").read_text()
    assert (RUN / "results.csv").read_text().count("\nsmall,") == 2 * 2  # methods, mean and one set


@pytest.mark.parametrize(
    ("name", "function"),
    [("results.md", "markdown"), pytest.param("report.html", "write_page", marks=pytest.mark.slow)],
)
def test_a_kill_between_results_and_reports_is_mended(name, function, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(written, function, killed)
        run(recipe(*ONE))
    assert (RUN / "results.json").exists() and not (RUN / name).exists() and (RUN / "state").exists()
    files = {}
    changed(files)
    assert not run(recipe(*ONE)).failed
    assert name in changed(files) <= {*REPORTS} and not (RUN / "state").exists()


@pytest.mark.slow
def test_a_fault_of_the_page_does_not_lose_the_run(faults, caplog):
    faults.append(ZeroDivisionError("a fault of ours"))
    assert not run(recipe(*ONE)).failed
    assert (RUN / "results.md").exists() and not (RUN / "report.html").exists() and not (RUN / "state").exists()
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "report.html: cannot be drawn" in record.message and record.exc_info is not None
