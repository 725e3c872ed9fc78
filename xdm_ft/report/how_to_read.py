"""The part of the manual that stands in results.md and on the page: what the tables of the run need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from xdm_ft.report.finished import ORACLE
from xdm_ft.report.manual import MANUAL
from xdm_ft.report.table_rows import Results, in_unit, several_encoders


class Paragraph(NamedTuple):
    title: str  # a word of the tables
    text: str  # what it means


def _in_a_row(*keys: str) -> Callable[[Results], bool]:
    """Returns a function that says whether a row of the summary has a value at the nested keys."""

    def holds(row: Any) -> bool:
        for key in keys:
            row = row.get(key) if row else None
        return row is not None

    return lambda results: any(holds(row) for row in results["summary"])


def _selected_by(rule: str) -> Callable[[Results], bool]:
    return lambda results: any(row["selection"] == rule for row in results["summary"])


def _searched(results: Results) -> bool:
    return any(run["trial"] > 0 for run in results["runs"])


def _measured(name: str) -> Callable[[Results], bool]:
    return lambda results: any(run.get(name) is not None for run in results["runs"])


_NEEDS: dict[str, Callable[[Results], bool]] = {
    "draws × gradients": _in_a_row("budget", "gradient_evaluations"),
    "mixed steps": lambda results: any(run.get("mixed_steps") is not None for run in results["runs"]),
    "comparison": lambda results: bool(results.get("comparisons")) or _in_a_row("versus_erm")(results),
    "verdict": lambda results: bool(results.get("comparisons")) or _in_a_row("versus_erm")(results),
    "equal within": lambda results: bool(results["recipe"].get("report", {}).get("margin")),
    "look": lambda results: len(results.get("looks", ())) > 1,
    **{rule: _selected_by(rule) for rule in ("train_val", "val_domain", "cross_domain", ORACLE)},
    "selected hyper-parameters": _searched,
    "trained parameters": _measured("trained_parameters"),
    "peak memory": _measured("peak_memory"),
    "encoders": lambda results: bool(several_encoders(results)),
    "analysis": lambda results: False,  # its tables are in the sections of the page that explain them
    "published numbers": _in_a_row("spread_as_published"),
    "failed, skipped": lambda results: any(run["status"] != "ok" for run in results["runs"]),
    "at the edge of its range": _searched,
}
"""{topic or word of the manual: whether tables of these results need it}; those that are not here are always needed"""


def how_to_read(results: Results) -> list[Paragraph]:
    """Returns what the tables of a run need, the first paragraph on its numbers; [] without a table."""
    metrics = dict.fromkeys(row["metric"] for row in results["summary"])
    if not metrics:
        return []
    units = [in_unit(metric) for metric in metrics]
    tested_on = f" of {results['tested_on']}" if "tested_on" in results else ""
    words = [word for topic, words in MANUAL.items() if _needed(topic, results) for word in words.items()]
    needed = [Paragraph(word, text) for word, text in words if _needed(word, results)]
    return [Paragraph("numbers", f"{', '.join(units)} on test images{tested_on}."), *needed]


def _needed(name: str, results: Results) -> bool:
    return name not in _NEEDS or _NEEDS[name](results)
