"""Several runs in one table, and comparisons between them. Only runs of one protocol can stand in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xdm_ft.core import ORACLE, set_name
from xdm_ft.report import Section, Table, cells, comparisons, make_section, metric_cell
from xdm_ft.report.csv import properties
from xdm_ft.report.sections.results import metric_table, results
from xdm_ft.report.words import budget_text, each_once, in_unit, oracle_mark, unit_of_difference, with_spread
from xdm_ft.results import Runs, defined_sets
from xdm_ft.results.measured import Picked
from xdm_ft.results.model import group_by
from xdm_ft.results.run import Run
from xdm_ft.results.table import Comparison
from xdm_ft.results.verdicts import Pair, WithoutGroups, compared, judge
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.run_directory import RunDirectory

MAX_SHOWN = 60  # characters of a value in a message
DATA = "data: content of images, classes, domains or groups"  # known by its checksums alone


def check_same_protocol(runs: Sequence[Run]) -> None:
    """Raises `UserError` if a run has no table, or another protocol than the first one."""

    def short(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return printable(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…")

    protocols = []
    for run in runs:
        if not run.recipe_rows:
            raise UserError(f"{run.path}: has no table, as the run is not finished; run the same command to finish it")
        protocol, data = run.recipe.protocol, run.results["environment"]["data"]
        of_run = {
            "data: images": data["images"],
            # runs may differ in soft labels, which train and do not test
            DATA: [data.get("without_soft_labels", data["annotations"]), data["content"]],
            "split": [protocol.name, protocol.split_rule, protocol.val_fraction],
            "protocol.together": protocol.together,  # cross_domain leaves these sets out of training, too
            "protocol.folds": protocol.folds,
            "held-out domains": sorted(set_name(held) for held in run.held_out_sets),
            "protocol.selection": run.recipe_rule,
            "protocol.metric": run.metric,
            "tested on": run.results["tested_on"],
        }
        protocols.append(of_run)
    for run, other_protocol in zip(runs[1:], protocols[1:], strict=True):
        pairs = [
            (key, value, other_protocol[key]) for key, value in protocols[0].items() if value != other_protocol[key]
        ]
        differs = [key if key == DATA else f"{key} ({short(value)} and {short(other)})" for key, value, other in pairs]
        if differs:
            raise UserError(
                f"{runs[0].path} and {run.path}: their protocols differ in {'; '.join(differs)}; such numbers are not "
                "comparable, so report each run by itself"
            )


def run_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Returns {path of a run: what the table calls it}: its name, or its path if another run has that name."""
    names = [run.recipe.name for run in runs]
    return {run.path: str(run.path) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)}


def side_by_side(runs: Sequence[Run], between: Sequence[Comparison]) -> list[Section]:
    """Returns the rows of all runs under the recipes' own rule, comparisons `between` runs, and other metrics."""
    names, rule, metric = run_names(runs), runs[0].recipe_rule, runs[0].metric
    of_lines = group_by(runs, lambda run: run.recipe_rows[0].protocol)
    protocols = list(of_lines)
    if len(of_lines) > 1:
        protocols = [f"{', '.join(names[run.path] for run in of)}: {line}" for line, of in of_lines.items()]
    shown = [
        (names[run.path], section)
        for run in runs
        for section in (results(run, rule), comparisons.differences(run, rule))
    ]
    notes = [f"{name}, {note}" for name, section in shown if section is not None for note in section.notes]
    table = _table(runs, f"Protocol: {'; '.join(protocols)}")
    sections = [
        make_section("runs", tables=[table], notes=notes, count=len(runs), rule=rule, unit=in_unit(metric)),
    ]
    if between:
        caption = f"Later − first, in {unit_of_difference(metric)}."
        table = comparisons.comparison_table(caption, metric, between, rule, ("later run", "first run"))
        notes = each_once((f"{row.first} − {row.second}", row.note) for row in between)
        sections.append(make_section("between", tables=[table], notes=notes))
    models = [(run, Picked(run.every, rule, run.metric)) for run in runs]
    rows = [((names[run.path], row.method), picked, row.method) for run, picked in models for row in run.recipe_rows]
    return [*sections, make_section("metrics-of-runs", tables=[metric_table(rows, ["run", "method"], rule)])]


