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
from xdm_ft.report.means import Picked
from xdm_ft.report.section import Section, Table, cells, metric_cell
from xdm_ft.report.sections.differences import comparison_table, differences
from xdm_ft.report.sections.results import metric_table, results
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
DATA = "data: content of images, classes, domains or groups"  # known by its checksums alone


def check_same_protocol(runs: Sequence[Run]) -> None:
    """Raises `UserError` if a run has no table, or another protocol than the first one."""
    for run in runs:
        if not run.own_rows:
            raise UserError(f"{run.path}: has no table, as the run is not finished; run the same command to finish it")
    first = runs[0]
    for run in runs[1:]:
        differs = []
        for (what, value), other in zip(_protocol(first).items(), _protocol(run).values(), strict=True):
            if value != other:
                differs.append(what if what == DATA else f"{what} ({_short(value)} and {_short(other)})")
        if differs:
            raise UserError(
                f"{first.path} and {run.path}: their protocols differ in {'; '.join(differs)}; such numbers are not "
                "comparable, so report each run by itself"
            )


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


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…")


def run_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Returns {path of a run: what the table calls it}: its name, or its path if another run has that name."""
    names = [str(run.results["recipe"]["name"]) for run in runs]
    return {run.path: str(run.path) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)}


def side_by_side(runs: Sequence[Run], between: Sequence[Comparison]) -> list[Section]:
    """Returns the rows of all runs under the recipes' own rule, comparisons `between` runs, and other metrics."""
    names, rule, metric = run_names(runs), runs[0].own_rule, runs[0].metric
    lines: dict[str, list[str]] = {}  # protocol line → names of runs
    for run in runs:
        lines.setdefault(run.own_rows[0].protocol, []).append(names[run.path])
    protocols = [f"{', '.join(of_runs)}: {line}" if len(lines) > 1 else line for line, of_runs in lines.items()]
    made = [(names[run.path], section) for run in runs for section in (results(run, rule), differences(run, rule))]
    first = Section(
        "runs",
        f"{len(runs)} runs side by side, selection: {rule}, {in_unit(metric)}",
        "Compared within each run; the next table compares runs with each other.",
        tables=[_table(runs, f"Protocol: {'; '.join(protocols)}")],
        notes=[f"{name}, {note}" for name, section in made if section is not None for note in section.notes],
    )
    sections = [first]
    if between:
        shown = {f"{row.first} − {row.second}": row for row in between}
        about = (
            "Later − first, over the same images, with all complete seeds of each run (from ten common ones on, these "
            "alone); p (Holm) is corrected for this table."
        )
        caption = f"Later − first, in {unit_of_difference(metric)}."
        table = comparison_table(caption, metric, shown, rule, ("first", "second"))
        notes = each_once((label, row.note) for label, row in shown.items())
        sections.append(Section("between", "Runs compared with the first one", about, tables=[table], notes=notes))
    models = [(run, Picked(run, rule)) for run in runs]
    rows = [((names[run.path], row.method), picked, row.method) for run, picked in models for row in run.own_rows]
    others = metric_table(rows, ["run", "method"], rule)
    return [*sections, Section("metrics", "All metrics", "Means over held-out sets and seeds.", tables=[others])]


def _table(runs: Sequence[Run], caption: str) -> Table:
    names, metric, mark = run_names(runs), runs[0].metric, oracle_mark(runs[0].own_rule)
    domains = list(dict.fromkeys(domain for run in runs for row in run.own_rows for domain in row.per_test_domain))
    beside = [row for run in runs for row in _beside(run)]
    references = [name for run in runs for name in reference_names(_beside(run), run.results)]
    versus = versus_columns(references, [difference_text(row, metric) for row in beside])
    tested = header_of(beside)
    rows = []
    of_runs = [(run, row) for run in runs for row in run.own_rows]
    for i, (run, row) in enumerate(of_runs):
        of_method, shown = properties(run, row.method), row.to_json()
        line = cells(
            names[run.path], row.method, *(of_method[k] for k in ("encoder", "encoder_trained", "augmentation"))
        )
        means = [metric_cell(row.per_test_domain.get(domain, {}).get("mean"), metric) for domain in domains]
        mean, differences_of = with_spread(shown, row.stderr), [texts[i] for texts in versus.values()]
        numbers = cells(mean, row.n, budget_text(shown), *differences_of)
        rows.append([*line, *means, *numbers, *cells_of(beside[i], metric, tested)])
    start = "run", f"method{mark}", "encoder", "encoder is", "augmentation"
    of_its_run = [f"{head} of its run" for head in versus]
    header = [*start, *domains, f"mean ± stderr{mark}", "seeds", "draws × gradients", *of_its_run, *tested]
    return Table(caption, header, rows, labels=2)


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
    rows: dict[tuple[Path, str], Runs] = {}
    for path, method, picked in ((run.path, row.method, run.picked) for run in runs for row in run.own_rows):
        records = tuple(record for record in picked if record.method == method)
        fixed = any(record.deterministic for record in records)
        rows[path, method] = Runs(f"{names[path]}: {method}", rule, metric, held_out, records, fixed)
    references = [row.method for row, comparison in zip(first.own_rows, _beside(first), strict=True) if not comparison]
    pairs = []
    for (path, method), row in rows.items():
        reference = rows.get((first.path, method)) or (rows[first.path, references[0]] if references else None)
        if path != first.path and reference is not None:
            pairs.append(Pair(row, reference))
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
    comparisons = [comparison for pair in pairs if (comparison := compared(pair, without)) is not None]
    return judge(metric, comparisons, [True] * len(comparisons))
