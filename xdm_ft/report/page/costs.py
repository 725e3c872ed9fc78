"""What models and encoders cost."""

from __future__ import annotations

from xdm_ft.report.costs import COLUMNS, costs, shared_memory
from xdm_ft.report.encoders import ENCODER_COLUMNS, encoder_cells, encoders_of
from xdm_ft.report.finished import Run
from xdm_ft.report.page import numbers
from xdm_ft.report.page.panel import Cell, Panel, Table


def panel(run: Run) -> Panel | None:
    found = costs(run.records)
    shown = {row.method: found[row.method] for row in run.own_rows if row.method in found}
    if not shown:
        return None
    rows = [
        [Cell(method), *(Cell(text, value) for text, value in zip(cost.texts(), cost, strict=True))]
        for method, cost in shown.items()
    ]
    tables = [Table("The mean cost of one model.", ["method", *COLUMNS], rows)]
    if encoders := _encoders(run):
        tables.append(encoders)
    return Panel(
        id="cost",
        title="Cost",
        about="What training one model takes, the mean over held-out sets, seeds and draws. Features of a frozen part "
        "of the encoder are computed once, before training, and are not in it.",
        tables=tables,
        notes=numbers.noted(shared_memory(shown)),
    )


def _encoders(run: Run) -> Table | None:
    """What the encoders are; None if it is not known."""
    found = encoders_of(run.results)
    rows = []
    for label, about in found.items():
        model, pretraining, *texts = encoder_cells(about)
        values = (about[key] for key in ("width", "parameters", "ms_per_image", "feature_bytes"))
        sized = [Cell(text, value) for text, value in zip(texts, values, strict=True)]
        rows.append([Cell(label), Cell(model), Cell(pretraining), *sized])
    caption = "The encoders. Milliseconds to encode one image on the machine of the run; bytes of all cached features."
    return Table(caption, list(ENCODER_COLUMNS), rows) if rows else None
