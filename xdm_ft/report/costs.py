"""What the models of each method cost: trained parameters, seconds and memory, means over the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from xdm_ft.evaluation.records import Record
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.table_rows import EMPTY, ResultTable, Summary, in_unit, number

COLUMNS = ("trained parameters", "seconds", "peak memory")
SHARED = "their models trained together and share their memory, so a model has no peak of its own"


class Cost(NamedTuple):
    """The mean cost of training one model; None where no model has the number."""

    trained_parameters: float | None
    train_seconds: float | None
    peak_memory: float | None  # bytes

    def texts(self) -> list[str]:
        """Returns a cell for each of `COLUMNS`."""
        return [count_text(self.trained_parameters), seconds_text(self.train_seconds), bytes_text(self.peak_memory)]


def costs(records: Sequence[Record]) -> dict[str, Cost]:
    """Returns {method: mean cost of its trained models}, of all seeds, held-out sets and trials."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.status == "ok":
            found.setdefault(record.method, []).append(record)
    return {method: Cost(*(_mean(own, name) for name in Cost._fields)) for method, own in found.items()}


def _mean(records: Sequence[Record], name: str) -> float | None:
    known = [value for record in records if (value := getattr(record, name)) is not None]
    return fmean(known) if known else None


def cost_table(rows: Sequence[Summary], run: Run) -> ResultTable | None:
    """Returns what one model of each of these rows costs, and what the rule chooses by; None if no model was trained.

    Selection values stand here, and not among the test results, for one who picks a cut by them.
    """
    found, values = costs(run.records), run.selection_values
    shown = {row["method"]: found[row["method"]] for row in rows if row["method"] in found}
    if not shown:
        return None
    where = "they are a part of the test images" if run.rule == ORACLE else "test images are not in it"
    about = (
        ("Means", "of one model, over held-out sets, seeds and draws; features are computed once and not in it"),
        ("Selection value", f"mean {in_unit(run.metric)} on the images by which {run.rule} picked; {where}"),
    )
    cells = tuple((method, number(values.get(method), run.metric), *cost.texts()) for method, cost in shown.items())
    return ResultTable("Cost", about, ("method", "selection value", *COLUMNS), cells, shared_memory(shown), level=3)


def shared_memory(found: Mapping[str, Cost]) -> tuple[tuple[str, str], ...]:
    """Returns the note on methods whose memory is not known, of runs that measure it; without any, none."""
    measured = [method for method, cost in found.items() if cost.trained_parameters is not None]
    missing = [method for method in measured if found[method].peak_memory is None]
    return ((", ".join(missing), SHARED),) if missing else ()


def count_text(count: float | None) -> str:
    """Returns a number of things: 5,130 or 85.8 million."""
    if count is None:
        return EMPTY
    return f"{count / 1e6:,.1f} million" if count >= 1e6 else f"{count:,.0f}"


def seconds_text(seconds: float | None) -> str:
    """Returns a time in seconds with three digits, or all of those before the point."""
    if seconds is None:
        return EMPTY
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


def bytes_text(size: float | None) -> str:
    """Returns a size: 9.9 kB, 12.3 MB or 4.5 GB."""
    if size is None:
        return EMPTY
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB") if size >= 1e6 else (1e3, "kB")
    return f"{size / unit:,.1f} {name}"
