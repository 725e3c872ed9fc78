"""results.csv: a row per method, selection rule and held-out set, and one for their mean, with every metric.

models.parquet: a row per trained model and selection rule, of runs with so many that their JSON is slow to read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xdm_ft.core import set_name
from xdm_ft.evaluation.estimates import Spread
from xdm_ft.report.comparisons import between_encoders, further
from xdm_ft.report.words import trained_words
from xdm_ft.results.measured import MEASURES, NUMBERS, Measure, Picked, RunMeasures, TrainingCost, costs
from xdm_ft.results.model import Record
from xdm_ft.results.run import Run
from xdm_ft.results.table import Comparison
from xdm_ft.storage.lines import csv_line

CsvRow = dict[str, Any]
COMPARED = (
    "compared_with", "difference", "error", "freedom", "share_seeds", "here_low", "here_high", "p_here",
    "p_here_holm", "here", "elsewhere_low", "elsewhere_high", "p_elsewhere", "p_elsewhere_holm", "elsewhere",
    "equal_within", "note", "look",
)  # fmt: skip
COLUMNS = (
    "run", "encoder", "encoder_trained", "augmentation", "class_weights", "method", "selection", "of", "held_out",
    "seeds", "images", "metric", "mean", "std", "stderr", "low", "high",
    *(column for measure in MEASURES for column in (measure.name, f"{measure.name}_stderr")),
    *NUMBERS, *COMPARED, "draws", "gradient_evaluations_low", "gradient_evaluations_high", *TrainingCost._fields,
    "failed", "skipped", "reason", "flags", "protocol",
)  # fmt: skip
"""`of` is `mean` (over held-out sets), `held_out` (one of these sets), `domain` (of a set of several, accuracy alone)
or `encoders` (a method under two encoders), `compared` (any two rows) and `runs` (of two runs): comparisons that stand
beside no row. Metrics are fractions; `std` and `stderr` are over seeds, `low` and `high` end the 95% interval over
seeds and test images. `difference` and what follows compare the mean with the row `compared_with`. Costs are means over
models."""
MANY_MODELS = 1000  # from which a run has models.parquet


def csv_text(rows: Iterable[CsvRow]) -> str:
    """Returns rows as the text of a CSV file that a spreadsheet can open."""
    lines = ([row.get(name) for name in COLUMNS] for row in rows)
    return "".join([csv_line(COLUMNS, COLUMNS), *(csv_line(COLUMNS, line) for line in lines)])


def csv_rows(run: Run) -> Iterator[CsvRow]:
    """Yields the rows of a run, with its selection rules and methods in the order of the summary."""
    picked = {rule: Picked(run.every, rule, run.metric) for rule in dict.fromkeys(row.selection for row in run.rows)}
    nothing = RunMeasures("", {}, {})
    cost, beside = costs(run.records), {rule: run.beside_rows(rule) for rule in picked}
    for row in run.rows:
        models, evaluations = picked[row.selection], row.budget["gradient_evaluations"] or {}
        start = properties(run, row.method) | {
            "method": row.method,
            "selection": row.selection,
            "metric": row.metric,
            "draws": row.budget["draws"],
            "gradient_evaluations_low": evaluations.get("low"),
            "gradient_evaluations_high": evaluations.get("high"),
            "protocol": row.protocol,
            **(cost[row.method]._asdict() if row.method in cost else {}),
        }
        flags = "; ".join(row.flags or ()) or None
        missing = {"failed": row.failed, "skipped": row.skipped, "reason": row.reason, "flags": flags}
        compared = beside[row.selection].get(row.method)
        means = {measure.name: models.mean(row.method, measure) for measure in MEASURES}
        spread = Spread(row.mean, row.std, row.stderr, row.n)
        measured = run.measured_if_known if row.selection == run.recipe_rule else nothing
        of_mean = _numbers(spread, means) | measured.numbers(row.method, models.held_out)
        of_mean |= row.interval._asdict() if row.interval else {}
        yield start | {"of": "mean"} | of_mean | (_comparison(compared) if compared else {}) | missing
        for held in models.held_out:
            on_set = {measure.name: models.on(row.method, held, measure) for measure in MEASURES}
            headline = models.on(row.method, held, Measure(run.metric, run.metric))
            of_set = {"of": "held_out", "held_out": set_name(held), "images": models.images(row.method, held)}
            ends = {end: row.per_test_domain.get(set_name(held), {}).get(end) for end in ("low", "high")}
            yield start | of_set | _numbers(headline, on_set) | ends | measured.numbers(row.method, [held])
            # a set of one domain has its row already
            for domain, accuracy in models.accuracies(row.method, held).items() if len(held) > 1 else ():
                of_domain = {"of": "domain", "held_out": domain, "metric": "accuracy"}
                yield start | of_domain | _numbers(accuracy, {"accuracy": accuracy})
    for rule in beside:
        for pair in further(run, rule):
            kind = "encoders" if between_encoders(pair, run) else "compared"
            yield properties(run, pair.first) | comparison_row(pair, run.metric) | {"of": kind}


def properties(run: Run, method: str) -> CsvRow:
    """Returns what the models of a method have beside the protocol."""
    item = run.recipe.item(method)
    block = item.encoder.block
    model, weights = getattr(block, "model", "unknown encoder"), getattr(block, "weights", None)
    return {
        "run": run.recipe.name,
        "encoder": f"{model} ({Path(weights).name})" if isinstance(weights, str) else str(model),
        "encoder_trained": trained_words(item.record_fields["trainable"]),
        "augmentation": next(row.augmentation for row in run.rows if row.method == method),
        "class_weights": run.recipe.class_weights_of(item),
    }


def comparison_row(row: Comparison, metric: str) -> CsvRow:
    """Returns a row that holds a comparison alone."""
    return {"method": row.first, "selection": row.selection, "metric": metric} | _comparison(row)


def _comparison(row: Comparison) -> CsvRow:
    same = "difference", "error", "freedom", "share_seeds", "here", "elsewhere", "equal_within", "note", "look"
    cells: CsvRow = {"compared_with": row.second} | {name: getattr(row, name) for name in same}
    for name, estimate, p in (("here", row.on_these, row.p_here), ("elsewhere", row.on_others, row.p_elsewhere)):
        if estimate is not None:
            cells |= {f"{name}_{end}": value for end, value in estimate.interval()._asdict().items()}
        if p is not None:
            cells |= {f"p_{name}": p.plain, f"p_{name}_holm": p.holm}
    return cells


def _numbers(spread: Spread, values: Mapping[str, Spread]) -> CsvRow:
    row: CsvRow = {"mean": spread.mean, "std": spread.std, "stderr": spread.stderr, "seeds": spread.n}
    for name, value in values.items():
        row |= {name: value.mean, f"{name}_stderr": value.stderr}
    return row


def parquet_of(records: Iterable[Record]) -> bytes:
    """Returns models.parquet: a row per model and selection rule.

    Columns: method, seed, trial, what training took, test_domains (joined by ", "), hparams.KEY, selection, step, value
    (by which the rule picked), weights (address), and SPLIT.METRIC as fractions.
    """
    import pyarrow
    import pyarrow.parquet

    took = "train_seconds", "trained_parameters", "gradient_evaluations", "peak_memory"
    rows = []
    for record in records:
        start = {name: getattr(record, name) for name in ("method", "seed", "trial", *took)}
        start |= {"test_domains": ", ".join(record.test_domains)}
        start |= {f"hparams.{key}": value for key, value in record.hparams.items()}
        for rule, pick in record.selected.items():
            row = start | {"selection": rule, "step": pick.step, "value": pick.value, "weights": pick.weights}
            for split, score in pick.metrics.items():
                numbers = {name: value for name, value in vars(score).items() if isinstance(value, int | float)}
                row |= {f"{split}.{name}": value for name, value in numbers.items()}
            rows.append(row)
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if kinds == {int, float}:  # a column of Parquet has one type
            values = [None if value is None else float(value) for value in values]
        elif len(kinds) > 1 or not kinds <= {int, float, str, bool}:  # as settings of several methods may be: JSON
            values = [None if value is None else json.dumps(value) for value in values]
        columns[name] = values
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()
