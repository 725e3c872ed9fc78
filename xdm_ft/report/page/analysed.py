"""What panels need of analysis.json: its models, its notes, and the paper's numbers for the same data set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from xdm_ft.evaluation.records import ModelKey
from xdm_ft.report.encoders import encoder_block, trainable_of, trained_words
from xdm_ft.report.finished import Run
from xdm_ft.report.page.numbers import set_name
from xdm_ft.report.page.panel import Cell, Table
from xdm_ft.report.published import SOURCE, Published, benchmark_of, images_tested, published
from xdm_ft.report.table_rows import EMPTY, items
from xdm_ft.runtime.errors import UserError, plural

SCHEMA = 1
MOST_ROWS = 240  # of a table
LONG = 12  # rows of a table that is not folded

Model = dict[str, Any]


def models(run: Run) -> list[Model]:
    """The models of analysis.json in the recipe's order of methods; [] without analysis.

    A model that the run's rule does not pick is left out: since the analysis, a search has grown and found a better
    one, or the file is that of another run. Raises `UserError` if another version wrote the file.
    """
    if run.analysis is None:
        return []
    if run.analysis.get("schema") != SCHEMA:
        raise UserError(
            f"{run.path / 'analysis.json'}: has schema {run.analysis.get('schema')!r}, and this version reads "
            f"{SCHEMA}; run `xdm-ft analyse` again"
        )
    order = {label: place for place, label in enumerate(items(run.results))}
    picked = {record.key for record in run.picked}
    found = [model for model in run.analysis["models"] if _key(model) in picked]
    return sorted(found, key=lambda model: order[model["method"]])


def not_measured(run: Run) -> list[str]:
    """A note that not all models of the run are in analysis.json, if so."""
    missing = {record.key for record in run.picked} - {_key(model) for model in models(run)}
    if not missing:
        return []
    return [
        f"{len(missing)} of {plural(len(run.picked), 'model')} are not measured yet: `xdm-ft analyse` measures them"
    ]


def _key(model: Model) -> ModelKey:
    return ModelKey(model["method"], tuple(model["test_domains"]), model["seed"], model["trial"])


def with_part(run: Run, part: str) -> list[Model]:
    """The models for which `part` was measured."""
    return [model for model in models(run) if model.get(part)]


def by_set(found: Iterable[Model]) -> dict[tuple[str, str], list[Model]]:
    """{(method, held-out set): its models, one per seed}"""
    groups: dict[tuple[str, str], list[Model]] = {}
    for model in found:
        groups.setdefault((model["method"], set_name(model["test_domains"])), []).append(model)
    return groups


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are defined; None if there is none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def significant(value: float, digits: int = 3) -> str:
    """The value with so many significant digits; an exponent only where the number would be long."""
    if value == 0 or not 1e-5 <= abs(value) < 1e7:
        return f"{value:.{digits}g}"
    return f"{value:.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def mean_cell(values: Iterable[float | None], form: str = "") -> Cell:
    """The mean over seeds in the format `form` (default: 4 digits), and below it their standard deviation (ddof 1)."""
    known = [value for value in values if value is not None]
    if not known:
        return Cell(EMPTY)
    text = f"{fmean(known):{form}}" if form else significant(fmean(known), 4)
    if len(known) < 2:
        return Cell(text, fmean(known))
    spread = f"{stdev(known):{form}}" if form else significant(stdev(known), 2)
    return Cell(text, fmean(known), f"± {spread}")


def bounded(rows: Sequence[Sequence[Cell]], caption: str, header: Sequence[str]) -> Table:
    """A table of the first `MOST_ROWS` rows, which says so if there are more; a long one is folded."""
    more = f" The first {MOST_ROWS} of {len(rows)} rows." if len(rows) > MOST_ROWS else ""
    return Table(caption + more, header, rows[:MOST_ROWS], folded=len(rows) > LONG)


def of_the_paper(run: Run, *tables: str) -> list[Table]:
    """A table with a column per named table of the paper, of the same data set; [] for other data sets."""
    results = run.results
    dataset = benchmark_of(results["recipe"].get("data", {}), images_tested(results["runs"]))
    lines = [line for line in published() if line.dataset == dataset and line.table in tables]
    if not lines:
        return []
    columns = {table: {line.method: line for line in lines if line.table == table} for table in tables}
    metrics = [next((line.metric for line in of.values()), table) for table, of in columns.items()]
    rows = [
        [Cell(method), *(_number(of.get(method)) for of in columns.values())]
        for method in dict.fromkeys(line.method for line in lines)
    ]
    comparable, words = _comparable(run, lines[0].encoder)
    caption = f"Published: {' and '.join(tables)} on {dataset}; {SOURCE}; {lines[0].encoder}, fine-tuned. {words}"
    return [Table(caption, ["method", *metrics], rows, folded=not comparable)]


def _number(line: Published | None) -> Cell:
    return Cell(EMPTY) if line is None else Cell(f"{line.mean} ± {line.spread}", float(line.mean))


def _comparable(run: Run, published_encoder: str) -> tuple[bool, str]:
    kind = published_encoder.partition(" ")[0]
    blocks = {record.method: encoder_block(record.method, run.results) for record in run.records}
    models = {method: str(block.get("model", "unknown encoder")) for method, block in blocks.items()}
    trained = {method: trainable_of(method, run.results) for method in models}
    if any(trained[method] is not True or not model.startswith(kind) for method, model in models.items()):
        ours = "; ".join(dict.fromkeys(f"{models[method]}, {trained_words(of)}" for method, of in trained.items()))
        return False, f"Not comparable with this run, whose encoder is {ours}."
    return True, "The paper does not say which images it measured: compare the order of methods, not the numbers."
