"""Several runs in one table. Only runs of one protocol can stand in it; no difference between runs gets a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xdm_ft.errors import UserError, printable
from xdm_ft.evaluation.records import SummaryRow
from xdm_ft.evaluation.runs import set_name
from xdm_ft.report.csv_rows import properties
from xdm_ft.report.finished import Run
from xdm_ft.report.measures import Picked, other_measures
from xdm_ft.report.more_tables import cell
from xdm_ft.report.table_rows import (
    EMPTY,
    ResultTable,
    budget_text,
    difference_text,
    in_unit,
    notes_of,
    number,
    oracle_mark,
    reference_names,
    versus_columns,
    with_spread,
)

LONGEST = 60  # characters of a value in a message
DATA = "data: content of images, classes, domains or groups"  # known by its checksums alone


def check_same_protocol(runs: Sequence[Run]) -> None:
    """Raises `UserError` if a run has no table, or another protocol than the first one."""
    for run in runs:
        if not run.own_rows:
            raise UserError(f"{run.path}: has no table, as the run is not finished; run the same command to finish it")
    first, protocol = runs[0], _protocol(runs[0])
    for run in runs[1:]:
        differs = [
            _difference(what, value, other)
            for (what, value), other in zip(protocol.items(), _protocol(run).values(), strict=True)
            if value != other
        ]
        if differs:
            raise UserError(
                f"{first.path} and {run.path}: their protocols differ in {'; '.join(differs)}; such numbers are not "
                "comparable, so report each run by itself"
            )


def side_by_side(runs: Sequence[Run]) -> list[ResultTable]:
    """Returns two tables with the rows of all runs under the recipes' own rule: the metric, and other metrics."""
    names, rule, metric = run_names(runs), runs[0].own_rule, runs[0].metric
    rows = [(run, names[run.path], row) for run in runs for row in run.own_rows]
    domains = list(dict.fromkeys(domain for _, _, row in rows for domain in row.per_test_domain))
    mark = oracle_mark(rule)
    start = ("run", f"method{mark}", "encoder", "encoder is", "augmentation")
    references = [name for run in runs for name in reference_names(_summary(run), run.results)]
    differences = [difference_text(row.to_json()) for _, _, row in rows]
    versus = {f"{head} of its run": cells for head, cells in versus_columns(references, differences).items()}
    header = (*start, *domains, f"mean ± stderr{mark}", "seeds", "draws × gradients", *versus, "verdict")
    notes = [
        (f"{names[run.path]}, {methods}", note)
        for run in runs
        for methods, note in notes_of(_summary(run), run.results)
    ]
    lines: dict[str, list[str]] = {}  # protocol line → names of runs
    for run in runs:
        lines.setdefault(run.own_rows[0].protocol, []).append(names[run.path])
    protocols = [("Protocol", f"{', '.join(of)}: {line}" if len(lines) > 1 else line) for line, of in lines.items()]
    first = ResultTable(
        f"{len(runs)} runs side by side, selection: {rule}, {in_unit(metric)}",
        (("Compared", "a verdict is about methods of one run; runs are not paired with each other"), *protocols),
        header,
        tuple(
            (
                *_start(run, name, row),
                *_numbers(row, domains),
                *(cells[place] for cells in versus.values()),
                _verdict(row),
            )
            for place, (run, name, row) in enumerate(rows)
        ),
        tuple(notes),
        labels=2,
    )
    return [first, _metrics(runs, names)]


def run_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Returns {path of a run: what the table calls it}: its name, or its path if another run has that name."""
    names = [str(run.results["recipe"]["name"]) for run in runs]
    return {run.path: str(run.path) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)}


def _summary(run: Run) -> list[dict[str, Any]]:
    return [row.to_json() for row in run.own_rows]


def _start(run: Run, name: str, row: SummaryRow) -> tuple[str, ...]:
    own = properties(run, row.method)
    return name, row.method, own["encoder"], own["encoder_trained"], own["augmentation"]


def _numbers(row: SummaryRow, domains: Sequence[str]) -> tuple[str, ...]:
    shown = row.to_json()
    of_domains = [number(row.per_test_domain.get(domain, {}).get("mean"), row.metric) for domain in domains]
    return *of_domains, with_spread(shown, row.stderr), str(row.n), budget_text(shown)


def _verdict(row: SummaryRow) -> str:
    return EMPTY if row.versus_erm is None else str(row.versus_erm["verdict"])


def _metrics(runs: Sequence[Run], names: dict[Path, str]) -> ResultTable:
    shown = other_measures(runs[0].metric)
    lines = []
    for run in runs:
        picked = Picked(run, run.own_rule)
        for row in run.own_rows:
            cells = [cell(picked.mean(row.method, measure), measure) for measure in shown]
            lines.append((names[run.path], row.method, *cells))
    header = ("run", f"method{oracle_mark(runs[0].own_rule)}", *(measure.label for measure in shown))
    return ResultTable("Other metrics", (), header, tuple(lines), level=3, labels=2)


def _protocol(run: Run) -> dict[str, Any]:
    """{what runs in one table have in common: its value}."""
    recipe, environment = run.results["recipe"], run.results["environment"]
    protocol, data = recipe["protocol"], environment.get("data", {})
    return {
        "data: images": data.get("images"),
        DATA: [data.get("annotations"), data.get("content")],
        "split": [protocol.get(key) for key in ("name", "split_rule", "val_fraction")],
        "held-out domains": sorted({set_name(entry["test_domains"]) for entry in run.results["runs"]}),
        "protocol.seeds": protocol.get("seeds"),
        "protocol.selection": run.own_rule,
        "protocol.metric": run.metric,
        "tested on": run.results.get("tested_on"),
    }


def _difference(what: str, first: Any, other: Any) -> str:
    return what if what == DATA else f"{what} ({_short(first)} and {_short(other)})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")
