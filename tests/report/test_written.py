"""When the reports of a run directory are written."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from example_runs import results_of, run_of, two_sets

from xdm_ft.report import written
from xdm_ft.report.finished import Run, read_run
from xdm_ft.report.section import Section
from xdm_ft.report.sections import brief_sections
from xdm_ft.report.written import refresh_reports, write_reports
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory

TABLES = ("results.md", "results.csv")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The pages that were drawn."""
    drawn: list[Path] = []

    def draw(run: Run) -> list[Section]:
        assert all((run.path / name).exists() for name in TABLES), "the tables do not wait for the page"
        (run.path / "plots").mkdir(exist_ok=True)
        for name in ("report.html", "plots/a.svg", "plots/b.svg"):
            (run.path / name).write_text(f"page {name}")
        drawn.append(run.path)
        return list(brief_sections(run))

    monkeypatch.setattr(written, "write_page", draw)
    return drawn


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.write_results(results_of(two_sets(), report={"page": True, "images": False}))
    return directory


def refresh(directory: RunDirectory) -> set[str]:
    """The reports that a refresh wrote, besides their checksums."""
    before = {path.name: path.lstat().st_mtime_ns for path in directory.path.iterdir()}
    refresh_reports(directory, read_run(directory.path))
    now = {path.name: path.lstat().st_mtime_ns for path in directory.path.iterdir()}
    return {name for name, time in now.items() if before.get(name) != time} - {"reports.json", "plots"}


def age(path: Path) -> None:
    """Makes a file older than all others."""
    os.utime(path, ns=(1, 1))


def test_what_is_missing_or_old_is_written_anew(directory: RunDirectory, pages: list[Path]) -> None:
    assert refresh(directory) == {*TABLES, "report.html"}
    assert refresh(directory) == set() and len(pages) == 1
    for name in (*TABLES, "report.html"):
        (directory.path / name).unlink()
        assert name in refresh(directory)
        age(directory.path / name)
        assert name in refresh(directory) and refresh(directory) == set()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("damage", [flip, cut, lengthen, Path.unlink])
@pytest.mark.parametrize(
    "name", ["results.md", "results.csv", "models.parquet", "report.html", "plots/a.svg", "plots/b.svg"]
)
def test_a_damaged_report_is_restored(
    name: str,
    damage: Callable[[Path], None],
    directory: RunDirectory,
    pages: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(written, "MANY_MODELS", 1)
    refresh(directory)
    paths = [path for path in directory.path.rglob("*") if path.is_file()]
    whole = {path: path.read_bytes() for path in paths}
    damage(directory.path / name)
    refresh(directory)
    assert {path: path.read_bytes() for path in paths} == whole and refresh(directory) == set()
    assert len(pages) == 2


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_reports_without_checksums_are_written_once(
    damage: Callable[[Path], None], directory: RunDirectory, pages: list[Path]
) -> None:
    """Whether they are damaged is unknown; an earlier version wrote no checksums."""
    refresh(directory)
    damage(directory.path / "reports.json")
    assert refresh(directory) == {*TABLES, "report.html"} and refresh(directory) == set()


def test_equal_results_leave_the_file_and_others_replace_it(directory: RunDirectory, pages: list[Path]) -> None:
    refresh(directory)
    before = (directory.path / "results.json").stat().st_mtime_ns
    directory.write_results(results_of(two_sets(), report={"page": True, "images": False}))
    assert (directory.path / "results.json").stat().st_mtime_ns == before and refresh(directory) == set()
    directory.write_results(results_of(two_sets()[:4], report={"page": True}))
    assert refresh(directory) == {*TABLES, "report.html"}
    assert "xdomainmix" not in (directory.path / "results.md").read_text()


def test_an_analysis_makes_the_page_old(directory: RunDirectory, pages: list[Path]) -> None:
    refresh(directory)
    (directory.path / "analysis.json").write_text("{}")
    assert {"report.html", "results.md"} <= refresh(directory) and refresh(directory) == set()


@pytest.mark.parametrize("report", [{}, {"report": {"page": False}}])
def test_no_page_where_none_is_wanted(report: dict[str, dict[str, bool]], tmp_path: Path, pages: list[Path]) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_results(results_of(two_sets(), **report))  # a recipe of an earlier version has no such block
    assert refresh(directory) == {*TABLES} and pages == []
    write_reports(directory, read_run(tmp_path))  # `xdm-ft report` was asked for it
    assert pages == [tmp_path]


def test_a_fault_of_the_page_is_reported_and_leaves_the_tables(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(run: Run) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(written, "write_page", fault)
    assert refresh(directory) == {*TABLES}
    [record] = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info is not None, "with its traceback"
    assert "report.html: can not be drawn" in record.message and "`xdm-ft report" in record.message
    with pytest.raises(ZeroDivisionError):
        write_reports(directory, read_run(directory.path))


def test_a_fault_that_the_user_can_repair_stops(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: Run) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(written, "write_page", full)
    with pytest.raises(UserError, match="the disk is full"):
        refresh(directory)


def test_a_link_to_nothing_is_replaced(directory: RunDirectory, pages: list[Path]) -> None:
    for name in TABLES:
        (directory.path / name).symlink_to(directory.path / "gone" / name)
    refresh(directory)
    assert all((directory.path / name).is_file() and not (directory.path / name).is_symlink() for name in TABLES)


def test_without_a_model_the_tables_say_so(tmp_path: Path, pages: list[Path]) -> None:
    directory = RunDirectory(tmp_path)
    write_reports(directory, run_of(results_of([]), tmp_path))
    assert "No model has been trained yet." in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.csv").read_text().count("\n") == 1