def _table(runs: Sequence[Run], caption: str) -> Table:
    names, metric, mark = run_names(runs), runs[0].metric, oracle_mark(runs[0].recipe_rule)
    domains = list(dict.fromkeys(domain for run in runs for row in run.recipe_rows for domain in row.per_test_domain))
    beside = [row for run in runs for row in _beside(run)]
    references = [comparisons.reference_name(row, run) for run in runs for row in _beside(run)]
    versus = comparisons.versus_columns(beside, references, metric)
    tested_header, tested = comparisons.verdict_cells(beside, metric)
    rows, keys = [], ["encoder", "encoder_trained", "augmentation"]
    of_runs = [(run, row) for run in runs for row in run.recipe_rows]
    if any(row.class_weights for _, row in of_runs):
        keys.append("class_weights")
    for i, (run, row) in enumerate(of_runs):
        of_method, shown = properties(run, row.method), row.to_json()
        encoder = (of_method[key] for key in keys)
        means = (metric_cell(row.per_test_domain.get(domain, {}).get("mean"), metric) for domain in domains)
        numbers = cells(with_spread(shown, row.stderr), row.n, budget_text(shown))
        compared = (texts[i] for texts in versus.values())
        rows.append(cells(names[run.path], row.method, *encoder, *means, *numbers, *compared, *tested[i]))
    names_of = {"encoder_trained": "encoder is", "class_weights": "class weights"}
    start = "run", f"method{mark}", *(names_of.get(key, key) for key in keys)
    of_its_run = [f"{head} of its run" for head in versus]
    header = [*start, *domains, f"mean ± stderr{mark}", "seeds", "draws × gradients", *of_its_run, *tested_header]
    return Table(caption, header, rows, labels=2)


def _beside(run: Run) -> list[Comparison | None]:
    shown = run.beside_rows(run.recipe_rule)
    return [shown.get(row.method) for row in run.recipe_rows]


def compare_runs(runs: Sequence[Run], names: Mapping[Path, str]) -> list[Comparison]:
    """Compares each row of the later runs with one of the first run, under the recipes' own rule; not under `oracle`.

    That is the row of the same name, or else the first one there that is compared with nothing. It is one family of
    verdicts, and no look at either run.
    """
    rule, metric, first = runs[0].recipe_rule, runs[0].metric, runs[0]
    if rule == ORACLE:
        return []
    held_out = defined_sets(first.measured_records, rule, metric)
    rows: dict[tuple[Path, str], Runs] = {}
    for path, method, picked in (
        (run.path, row.method, run.measured_records) for run in runs for row in run.recipe_rows
    ):
        records = tuple(record for record in picked if record.method == method)
        fixed = any(record.deterministic for record in records)
        rows[path, method] = Runs(f"{names[path]}: {method}", rule, metric, held_out, records, fixed)
    references = [
        row.method for row, comparison in zip(first.recipe_rows, _beside(first), strict=True) if not comparison
    ]
    pairs = []
    for (path, method), row in rows.items():
        reference = rows.get((first.path, method)) or (rows[first.path, references[0]] if references else None)
        if path != first.path and reference is not None:
            pairs.append(Pair(row, reference))
    sides = {side.method for pair in pairs for side in pair}
    predictions = (
        dataclasses.replace(run.prediction(record), method=label)
        for run in runs
        # `WithoutGroups` sums in this order, which decides the rounding
        for record in sorted(run.measured_records, key=lambda record: record.seed)
        if (label := f"{names[run.path]}: {record.method}") in sides
        # a copy of results.json alone has no predictions: then there is no verdict
        and RunDirectory(run.path).predictions_size(record.folder)
    )
    without = WithoutGroups(metric, pairs, predictions)
    made = [comparison for pair in pairs if (comparison := compared(pair, without)) is not None]
    return judge(metric, made, [True] * len(made))
