"""Published numbers beside ours."""

from __future__ import annotations

from xdm_ft.report.finished import Run
from xdm_ft.report.page.panel import Cell, Panel, Table
from xdm_ft.report.published import SOURCE, published_tables
from xdm_ft.report.table_rows import groups


def panel(run: Run) -> Panel | None:
    found = [table for rows in groups(run.results) for table in published_tables(rows, run.results)]
    if not found:
        return None
    return Panel(
        id="published",
        title="Published numbers beside ours",
        about=f"{SOURCE}. Encoder, training and protocol may differ from ours, so compare with care.",
        tables=[
            Table(
                " ".join(f"{what}: {text}." for what, text in one.about),
                one.header,
                [[Cell(text) for text in row] for row in one.rows],
                sortable=False,
            )
            for one in found
        ],
        folded=True,
    )
