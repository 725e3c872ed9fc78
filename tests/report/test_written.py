"""When the reports of a run directory are written."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pyarrow.parquet
import pytest
from example_runs import results_of, run_of, two_sets

from xdm_ft.report import Section, written
from xdm_ft.report.sections import brief_sections
from xdm_ft.report.written import refresh_reports, write_reports
from xdm_ft.results.run import Run, read_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory

TABLES = {"results.md", "results.csv"}
ALL = {*TABLES, "report.html"}


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
    directory.write_results(results_of(two_sets(), report={"page": True}))
    return directory


def refresh(directory: RunDirectory) -> set[str]:
    """The reports that a refresh wrote, besides their checksums."""
    before = {path.name: path.lstat().st_mtime_ns for path in directory.path.iterdir()}
    refresh_reports(directory, read_run(directory.path))
    now = {path.name: path.lstat().st_mtime_ns for path in directory.path.iterdir()}
    return {name for name, time in now.items() if before.get(name) != time} - {"reports.json", "plots"}


def test_what_is_missing_or_old_is_written_anew(directory: RunDirectory, pages: list[Path]) -> None:
    assert refresh(directory) == ALL
    assert refresh(directory) == set() and len(pages) == 1
    for name in ALL:
        (directory.path / name).unlink()
        assert name in refresh(directory)
        os.utime(directory.path / name, ns=(1, 1))  # older than all others
        assert name in refresh(directory) and refresh(directory) == set()
    (directory.path / "analysis.json").write_text("{}")
    assert {"report.html", "results.md"} <= refresh(directory) and refresh(directory) == set()
    before = (directory.path / "results.json").stat().st_mtime_ns
    directory.write_results(results_of(two_sets(), report={"page": True}))
    assert (directory.path / "results.json").stat().st_mtime_ns == before and refresh(directory) == set()
    directory.write_results(results_of(two_sets()[:4], report={"page": True}))
    assert refresh(directory) == ALL
    assert "xdomainmix" not in (directory.path / "results.md").read_text()


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes({"cut": content[:-3], "lengthen": content + b"\n"}.get(kind, content))
    if kind == "unlink":
        path.unlink()


@pytest.mark.parametrize("kind", ["flip", "cut", "lengthen", "unlink"])
def test_a_damaged_report_is_restored(
    kind: str, directory: RunDirectory, pages: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "MANY_MODELS", 1)
    refresh(directory)
    whole = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
    assert len(pyarrow.parquet.read_table(directory.path / "models.parquet")) == 8
    for name in ("results.md", "results.csv", "models.parquet", "report.html", "plots/a.svg", "plots/b.svg"):
        damage(directory.path / name, kind)
        refresh(directory)
        assert {path: path.read_bytes() for path in whole} == whole and refresh(directory) == set(), name
    assert len(pages) == 7
    if kind in ("cut", "unlink"):
        damage(directory.path / "reports.json", kind)
        assert refresh(directory) == {*ALL, "models.parquet"} and refresh(directory) == set()


def test_no_page_where_none_is_wanted(tmp_path: Path, pages: list[Path]) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_results(results_of(two_sets()))
    for name in TABLES:
        (tmp_path / name).symlink_to(tmp_path / "gone" / name)
    assert refresh(directory) == TABLES and pages == []
    assert all((tmp_path / name).is_file() and not (tmp_path / name).is_symlink() for name in TABLES)
    write_reports(directory, read_run(tmp_path))  # `xdm-ft report` was asked for it
    assert pages == [tmp_path] and not (tmp_path / "models.parquet").exists()
    write_reports(directory, run_of(results_of([]), tmp_path))
    assert "No model has been trained yet." in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.csv").read_text().count("\n") == 1


def test_a_fault_of_the_page_is_reported_and_leaves_the_tables(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[Exception] = [ZeroDivisionError("a fault of ours")]

    def fault(run: Run) -> None:
        raise faults[0]

    monkeypatch.setattr(written, "write_page", fault)
    assert refresh(directory) == TABLES
    [record] = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info is not None, "with its traceback"
    assert "report.html: cannot be drawn" in record.message and "`xdm-ft report" in record.message
    with pytest.raises(ZeroDivisionError):
        write_reports(directory, read_run(directory.path))
    faults[0] = UserError("the disk is full")  # which the user can repair
    with pytest.raises(UserError, match="the disk is full"):
        refresh(directory)
