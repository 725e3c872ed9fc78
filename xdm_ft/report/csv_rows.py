"""results.csv: a row per method, selection rule and held-out set, and one for their mean, with every metric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xdm_ft.evaluation.records import Held, SummaryRow, set_name
from xdm_ft.evaluation.summary import Spread
from xdm_ft.evaluation.verdicts import Comparison
from xdm_ft.report.comparisons import beside_rows, between_encoders, further
from xdm_ft.report.costs import Cost, costs
from xdm_ft.report.encoders import encoder_block, trainable_of, trained_words
from xdm_ft.report.finished import Run
from xdm_ft.report.measures import MEASURES, Picked
from xdm_ft.storage.csv_cells import csv_line

Row = dict[str, Any]
COLUMNS = (
    "run", "encoder", "encoder_trained", "augmentation", "method", "selection", "of", "held_out", "seeds", "images",
    "metric", "mean", "std", "stderr",
    *(column for measure in MEASURES for column in (measure.name, f"{measure.name}_stderr")),
    "compared_with", "difference", "error", "freedom", "share_seeds", "here_low", "here_high", "p_here",
    "p_here_holm", "here", "elsewhere_low", "elsewhere_high", "p_elsewhere", "p_elsewhere_holm", "elsewhere",
    "equal_within", "note", "look", "draws", "gradient_evaluations_low", "gradient_evaluations_high", *Cost._fields,
    "failed", "skipped", "reason", "flags", "protocol",
)  # fmt: skip
"""`of` is `mean` (over held-out sets), `held_out` (one of these sets), `domain` (of a set of several, accuracy alone)
or `encoders` (a method under two encoders), `compared` (any two rows) and `runs` (of two runs): comparisons that stand
beside no row. Metrics are fractions; `std` and `stderr` are over seeds. `difference` and what follows compare the mean
with the row `compared_with`. Costs are means over models."""


def csv_text(rows: Iterable[Row]) -> str:
    """Returns rows as the text of a CSV file that a spreadsheet can open."""
    return "".join(
        csv_line(COLUMNS, cells) for cells in (COLUMNS, *([row.get(name) for name in COLUMNS] for row in rows))
    )


def csv_rows(run: Run) -> Iterator[Row]:
    """Yields the rows of a run, with its selection rules and methods in the order of the summary."""
    picked = {rule: Picked(run, rule) for rule in dict.fromkeys(row.selection for row in run.rows)}
    cost, beside = costs(run.records), {rule: beside_rows(run.results, rule) for rule in picked}
    for row in run.rows:
        spent = cost[row.method]._asdict() if row.method in cost else {}
        models, start = picked[row.selection], properties(run, row.method) | _of_method(row) | spent
        values = {measure.name: models.mean(row.method, measure) for measure in MEASURES}
        spread = Spread(row.mean, row.std, row.stderr, row.n)
        compared = _comparison(beside[row.selection].get(row.method))
        yield start | {"of": "mean"} | _numbers(spread, values) | compared | _missing(row)
        for held in models.held_out:
            yield from _of_set(models, row, held, start)
    for rule in beside:
        yield from (_of_pair(run, row) for row in further(run.results, rule))


def _of_pair(run: Run, row: Comparison) -> Row:
    """Returns the row of a comparison that stands beside no row of the table."""
    kind = "encoders" if between_encoders(row, run.results) else "compared"
    return properties(run, row.first) | comparison_row(row, run.metric) | {"of": kind}


def comparison_row(row: Comparison, metric: str) -> Row:
    """Returns a row that holds a comparison alone."""
    return {"method": row.first, "selection": row.selection, "metric": metric} | _comparison(row)


def properties(run: Run, method: str) -> Row:
    """Returns what the models of a method have beside the protocol."""
    recipe, encoder = run.results["recipe"], encoder_block(method, run.results)
    features = recipe.get("features") or {}
    named = encoder.get("model", encoder.get("name", "unknown encoder"))
    weights = encoder.get("weights")
    views = features.get("views") or 0
    given = recipe.get("data", {}).get("train_augmentation") or "none"  # that of all rows, in older runs
    augmentation = f"{given}, {views} cached views" if views else str(given)
    return {
        "run": str(recipe["name"]),
        "encoder": f"{named} ({Path(weights).name})" if isinstance(weights, str) else str(named),
        "encoder_trained": trained_words(trainable_of(method, run.results)),
        "augmentation": next((row.augmentation for row in run.rows if row.method == method), None) or augmentation,
    }


def _of_method(row: SummaryRow) -> Row:
    budget = row.budget
    evaluations = budget["gradient_evaluations"] or {}
    return {
        "method": row.method,
        "selection": row.selection,
        "metric": row.metric,
        "draws": budget["draws"],
        "gradient_evaluations_low": evaluations.get("low"),
        "gradient_evaluations_high": evaluations.get("high"),
        "protocol": row.protocol,
    }


def _comparison(row: Comparison | None) -> Row:
    if row is None:
        return {}
    same = "difference", "error", "freedom", "share_seeds", "here", "elsewhere", "equal_within", "note", "look"
    cells: Row = {"compared_with": row.second} | {name: getattr(row, name) for name in same}
    for name, estimate, p in (("here", row.on_these, row.p_here), ("elsewhere", row.on_others, row.p_elsewhere)):
        if estimate is not None:
            cells |= {f"{name}_{end}": value for end, value in estimate.interval()._asdict().items()}
        if p is not None:
            cells |= {f"p_{name}": p.plain, f"p_{name}_holm": p.holm}
    return cells


def _missing(row: SummaryRow) -> Row:
    flags = "; ".join(row.flags or ()) or None
    return {"failed": row.failed, "skipped": row.skipped, "reason": row.reason, "flags": flags}


def _of_set(models: Picked, row: SummaryRow, held: Held, start: Row) -> Iterator[Row]:
    """Yields the row of a held-out set, and, of several domains in one, a row for each."""
    values = {measure.name: models.on(row.method, held, measure) for measure in MEASURES}
    images = next((score.n for score in models.scores(row.method, held)), None)
    named: Row = {"of": "held_out", "held_out": set_name(held), "images": images}
    yield start | named | _numbers(models.headline(row.method, held), values)
    if len(held) > 1:
        for domain, accuracy in models.accuracies(row.method, held).items():
            yield start | {
                "of": "domain",
                "held_out": domain,
                "metric": "accuracy",
                **_numbers(accuracy, {"accuracy": accuracy}),
            }


def _numbers(spread: Spread, values: Mapping[str, Spread]) -> Row:
    found: Row = {"mean": spread.mean, "std": spread.std, "stderr": spread.stderr, "seeds": spread.n}
    for name, value in values.items():
        found |= {name: value.mean, f"{name}_stderr": value.stderr}
    return found
