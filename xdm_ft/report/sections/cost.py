"""What models and encoders cost."""

from __future__ import annotations

from collections.abc import Mapping

from xdm_ft.report.finished import ORACLE, Run, encoders_of
from xdm_ft.report.frame import Cost, costs
from xdm_ft.report.section import Cell, Section, Table, metric_cell
from xdm_ft.report.words import EMPTY, bytes_text, count_text, in_unit, seconds_text

SHARED = "their models trained together and share their memory, so a model has no peak of its own"
ENCODER_COLUMNS = ("encoder", "model", "pre-training", "width", "parameters", "ms per image", "features on disk")


def section(run: Run) -> Section | None:
    """Selection values stand here, and not among the test results, for one who picks a cut by them."""
    by_method, values = costs(run.records), run.selection_values
    shown = {row.method: by_method[row.method] for row in run.own_rows if row.method in by_method}
    if not shown:
        return None
    where = "they are a part of the test images" if run.rule == ORACLE else "test images are not in it"
    header = ["method", "selection value", "trained parameters", "seconds", "peak memory"]
    rows = [
        [Cell(method), metric_cell(values.get(method), run.metric), *_cells(cost)] for method, cost in shown.items()
    ]
    return Section(
        id="cost",
        title="Cost",
        about="What training one model takes, the mean over held-out sets, seeds and draws. Features of a frozen part "
        "of the encoder are computed once, before training, and are not in it. The selection value is the mean "
        f"{in_unit(run.metric)} on the images by which {run.rule} picked; {where}.",
        tables=[Table("The mean cost of one model.", header, rows), *_encoders(run)],
        notes=_shared_memory(shown),
    )


def _cells(cost: Cost) -> list[Cell]:
    texts = count_text(cost.trained_parameters), seconds_text(cost.train_seconds), bytes_text(cost.peak_memory)
    return [Cell(text, value) for text, value in zip(texts, cost, strict=True)]


def _shared_memory(shown: Mapping[str, Cost]) -> list[str]:
    """Returns the note on methods whose memory is not known, of runs that measure it."""
    measured = [method for method, cost in shown.items() if cost.trained_parameters is not None]
    missing = [method for method in measured if shown[method].peak_memory is None]
    return [f"{', '.join(missing)}: {SHARED}"] if missing else []


def _encoders(run: Run) -> list[Table]:
    rows = []
    for label, about in encoders_of(run.results).items():
        model = f"{about['component']} {about['model'] or ''}".rstrip()
        ms = about["ms_per_image"]
        texts = str(about["width"]), count_text(about["parameters"]), EMPTY if ms is None else f"{ms:.3g}"
        values = about["width"], about["parameters"], ms
        sized = [Cell(text, value) for text, value in zip(texts, values, strict=True)]
        size = Cell(bytes_text(about["feature_bytes"]), about["feature_bytes"])
        rows.append([Cell(label), Cell(model), Cell(about["pretraining"]), *sized, size])
    caption = "The encoders. Milliseconds to encode one image on the machine of the run; bytes of all cached features."
    return [Table(caption, ENCODER_COLUMNS, rows, labels=3)] if rows else []
