"""The tables of a selection rule below its first one: the other metrics, and what the rule picked in a search."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from xdm_ft.evaluation.records import Record, set_name
from xdm_ft.evaluation.summary import Spread
from xdm_ft.report.measures import Measure, Picked, other_measures
from xdm_ft.report.table_rows import EMPTY, ResultTable, Summary, oracle_mark, scaled

VALUES = 3  # more different values than these are shown as a range


def metric_table(rows: Sequence[Summary], picked: Picked) -> ResultTable:
    """Returns the metrics that the first table of these rows does not show: mean ± standard error over seeds."""
    shown = other_measures(rows[0]["metric"])
    cells = [[cell(picked.mean(row["method"], measure), measure) for measure in shown] for row in rows]
    header = (f"method{oracle_mark(picked.rule)}", *(measure.label for measure in shown))
    methods = [row["method"] for row in rows]
    lines = tuple((method, *line) for method, line in zip(methods, cells, strict=True))
    about = (
        ("Means", "over held-out sets and seeds; worst domain is the lowest of them in each seed; in %, NLL in nats"),
    )
    return ResultTable("Other metrics", about, header, lines, level=3)


def cell(spread: Spread, measure: Measure) -> str:
    """Returns mean ± standard error as text."""
    if spread.mean is None:
        return EMPTY
    mean = scaled(spread.mean, measure.attribute)
    return mean if spread.stderr is None else f"{mean} ± {scaled(spread.stderr, measure.attribute)}"


def searched_table(rows: Sequence[Summary], picked: Picked) -> ResultTable | None:
    """Returns the hyper-parameters that the rule selected on each held-out set; None if it selected none."""
    cells = []
    for method in (row["method"] for row in rows):
        found = [selected(record, picked.rule) for record in picked.of(method)]
        searched = searched_keys(picked, method)
        for key in dict.fromkeys([*searched, *(key for values in found for key in values)]):
            line = [_values(picked.of(method), held, key, picked.rule) for held in picked.held_out]
            cells.append((method, key, *line))
    if not cells:
        return None
    header = (f"method{oracle_mark(picked.rule)}", "hyper-parameter", *(set_name(held) for held in picked.held_out))
    about = (("Values", f"one per seed; of more than {VALUES} different numbers, the lowest and the highest"),)
    return ResultTable("Selected hyper-parameters", about, header, tuple(cells), level=3, labels=2)


def selected(record: Record, rule: str) -> dict[str, float]:
    """Returns what the rule selected within one training: strength of a solver, α, first averaged step."""
    return record.selected[rule].hparams if rule in record.selected else {}


def searched_keys(picked: Picked, method: str) -> list[str]:
    """Returns the keys whose values differ between trials of one held-out set and seed."""
    values: dict[tuple[Any, ...], dict[str, set[str]]] = {}
    for run in picked.run.results["runs"]:
        if run["method"] == method:
            of_trials = values.setdefault((*run["test_domains"], run["seed"]), {})
            for key, value in run["hparams"].items():
                of_trials.setdefault(key, set()).add(json.dumps(value))
    return list(dict.fromkeys(key for keys in values.values() for key, found in keys.items() if len(found) > 1))


def _values(records: Sequence[Record], held: tuple[str, ...], key: str, rule: str) -> str:
    """Returns the values of one key on one held-out set as text."""
    own = [record for record in records if record.test_domains == held and rule in record.selected]
    values = [every[key] for record in own if key in (every := record.hparams | selected(record, rule))]
    different = list(dict.fromkeys(_text(value) for value in values))
    if len(different) <= 1:
        return next(iter(different), EMPTY)
    if len(different) <= VALUES or not all(isinstance(value, int | float) for value in values):
        return ", ".join(_text(value) for value in values)
    return f"{_text(min(values))} to {_text(max(values))}"


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
