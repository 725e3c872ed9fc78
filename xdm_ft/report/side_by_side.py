"""Several runs in one table, and comparisons between them. Only runs of one protocol can stand in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xdm_ft.evaluation.records import Runs, SummaryRow, set_name
from xdm_ft.evaluation.verdicts import Comparison, Pair, WithoutGroups, compared, judge
from xdm_ft.report.comparisons import beside_rows, cells_of, header_of
from xdm_ft.report.csv_rows import properties
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.measures import Picked, other_measures
from xdm_ft.report.more_tables import cell
from xdm_ft.report.result_table import comparison_table, difference_text, notes_of, reference_names
from xdm_ft.report.table_rows import ResultTable, budget_text, in_unit, number, oracle_mark, versus_columns, with_spread
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.run_directory import RunDirectory

LONGEST = 60  # characters of a value in a message
ABOUT_RUNS = (
    "later − first, over the same images, with all complete seeds of each run (from ten common ones on, these alone); "
    "p (Holm) is corrected for this table"
)
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


def side_by_side(runs: Sequence[Run], between: Sequence[Comparison]) -> list[ResultTable]:
    """Returns the rows of all runs under the recipes' own rule, comparisons `between` runs, and other metrics."""
    names, rule, metric = run_names(runs), runs[0].own_rule, runs[0].metric
    rows = [(run, names[run.path], row) for run in runs for row in run.own_rows]
    domains = list(dict.fromkeys(domain for _, _, row in rows for domain in row.per_test_domain))
    mark = oracle_mark(rule)
    start = ("run", f"method{mark}", "encoder", "encoder is", "augmentation")
    of_runs = [_beside(run) for run in runs]
    beside = [one for own in of_runs for one in own]
    references = [name for run, own in zip(runs, of_runs, strict=True) for name in reference_names(own, run.results)]
    differences = [difference_text(one, metric) for one in beside]
    versus = {f"{head} of its run": cells for head, cells in versus_columns(references, differences).items()}
    tested = header_of([one for one in beside if one])
    header = (*start, *domains, f"mean ± stderr{mark}", "seeds", "draws × gradients", *versus, *tested)
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
        (("Compared", "within each run; the next table compares runs with each other"), *protocols),
        header,
        tuple(
            (
                *_start(run, name, row),
                *_numbers(row, domains),
                *(cells[place] for cells in versus.values()),
                *cells_of(beside[place], metric, tested),
            )
            for place, (run, name, row) in enumerate(rows)
        ),
        tuple(notes),
        labels=2,
    )
    title = "Runs compared with the first one"
    compared_runs = [comparison_table(title, between, metric, ABOUT_RUNS)] if between else []
    return [first, *compared_runs, _metrics(runs, names)]


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


def _beside(run: Run) -> list[Comparison | None]:
    shown = beside_rows(run.results, run.own_rule)
    return [shown.get(row.method) for row in run.own_rows]


def compare_runs(runs: Sequence[Run], names: Mapping[Path, str]) -> list[Comparison]:
    """Compares each row of the later runs with one of the first run, under the recipes' own rule; not under `oracle`.

    That is the row of the same name, or else the first one there that is compared with nothing. It is one family of
    verdicts, and no look at either run.
    """
    rule, metric, first = runs[0].own_rule, runs[0].metric, runs[0]
    if rule == ORACLE:
        return []
    held_out = tuple(dict.fromkeys(record.test_domains for record in first.picked))
    known: dict[tuple[Path, str], Runs] = {}
    for run in runs:
        for row in run.own_rows:
            records = tuple(record for record in run.picked if record.method == row.method)
            label = f"{names[run.path]}: {row.method}"
            fixed = any(record.deterministic for record in records)
            known[run.path, row.method] = Runs(label, rule, metric, held_out, records, fixed)
    plain = [row.method for row, one in zip(first.own_rows, _beside(first), strict=True) if one is None]
    pairs = []
    for (path, method), own in known.items():
        other = known.get((first.path, method), known.get((first.path, plain[0])) if plain else None)
        if path != first.path and other is not None:
            pairs.append(Pair(own, other))
    sides = {side.method for pair in pairs for side in pair}
    predictions = (
        dataclasses.replace(run.prediction(record), method=label)
        for run in runs
        for record in sorted(run.picked, key=lambda record: record.seed)
        if (label := f"{names[run.path]}: {record.method}") in sides
        # a copy of results.json alone has no predictions: then there is no verdict
        and RunDirectory(run.path).predictions_size(record.folder)
    )
    without = WithoutGroups(metric, pairs, predictions)
    found = [one for pair in pairs if (one := compared(pair, without)) is not None]
    return judge(metric, found, [True] * len(found))


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
        "protocol.selection": run.own_rule,
        "protocol.metric": run.metric,
        "tested on": run.results.get("tested_on"),
    }


def _difference(what: str, first: Any, other: Any) -> str:
    return what if what == DATA else f"{what} ({_short(first)} and {_short(other)})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")
