"""Several runs in one table, and comparisons between them. Only runs of one protocol can stand in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xdm_ft.evaluation.records import Runs, set_name
from xdm_ft.evaluation.verdicts import Comparison, Pair, WithoutGroups, compared, judge
from xdm_ft.report.comparisons import beside_rows, cells_of, difference_text, header_of, reference_names
from xdm_ft.report.csv import properties
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.frame import Picked
from xdm_ft.report.section import Section, Table, metric_cell, texts
from xdm_ft.report.sections import differences, results
from xdm_ft.report.sections.differences import table as comparison_table
from xdm_ft.report.sections.metrics import metric_table
from xdm_ft.report.words import (
    budget_text,
    each_once,
    in_unit,
    oracle_mark,
    unit_of_difference,
    versus_columns,
    with_spread,
)  # fmt: skip
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.run_directory import RunDirectory

MAX_SHOWN = 60  # characters of a value in a message
ABOUT_RUNS = (
    "Later − first, over the same images, with all complete seeds of each run (from ten common ones on, these alone); "
    "p (Holm) is corrected for this table."
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


def side_by_side(runs: Sequence[Run], between: Sequence[Comparison]) -> list[Section]:
    """Returns the rows of all runs under the recipes' own rule, comparisons `between` runs, and other metrics."""
    names, rule = run_names(runs), runs[0].own_rule
    lines: dict[str, list[str]] = {}  # protocol line → names of runs
    for run in runs:
        lines.setdefault(run.own_rows[0].protocol, []).append(names[run.path])
    protocols = [f"{', '.join(own)}: {line}" if len(lines) > 1 else line for line, own in lines.items()]
    of_runs = [(names[run.path], note) for run in runs for note in _notes(run)]
    first = Section(
        id="runs",
        title=f"{len(runs)} runs side by side, selection: {rule}, {in_unit(runs[0].metric)}",
        about="Compared within each run; the next table compares runs with each other.",
        tables=[_table(runs, f"Protocol: {'; '.join(protocols)}")],
        notes=[f"{name}, {note}" for name, note in of_runs],
    )
    rows = [((names[run.path], row.method), run, row.method) for run in runs for row in run.own_rows]
    picked = {run.path: Picked(run, rule) for run in runs}
    metrics = metric_table([(label, picked[run.path], method) for label, run, method in rows], ["run", "method"], rule)
    others = Section("metrics", "All metrics", "Means over held-out sets and seeds.", tables=[metrics])
    return [first, *_between_runs(between, runs[0].metric, rule), others]


def _table(runs: Sequence[Run], caption: str) -> Table:
    names, metric, mark = run_names(runs), runs[0].metric, oracle_mark(runs[0].own_rule)
    domains = list(dict.fromkeys(domain for run in runs for row in run.own_rows for domain in row.per_test_domain))
    of_runs = [_beside(run) for run in runs]
    references = [name for run, own in zip(runs, of_runs, strict=True) for name in reference_names(own, run.results)]
    beside = [row for own in of_runs for row in own]
    versus = versus_columns(references, [difference_text(row, metric) for row in beside])
    tested = header_of(beside)
    rows = []
    pairs = [(run, row) for run in runs for row in run.own_rows]
    for i, (run, row) in enumerate(pairs):
        own, shown = properties(run, row.method), row.to_json()
        line = texts(names[run.path], row.method, own["encoder"], own["encoder_trained"], own["augmentation"])
        line += [metric_cell(row.per_test_domain.get(domain, {}).get("mean"), metric) for domain in domains]
        line += texts(
            with_spread(shown, row.stderr), row.n, budget_text(shown), *(cells[i] for cells in versus.values())
        )
        rows.append(line + cells_of(beside[i], metric, tested))
    start = "run", f"method{mark}", "encoder", "encoder is", "augmentation"
    of_its_run = [f"{head} of its run" for head in versus]
    header = [*start, *domains, f"mean ± stderr{mark}", "seeds", "draws × gradients", *of_its_run, *tested]
    return Table(caption, header, rows, labels=2)


def _between_runs(between: Sequence[Comparison], metric: str, rule: str) -> list[Section]:
    shown = {f"{row.first} − {row.second}": row for row in between}
    caption = f"Later − first, in {unit_of_difference(metric)}."
    tables = [comparison_table(caption, metric, shown, rule, first="first")] if shown else []
    notes = each_once((label, row.note) for label, row in shown.items())
    return (
        [Section("between", "Runs compared with the first one", ABOUT_RUNS, tables=tables, notes=notes)]
        if shown
        else []
    )


def _notes(run: Run) -> list[str]:
    """Returns the notes on the rows of a run and on their comparisons."""
    made = [results.section(run, run.own_rule), differences.section(run, run.own_rule)]
    return [note for section in made if section is not None for note in section.notes]


def run_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Returns {path of a run: what the table calls it}: its name, or its path if another run has that name."""
    names = [str(run.results["recipe"]["name"]) for run in runs]
    return {run.path: str(run.path) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)}


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
    return printable(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…")
