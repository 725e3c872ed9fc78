"""The other metrics of every method."""

from __future__ import annotations

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.report.finished import Run
from xdm_ft.report.measures import MEASURES
from xdm_ft.report.more_tables import cell
from xdm_ft.report.page.numbers import metric_words, own_models
from xdm_ft.report.page.panel import Cell, Panel, Table
from xdm_ft.report.table_rows import IN_PERCENT


def panel(run: Run) -> Panel | None:
    if not run.picked or not run.own_rows:
        return None
    picked = own_models(run)
    rows = []
    for row in run.own_rows:
        values = [(picked.mean(row.method, measure), measure) for measure in MEASURES]
        rows.append([Cell(row.method), *(Cell(cell(spread, measure), spread.mean) for spread, measure in values)])
    lower = ", ".join(metric_words(one.name) for one in MEASURES if not HIGHER_IS_BETTER.get(one.attribute, True))
    units = ", ".join(metric_words(one.name) for one in MEASURES if one.attribute not in IN_PERCENT)
    return Panel(
        id="metrics",
        title="All metrics",
        about="On the test images, the mean over held-out domains and seeds ± the standard error over seeds. Worst "
        "domain is the lowest accuracy of a held-out domain in each seed, worst class the lowest recall of a class, "
        f"the mean over the domains. In %, except for {units}. Higher is better, except for {lower}.",
        tables=[
            Table("Every metric of the picked models.", ["method", *(metric_words(m.name) for m in MEASURES)], rows)
        ],
    )
