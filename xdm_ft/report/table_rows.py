"""Builds the tables of a run as plain text.

Rows share a table only if they have the same protocol line, selection rule, metric, split and kind of ±.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xdm_ft.evaluation.encoders import split_label
from xdm_ft.report.finished import ORACLE

Results = Mapping[str, Any]
Summary = Mapping[str, Any]

EMPTY = "–"
COMPARISON = (
    "95% over domains (unadjusted)", "95% over seeds and images (unadjusted)", "p", "p (Holm)", "verdict"
)  # fmt: skip
COMPARED = "compared with "  # began the note that named the reference, in results of earlier versions
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


def result_table(rows: Sequence[Summary], results: Results) -> ResultTable:
    """Returns the table of one of the `groups`."""
    domains = list(dict.fromkeys(d for row in rows for d in row["per_test_domain"]))
    compared = any(row["versus_erm"] for row in rows)
    budgeted = any("budget" in row for row in rows)
    mixed = _mixed_steps(results["runs"])
    mixing = any(row["method"] in mixed for row in rows)
    mark = oracle_mark(rows[0]["selection"])
    header = [f"method{mark}", *domains, f"mean ± stderr{mark}", "seeds"]
    header += ["draws × gradients"] if budgeted else []
    versus = versus_columns(reference_names(rows, results), [difference_text(row) for row in rows]) if compared else {}
    header += [*versus, *COMPARISON] if compared else []
    header += ["mixed steps"] if mixing else []
    cells = []
    for place, row in enumerate(rows):
        metric, per_domain = row["metric"], row["per_test_domain"]
        line = [row["method"], *(number(per_domain.get(d, {}).get("mean"), metric) for d in domains)]
        line += [with_spread(row, row["stderr"]), str(row["n"])]
        line += [budget_text(row)] if budgeted else []
        line += [*(cells[place] for cells in versus.values()), *_tested(row)] if compared else []
        line += [mixed.get(row["method"], EMPTY)] if mixing else []
        cells.append(tuple(line))
    about = (("Protocol", rows[0]["protocol"]),)
    return ResultTable(
        _heading(rows[0]["selection"], results), about, tuple(header), tuple(cells), notes_of(rows, results)
    )


def oracle_mark(rule: str) -> str:
    """What follows the names of columns, if the numbers below are no result."""
    return f" ({ORACLE})" if rule == ORACLE else ""


def _heading(rule: str, results: Results) -> str:
    if rule == ORACLE:
        return f"selection: {rule} — CHEATING: the step was picked on test-domain images; not a result"
    return f"selection: {rule}" + (" (the recipe's rule)" if rule == own_rule(results) else "")


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


def _mixed_steps(runs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """{method: number of steps that used augmented features}, as a range if its runs differ."""
    found: dict[str, list[int]] = {}
    for run in runs:
        if run.get("mixed_steps") is not None:
            found.setdefault(run["method"], []).append(run["mixed_steps"])
    return {method: _range(min(steps), max(steps)) for method, steps in found.items()}


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def budget_text(row: Summary) -> str:
    """Draws × gradient evaluations per model."""
    budget = row.get("budget")
    if budget is None or budget["gradient_evaluations"] is None:
        return EMPTY
    return f"{budget['draws']} × {_range(**budget['gradient_evaluations'])}"


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


def reference_of(row: Summary, results: Results) -> str | None:
    """Returns the label of the ERM that a row was compared with; None if it was compared with none."""
    versus = row["versus_erm"]
    if versus is None:
        return None
    if "reference" in versus:
        return str(versus["reference"])
    # earlier versions named it in the note alone, and only where a table had several
    notes = str(versus["note"]).split("; ")
    named = [note.removeprefix(COMPARED) for note in notes if note.startswith(COMPARED)]
    without = [one for one in results["summary"] if one["versus_erm"] is None and one["mean"] is not None]
    uncompared = [one["method"] for one in without]
    plain = [label for label in uncompared if items(results).get(label, {}).get("name") == "erm"]
    encoders = several_encoders(results)
    own = split_label(row["method"], encoders)[1]
    return next(iter([*named, *(one for one in plain if split_label(one, encoders)[1] == own)]), "erm")


def reference_names(rows: Iterable[Summary], results: Results) -> list[str | None]:
    """Returns what each row was compared with, without the encoder, which is the row's own; None: with nothing."""
    encoders = several_encoders(results)
    references = [reference_of(row, results) for row in rows]
    return [None if one is None else split_label(one, encoders)[0] for one in references]


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


def difference_text(row: Summary) -> str:
    versus = row["versus_erm"]
    return EMPTY if versus is None else scaled(versus["difference"], row["metric"], signed=True)


def _tested(row: Summary) -> list[str]:
    """Returns a cell for each of `COMPARISON`."""
    versus = row["versus_erm"]
    return [EMPTY] * len(COMPARISON) if versus is None else comparison_cells(versus, row["metric"])[1:]


def comparison_cells(versus: Mapping[str, Any], metric: str) -> list[str]:
    """Returns the difference, and a cell for each of `COMPARISON`."""
    intervals = [
        f"{scaled(i['low'], metric, True)} to {scaled(i['high'], metric, True)}" if i else "not estimated"
        for i in (versus["domains"], versus["seeds_and_images"])
    ]
    p_values = [p_value(versus["p"]), p_value(versus["p_holm"])]
    return [scaled(versus["difference"], metric, True), *intervals, *p_values, versus["verdict"]]


def p_value(p: float | None) -> str:
    if p is None:
        return EMPTY
    return f"{p:.3f}" if p >= 0.0005 else "<0.001"


def notes_of(rows: Sequence[Summary], results: Results) -> tuple[tuple[str, str], ...]:
    """Each note on the rows once, with all methods that have it."""

    def found() -> Iterator[tuple[str, str]]:
        for row, name in zip(rows, reference_names(rows, results), strict=True):
            notes = [row["reason"]] if "reason" in row else []
            versus = row["versus_erm"]
            compared = [f"versus {name}: {versus['note']}"] if versus and versus["note"] else []
            yield from ((row["method"], note) for note in (*notes, *row.get("flags", ()), *compared))

    return (*each_once(found()), *_unequal_budgets(rows))


def each_once(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns (methods, note) for each note of the pairs (method, note); an empty note is none."""
    found: dict[str, list[str]] = {}
    for method, note in pairs:
        if note:
            found.setdefault(note, []).append(method)
    return [(", ".join(methods), note) for note, methods in found.items()]


def _unequal_budgets(rows: Iterable[Summary]) -> Iterator[tuple[str, str]]:
    """Yields a note if methods that take gradient steps differ in draws or gradient evaluations."""
    found: dict[str, list[str]] = {}
    for row in rows:
        evaluations = row.get("budget", {}).get("gradient_evaluations")
        if evaluations and evaluations["high"] > 0:
            found.setdefault(budget_text(row), []).append(row["method"])
    if len(found) > 1:
        yield "unequal budgets", "; ".join(f"{budget}: {', '.join(methods)}" for budget, methods in found.items())
