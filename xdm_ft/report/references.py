"""Which ERM a row of the summary was compared with."""

from __future__ import annotations

from xdm_ft.evaluation.records import SummaryRow
from xdm_ft.report.encoders import item_of, split_row
from xdm_ft.report.finished import Run

COMPARED = "compared with "  # begins the note that names the reference, where a table has several


def reference_of(run: Run, row: SummaryRow) -> str | None:
    """Returns the label of the ERM that a row was compared with; None if it was compared with none."""
    if row.versus_erm is None:
        return None
    notes = str(row.versus_erm["note"]).split("; ")
    named = [note.removeprefix(COMPARED) for note in notes if note.startswith(COMPARED)]
    encoder = split_row(row.method, run.results)[1]
    uncompared = [one.method for one in run.rows if one.versus_erm is None]
    plain = [label for label in uncompared if item_of(label, run.results).get("name") == "erm"]
    return next(iter([*named, *(one for one in plain if split_row(one, run.results)[1] == encoder)]), "erm")
