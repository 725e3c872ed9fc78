"""The table of methods and held-out domains, the same as a plot, and the intervals of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import SummaryRow, set_name
from xdm_ft.evaluation.verdicts import Interval
from xdm_ft.report.charts import Figure, Look, Mark, Row, looks, points
from xdm_ft.report.finished import ORACLE, Run, items
from xdm_ft.report.pooled import interval
from xdm_ft.report.section import Cell, Section, Table, count_cell, metric_cell
from xdm_ft.report.words import (
    CHEATING,
    EMPTY,
    axis_value,
    between,
    budget_text,
    each_once,
    in_unit,
    metric_words,
    oracle_mark,
    range_text,
    short,
    with_spread,
    with_unit,
)  # fmt: skip


def section(run: Run, rule: str) -> Section:
    order = {label: position for position, label in enumerate(items(run.results))}
    of_rule = [row for row in run.rows if row.selection == rule]
    rows = sorted(of_rule, key=lambda row: order.get(row.method, len(order)))
    better = "Higher" if HIGHER_IS_BETTER[rows[0].metric] else "Lower"
    title = f"Results, selection: {rule}"
    if rule == ORACLE:
        title += f" — {CHEATING}"
    elif rule == run.own_rule:
        title += " (the recipe's rule)"
    return Section(
        id="results",
        title=title,
        about=f"Test {in_unit(rows[0].metric)} on images of {run.results.get('tested_on', 'held-out domains')}, the "
        f"mean over seeds; ± is the standard error over seeds. {better} is better.",
        figures=[plot] if rule == run.own_rule and (plot := _plot(run)) else [],
        tables=[_table(run, group) for group in _of_one_protocol(rows)],
        notes=[*_notes(run, rule, rows), *_unequal_budgets(rows)],
    )


def _of_one_protocol(rows: Iterable[SummaryRow]) -> list[list[SummaryRow]]:
    """Returns the rows of each table: no column mixes two protocols, metrics or kinds of ±."""
    groups: dict[tuple[str, ...], list[SummaryRow]] = {}
    for row in rows:
        kind = (row.spread_as_published or {}).get("kind", "")
        groups.setdefault((row.protocol, row.metric, row.split, kind), []).append(row)
    return list(groups.values())


def _table(run: Run, rows: list[SummaryRow]) -> Table:
    mark, metric = oracle_mark(rows[0].selection), rows[0].metric
    domains = list(dict.fromkeys(domain for row in rows for domain in row.per_test_domain))
    mixed = _mixed_steps(run)
    budgets = any(row.budget for row in rows)
    mixing = any(row.method in mixed for row in rows)
    header = [f"method{mark}", *domains, f"mean ± stderr{mark}", "seeds"]
    header += ["draws × gradients"] * budgets + ["mixed steps"] * mixing
    cells = []
    for row in rows:
        means = [metric_cell(row.per_test_domain.get(domain, {}).get("mean"), metric) for domain in domains]
        mean = Cell(with_spread(row.to_json(), row.stderr), row.mean)
        line = [Cell(row.method), *means, mean, count_cell(row.n)]
        line += [Cell(budget_text({"budget": row.budget}))] * budgets
        cells.append(line + [Cell(mixed.get(row.method, EMPTY))] * mixing)
    return Table(f"Protocol: {rows[0].protocol}", header, cells)


def _mixed_steps(run: Run) -> dict[str, str]:
    """Returns {method: number of steps that used augmented features}, as a range if its models differ."""
    steps: dict[str, list[int]] = {}
    for entry in run.results["runs"]:
        if entry.get("mixed_steps") is not None:
            steps.setdefault(entry["method"], []).append(entry["mixed_steps"])
    return {method: range_text(min(own), max(own)) for method, own in steps.items()}


def _notes(run: Run, rule: str, rows: list[SummaryRow]) -> list[str]:
    """What the best row is worth, and what is missing or doubtful, with its methods."""
    best = "The best row by test value is about a point of accuracy too good; the method that validation chose is not."
    doubts = each_once((row.method, note) for row in rows for note in (row.reason, *(row.flags or ())))
    return [best, *doubts] if len(rows) > 1 and rule != ORACLE else doubts


def _unequal_budgets(rows: Iterable[SummaryRow]) -> Iterator[str]:
    """Yields a note if methods that take gradient steps differ in draws or gradient evaluations."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        evaluations = (row.budget or {}).get("gradient_evaluations")
        if evaluations and evaluations["high"] > 0:
            methods.setdefault(budget_text({"budget": row.budget}), []).append(row.method)
    if len(methods) > 1:
        parts = (f"{budget}: {', '.join(names)}" for budget, names in methods.items())
        yield f"unequal budgets: {'; '.join(parts)}"


