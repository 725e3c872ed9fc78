"""The differences to ERM, and those between encoders, with their intervals: forest plots and their numbers."""

from __future__ import annotations

from xdm_ft.evaluation.comparison import ALPHA
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.report.encoders import pair_name, pairs_of
from xdm_ft.report.finished import Run
from xdm_ft.report.page import numbers
from xdm_ft.report.page.forest import HEADER, cells, forest
from xdm_ft.report.page.panel import Cell, Panel, Table
from xdm_ft.report.table_rows import metric_words, reference_names

WITH_ENCODERS = " and all pairs of encoders"


def panel(run: Run) -> Panel | None:
    shown = {row.method: row.versus_erm for row in run.own_rows if row.versus_erm}
    if not shown:
        return None
    names = reference_names([row.to_json() for row in run.own_rows if row.versus_erm], run.results)
    several = len(set(names)) > 1
    reference = "the reference" if several else names[0]
    family = WITH_ENCODERS if pairs_of(run.results, run.own_rule) else ""
    return Panel(
        id="differences",
        title="Differences to ERM",
        about=f"Test {metric_words(run.metric)} of each method less that of {reference}, paired by held-out domain and "
        f"seed. {_better(run)} of the zero line is better. Holm's p is corrected for all methods of the table{family}; "
        f"below {ALPHA} the verdict is better or worse. The intervals are not corrected.",
        figures=[forest("differences", f"difference to {reference}", run.metric, shown)],
        tables=[
            Table(
                f"Differences to {reference} in {numbers.points(run.metric)}.",
                ["method", *(["versus"] if several else []), *HEADER],
                [
                    [Cell(method), *([Cell(str(name))] if several else []), *cells(run.metric, one)]
                    for (method, one), name in zip(shown.items(), names, strict=True)
                ],
            )
        ],
        notes=numbers.noted((method, one["note"]) for method, one in shown.items()),
    )


def between_encoders(run: Run) -> Panel | None:
    """The differences between all pairs of encoders; None in a run of one encoder."""
    pairs = pairs_of(run.results, run.own_rule)
    if not pairs:
        return None
    shown = {f"{pair['method']}: {pair_name(pair)}": pair for pair in pairs}
    rows = [[Cell(one["method"]), Cell(pair_name(one)), *cells(run.metric, one)] for one in pairs]
    return Panel(
        id="encoders",
        title="Differences between encoders",
        about=f"Test {metric_words(run.metric)} of each method under the first encoder less that under the second, "
        f"paired by held-out domain and seed, over the same images. {_better(run)} of the zero line the first is "
        f"better. Holm's p is corrected for all these pairs and the differences to ERM together; below {ALPHA} the "
        "verdict is better or worse. The intervals are not corrected.",
        figures=[forest("encoders", "difference between encoders", run.metric, shown)],
        tables=[
            Table(f"First − second, in {numbers.points(run.metric)}.", ["method", "first − second", *HEADER], rows)
        ],
        notes=numbers.noted((label, one["note"]) for label, one in shown.items()),
    )


def _better(run: Run) -> str:
    return "Right" if HIGHER_IS_BETTER[run.metric] else "Left"
