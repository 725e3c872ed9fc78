"""A page of a large run stays small."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_runs import Named, write_run
from parsed import Page

from xdm_ft.report.page import write_page

MOST = 5_000_000  # bytes


@pytest.mark.slow
def test_fifteen_methods_and_six_domains(tmp_path: Path) -> None:
    # no figure or table grows with the seeds: two of them take less time than twenty
    data = Named([f"domain {number}" for number in range(6)], [f"class {number}" for number in range(10)], each=4)
    write_page(write_run(tmp_path, data, ["erm", *(f"method {number}" for number in range(14))], seeds=2))
    assert (tmp_path / "report.html").stat().st_size < MOST
    page = Page(tmp_path / "report.html")
    assert len(page.table("Selection: train_val").rows) == 16