def _plot(run: Run) -> Figure | None:
    rows = [row for row in run.own_rows if row.mean is not None]
    domains = list(dict.fromkeys(domain for row in rows for domain in row.per_test_domain))
    if not rows or len(rows) * len(domains) < 2:
        return None
    series = looks(domains) | {"mean": Look("", "|", size=18)}
    legend = {domain: short(domain, 18) for domain in domains} | ({"mean": "mean"} if len(domains) > 1 else {})

    def marks(row: SummaryRow) -> Iterator[Mark]:
        for i, domain in enumerate(domains):
            value = row.per_test_domain.get(domain, {}).get("mean")
            if value is not None:
                ends = domain_interval(run, row.method, domain)
                shift = 0.6 * (i / (len(domains) - 1) - 0.5) if len(domains) > 1 else 0.0
                in_axis = None if ends is None else [axis_value(run.metric, end) for end in ends]
                yield Mark(domain, axis_value(run.metric, value), in_axis, shift)
        if len(domains) > 1 and row.mean is not None:
            yield Mark("mean", axis_value(run.metric, row.mean))

    means = ", ".join(f"{row.method} {with_unit(run.metric, row.mean or 0)}" for row in rows)
    bar = " The bar is the mean over the domains. Compare methods within a domain." if len(domains) > 1 else ""
    return points(
        "results",
        f"Dot plot of test {in_unit(run.metric)} by method and held-out domain. Means: {means}.",
        f"One dot per held-out domain, with its 95% interval over seeds and test images.{bar}",
        lambda: [Row(row.method, [*marks(row)]) for row in rows],
        f"test {in_unit(run.metric)}",
        series,
        legend,
        count=len(rows),
        row_height=max(0.3, 0.085 * len(domains)),
        width=4.6,
    )


def intervals(run: Run) -> Section | None:
    """The 95% intervals of the numbers of the first table; None without predictions that show them."""
    domains = list(dict.fromkeys(domain for row in run.own_rows for domain in row.per_test_domain))
    rows = []
    for row in run.own_rows:
        ends = [mean_interval(run, row), *(domain_interval(run, row.method, domain) for domain in domains)]
        if any(ends):
            rows.append([Cell(row.method), *(Cell(between(run.metric, one), one.low) if one else Cell(EMPTY)
                                             for one in ends)])  # fmt: skip
    if not rows:
        return None
    about = "How far the numbers would move with other seeds and other images of the same domains."
    caption = f"95% intervals of test {metric_words(run.metric)}, over seeds and test images."
    return Section("intervals", "Intervals", about, tables=[Table(caption, ["method", "mean", *domains], rows)])


def mean_interval(run: Run, row: SummaryRow) -> Interval | None:
    """Returns the 95% interval over seeds and test images of a row's mean; None if it is not known.

    It needs every seed in every held-out domain, and predictions, which rules other than the recipe's own lack.
    """
    if row.selection != run.own_rule or row.mean is None or row.reason is not None:
        return None
    pools = run.pools.of
    return interval([pools[row.method, held] for held in run.held_out_sets if (row.method, held) in pools], run.metric)


def domain_interval(run: Run, method: str, domain: str) -> Interval | None:
    """Returns the interval of a method on one column of the summary; None for one of several tested together."""
    held = next((held for held in run.held_out_sets if set_name(held) == domain), None)
    pool = None if held is None else run.pools.of.get((method, held))
    return None if pool is None else interval([pool], run.metric)
