"""The table of methods and held-out domains, and the same as a plot."""

from __future__ import annotations

from typing import Any

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import SummaryRow
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.page import figures, numbers
from xdm_ft.report.page.panel import Cell, Figure, Panel, Table
from xdm_ft.report.table_rows import number, with_spread, with_unit


def panel(run: Run) -> Panel | None:
    if not run.rows:
        return None
    rules = list(dict.fromkeys(row.selection for row in sorted(run.rows, key=lambda r: r.selection != run.own_rule)))
    better = "Higher" if HIGHER_IS_BETTER[run.metric] else "Lower"
    return Panel(
        id="results",
        title="Results",
        about=f"{numbers.axis_label(run.metric).capitalize()} on images of "
        f"{run.results.get('tested_on', 'held-out domains')}, the mean over seeds. {better} is better. Below a number "
        "is its 95% interval over seeds and test images, where it can be estimated: how far this number would move "
        "with other seeds and other images of the same domains.",
        figures=[plot] if (plot := _plot(run)) else [],
        tables=[_table(run, rule) for rule in rules],
        notes=_notes(run),
    )


def _table(run: Run, rule: str) -> Table:
    rows = [row for row in run.rows if row.selection == rule]
    domains = list(dict.fromkeys(domain for row in rows for domain in row.per_test_domain))
    caption = f"Selection: {rule}" + (" (the recipe's rule)" if rule == run.own_rule else "")
    if rule == ORACLE:
        caption += ". CHEATING: the step was picked on images of the test domain; this is no result"
    return Table(
        caption=f"{caption}. ± is the standard error over seeds.",
        header=["method", "mean ±", *domains, "seeds"],
        rows=[_cells(run, row, domains) for row in rows],
        folded=rule != run.own_rule,
    )


def _cells(run: Run, row: SummaryRow, domains: list[str]) -> list[Cell]:
    own, found = row.selection == run.own_rule, numbers.mean_interval(run, row)
    mean = Cell(with_spread(row.to_json(), row.stderr), row.mean, numbers.between(row.metric, found) if found else "")
    cells = [Cell(row.method), mean]
    for domain in domains:
        value = row.per_test_domain.get(domain, {}).get("mean")
        found = numbers.domain_interval(run, row.method, domain) if own and value is not None else None
        cells.append(Cell(number(value, row.metric), value, numbers.between(row.metric, found) if found else ""))
    return [*cells, Cell(f"{row.n}", row.n)]


def _notes(run: Run) -> list[str]:
    """What the best row is worth, and what is missing or doubtful, with its methods."""
    best = "The best row by test value is about a point of accuracy too good; the method that validation chose is not."
    found = [(row.method, row.reason) for row in run.own_rows if row.reason]
    doubts = numbers.noted([*found, *((row.method, flag) for row in run.own_rows for flag in row.flags or ())])
    return [best, *doubts] if len(run.own_rows) > 1 and run.own_rule != ORACLE else doubts


def _plot(run: Run) -> Figure | None:
    rows = [row for row in run.own_rows if row.mean is not None]
    domains = list(dict.fromkeys(domain for row in rows for domain in row.per_test_domain))
    if not rows or len(rows) * len(domains) < 2:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            for i, domain in enumerate(domains):
                _dot(run, axes, place + _offset(i, len(domains)), row, domain, figures.look(i))
            if len(domains) > 1 and row.mean is not None:
                x = numbers.axis_value(run.metric, row.mean)
                axes.plot(
                    x,
                    place,
                    "|",
                    color=figures.INK,
                    markersize=18,
                    markeredgewidth=2,
                    label="mean" if not place else None,
                )
        axes.set_yticks(range(len(rows)), [figures.short(row.method) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(numbers.axis_label(run.metric))
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside upper left", ncols=min(3, len(domains) + 1), fontsize=8, handletextpad=0.2)

    best = ", ".join(f"{row.method} {with_unit(run.metric, row.mean or 0)}" for row in rows)
    return Figure(
        name="results",
        svg=figures.svg("results", draw, 4.6, 1.1 + len(rows) * max(0.3, 0.085 * len(domains))),
        alt=f"Dot plot of {numbers.axis_label(run.metric)} by method and held-out domain. Means: {best}.",
        caption="One dot per held-out domain, with its 95% interval over seeds and test images."
        + (" The bar is the mean over the domains. Compare methods within a domain." if len(domains) > 1 else ""),
    )


def _offset(number: int, of: int) -> float:
    return 0.0 if of == 1 else (number / (of - 1) - 0.5) * 0.6


def _dot(run: Run, axes: Any, place: float, row: SummaryRow, domain: str, look: tuple[str, str]) -> None:
    value = row.per_test_domain.get(domain, {}).get("mean")
    if value is None:
        return
    colour, marker = look
    x, found = numbers.axis_value(run.metric, value), numbers.domain_interval(run, row.method, domain)
    if found is not None:
        ends = [numbers.axis_value(run.metric, end) for end in found]
        axes.plot(ends, [place, place], color=colour, linewidth=1.4)
    first = row.method == next(one.method for one in run.own_rows if domain in one.per_test_domain)
    label = figures.short(domain) if first else None
    axes.plot(x, place, marker, color=colour, markersize=5, label=label)
