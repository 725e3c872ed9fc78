"""The other metrics of every method."""

from __future__ import annotations

from collections.abc import Sequence

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.report.finished import Run
from xdm_ft.report.frame import MEASURES, Picked
from xdm_ft.report.section import Section, Table, spread_cell, texts
from xdm_ft.report.words import IN_PERCENT, oracle_mark


def section(run: Run, rule: str) -> Section | None:
    methods = [row.method for row in run.rows if row.selection == rule]
    if not run.records or not methods:
        return None
    models = Picked(run, rule)
    lower = ", ".join(one.label for one in MEASURES if not HIGHER_IS_BETTER.get(one.score, True))
    units = ", ".join(one.label for one in MEASURES if one.score not in IN_PERCENT)
    return Section(
        id="metrics",
        title="All metrics",
        about="On the test images, the mean over held-out domains and seeds ± the standard error over seeds. Worst "
        "domain is the lowest accuracy of a held-out domain in each seed, worst class the lowest recall of a class, "
        f"the mean over the domains. In %, except for {units} in nats. Higher is better, except for {lower}.",
        tables=[metric_table([([method], models, method) for method in methods], ["method"], rule)],
    )


def metric_table(rows: Sequence[tuple[Sequence[str], Picked, str]], labels: Sequence[str], rule: str) -> Table:
    """Returns a row per (labels, models, method)."""
    cells = [
        texts(*row_labels) + [spread_cell(models.mean(method, measure), measure.score) for measure in MEASURES]
        for row_labels, models, method in rows
    ]
    header = [*labels[:-1], f"{labels[-1]}{oracle_mark(rule)}", *(measure.label for measure in MEASURES)]
    return Table("Every metric of the picked models.", header, cells, labels=len(labels))
