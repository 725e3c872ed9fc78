"""The table of a selection rule: a row per method, with its comparison and what the table could have found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from xdm_ft.evaluation.records import split_label
from xdm_ft.evaluation.verdicts import Comparison
from xdm_ft.report.comparisons import beside_rows, cells_of, further, header_of, what_it_finds
from xdm_ft.report.finished import ORACLE
from xdm_ft.report.table_rows import (
    EMPTY,
    Results,
    ResultTable,
    Summary,
    budget_text,
    each_once,
    number,
    oracle_mark,
    own_rule,
    range_text,
    scaled,
    several_encoders,
    versus_columns,
    with_spread,
)

ABOUT_FURTHER = (
    "first − second, over the same images; p (Holm) is corrected for these comparisons and those of the table "
    "together, or for those alone that report.compare declares"
)


def result_table(rows: Sequence[Summary], results: Results) -> ResultTable:
    """Returns the table of one of the `groups`."""
    domains = list(dict.fromkeys(d for row in rows for d in row["per_test_domain"]))
    rule, metric = rows[0]["selection"], rows[0]["metric"]
    beside = beside_rows(results, rule)
    shown = [beside.get(row["method"]) for row in rows]
    budgeted = any("budget" in row for row in rows)
    mixed = _mixed_steps(results["runs"])
    mixing = any(row["method"] in mixed for row in rows)
    mark, tested = oracle_mark(rule), header_of([*beside.values()])
    header = [f"method{mark}", *domains, f"mean ± stderr{mark}", "seeds"]
    header += ["draws × gradients"] if budgeted else []
    differences = [difference_text(row, metric) for row in shown]
    versus = versus_columns(reference_names(shown, results), differences) if beside else {}
    header += [*versus, *tested] if beside else []
    header += ["mixed steps"] if mixing else []
    cells = []
    for place, row in enumerate(rows):
        per_domain = row["per_test_domain"]
        line = [row["method"], *(number(per_domain.get(d, {}).get("mean"), metric) for d in domains)]
        line += [with_spread(row, row["stderr"]), str(row["n"])]
        line += [budget_text(row)] if budgeted else []
        line += [column[place] for column in versus.values()]
        line += cells_of(shown[place], metric, tested) if beside else []
        line += [mixed.get(row["method"], EMPTY)] if mixing else []
        cells.append(tuple(line))
    about = (("Protocol", rows[0]["protocol"]),)
    return ResultTable(_heading(rule, results), about, tuple(header), tuple(cells), notes_of(rows, results))


def _heading(rule: str, results: Results) -> str:
    if rule == ORACLE:
        return f"selection: {rule} — CHEATING: the step was picked on test-domain images; not a result"
    return f"selection: {rule}" + (" (the recipe's rule)" if rule == own_rule(results) else "")


def _mixed_steps(runs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """{method: number of steps that used augmented features}, as a range if its runs differ."""
    found: dict[str, list[int]] = {}
    for run in runs:
        if run.get("mixed_steps") is not None:
            found.setdefault(run["method"], []).append(run["mixed_steps"])
    return {method: range_text(min(steps), max(steps)) for method, steps in found.items()}


def reference_names(rows: Iterable[Comparison | None], results: Results) -> list[str | None]:
    """Returns what each row is compared with, without the encoder, which is the row's own; None: with nothing."""
    encoders = several_encoders(results)
    return [None if row is None else split_label(row.second, encoders)[0] for row in rows]


def difference_text(row: Comparison | None, metric: str) -> str:
    return EMPTY if row is None else scaled(row.difference, metric, signed=True)


def notes_of(rows: Sequence[Summary], results: Results) -> tuple[tuple[str, str], ...]:
    """Each note on the rows once, with all methods that have it, and what the table could have found."""
    beside = beside_rows(results, rows[0]["selection"])
    shown = [beside.get(row["method"]) for row in rows]

    def found() -> Iterator[tuple[str, str]]:
        for row, one, name in zip(rows, shown, reference_names(shown, results), strict=True):
            notes = [row["reason"]] if "reason" in row else []
            compared = [f"versus {name}: {one.note}"] if one and one.note else []
            yield from ((row["method"], note) for note in (*notes, *row.get("flags", ()), *compared))

    return (
        *each_once(found()),
        *_unequal_budgets(rows),
        *(("this table", line) for line in what_it_finds(results, rows[0]["selection"], rows[0]["metric"])),
    )


def _unequal_budgets(rows: Iterable[Summary]) -> Iterator[tuple[str, str]]:
    """Yields a note if methods that take gradient steps differ in draws or gradient evaluations."""
    found: dict[str, list[str]] = {}
    for row in rows:
        evaluations = row.get("budget", {}).get("gradient_evaluations")
        if evaluations and evaluations["high"] > 0:
            found.setdefault(budget_text(row), []).append(row["method"])
    if len(found) > 1:
        yield "unequal budgets", "; ".join(f"{budget}: {', '.join(methods)}" for budget, methods in found.items())


def further_table(results: Results, rule: str, metric: str) -> ResultTable | None:
    """Returns the comparisons under a selection rule that stand beside no row; None if there are none."""
    rows = further(results, rule)
    return comparison_table("Further comparisons", rows, metric, ABOUT_FURTHER, oracle_mark(rule)) if rows else None


def comparison_table(heading: str, rows: Sequence[Comparison], metric: str, about: str, mark: str = "") -> ResultTable:
    """Returns a table with a line per comparison."""
    header = header_of(rows)
    cells = tuple((r.first, r.second, difference_text(r, metric), *cells_of(r, metric, header)) for r in rows)
    notes = each_once((f"{row.first} − {row.second}", row.note) for row in rows)
    heads = (f"first{mark}", "second", "difference", *header)
    return ResultTable(heading, (("Differences", about),), heads, cells, tuple(notes), level=3, labels=2)
