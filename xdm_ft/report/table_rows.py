"""Tables as plain text: their type, which rows share one, and the texts of their cells.

Rows share a table only if they have the same protocol line, selection rule, metric, split and kind of ±.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xdm_ft.evaluation.records import split_label
from xdm_ft.report.finished import ORACLE

Results = Mapping[str, Any]
Summary = Mapping[str, Any]

EMPTY = "–"
IN_PERCENT = (
    "accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "worst_class_recall", "ece",
)  # fmt: skip


@dataclass(frozen=True)
class ResultTable:
    """One table, not yet escaped for Markdown or laid out for a terminal."""

    heading: str
    about: tuple[tuple[str, str], ...]  # lines between heading and table: (title, text)
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[tuple[str, str], ...] = ()  # lines below the table: (methods, note on their rows)
    level: int = 2  # of its heading in a document: 3 belongs to the table before
    labels: int = 1  # number of columns, the first ones, that say what a row is


def groups(results: Results) -> list[list[Summary]]:
    """Returns the rows of each table, in the recipe's order of methods; tables of the recipe's own rule come first."""
    found: dict[tuple[str, ...], list[Summary]] = {}
    for row in results["summary"]:
        kind = row.get("spread_as_published", {}).get("kind", "")
        found.setdefault((row["protocol"], row["selection"], row["metric"], row["split"], kind), []).append(row)
    own = own_rule(results)
    tables = sorted(found.values(), key=lambda rows: rows[0]["selection"] != own)
    order = {label: place for place, label in enumerate(items(results))}
    return [sorted(rows, key=lambda row: order.get(row["method"], len(order))) for rows in tables]


def own_rule(results: Results) -> str | None:
    """The recipe's selection rule, whose tables come first."""
    rule: str | None = results["recipe"].get("protocol", {}).get("selection")
    return rule or next((row["selection"] for row in results["summary"]), None)


def oracle_mark(rule: str) -> str:
    """What follows the names of columns, if the numbers below are no result."""
    return f" ({ORACLE})" if rule == ORACLE else ""


def items(results: Results) -> dict[str, Mapping[str, Any]]:
    """{label of a row: its item of the recipe}, in the recipe's order, or that of the summary of several encoders."""
    found: dict[str, Mapping[str, Any]] = {}
    for item in results["recipe"]["methods"]:
        settings = {"name": item} if isinstance(item, str) else item
        found.setdefault(settings.get("label") or settings["name"], settings)
    labels = several_encoders(results)
    if not labels:
        return found
    methods = {row["method"]: split_label(row["method"], labels)[0] for row in results["summary"]}
    return {label: found[method] for label, method in methods.items() if method in found}


def several_encoders(results: Results) -> list[str]:
    """Returns the labels of the recipe's `encoders`, in their order; none if it has one `encoder`."""
    return [encoder_label(block) for block in results["recipe"].get("encoders") or ()]


def encoder_label(block: Mapping[str, Any]) -> str:
    """Returns the name in results of an item of `encoders`."""
    return str(block.get("label") or block["model"])


def range_text(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def budget_text(row: Summary) -> str:
    """Draws × gradient evaluations per model."""
    budget = row.get("budget")
    if budget is None or budget["gradient_evaluations"] is None:
        return EMPTY
    return f"{budget['draws']} × {range_text(**budget['gradient_evaluations'])}"


def metric_words(metric: str) -> str:
    """The name of a metric as a reader knows it."""
    named = {"auroc": "AUROC", "nll": "NLL", "ece": "ECE", "macro_f1": "macro F1"}
    return named.get(metric, metric.replace("_", " "))


def in_unit(metric: str) -> str:
    """The name of a metric with the unit of its numbers in tables."""
    return metric_words(metric) + (" in %" if metric in IN_PERCENT else "")


def with_unit(metric: str, value: float) -> str:
    return scaled(value, metric) + ("%" if metric in IN_PERCENT else "")


def scaled(value: float, metric: str, signed: bool = False) -> str:
    percent = metric in IN_PERCENT
    return f"{100 * value if percent else value:{'+' if signed else ''}z.{1 if percent else 3}f}"  # z: no "-0.0"


def number(value: float | None, metric: str) -> str:
    return EMPTY if value is None else scaled(value, metric)


def with_spread(row: Summary, spread: float | None) -> str:
    """The mean ± `spread`; without a mean: "failed", "skipped" or a dash."""
    if row["mean"] is None:
        return next((status for status in ("failed", "skipped") if status in row), EMPTY)
    return scaled(row["mean"], row["metric"]) + ("" if spread is None else f" ± {scaled(spread, row['metric'])}")


def versus_columns(
    names: Sequence[str | None], differences: Sequence[str], word: str = "versus"
) -> dict[str, Sequence[str]]:
    """Returns {head: cells} of the differences to `names`, a cell per row; None: the row is compared with nothing.

    The head names what all are compared with; if rows differ in that, a second column names it.
    """
    distinct = {name for name in names if name is not None}
    if len(distinct) == 1:
        return {f"{word} {distinct.pop()}": differences}
    return {"difference": differences, word: [name or EMPTY for name in names]}


def p_value(p: float | None) -> str:
    if p is None:
        return EMPTY
    return f"{p:.3f}" if p >= 0.0005 else "<0.001"


def each_once(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns (methods, note) for each note of the pairs (method, note); an empty note is none."""
    found: dict[str, list[str]] = {}
    for method, note in pairs:
        if note:
            found.setdefault(note, []).append(method)
    return [(", ".join(methods), note) for note, methods in found.items()]
