"""How to read the tables of a run: all of it for `xdm-ft explain`, what its tables need for results.md and the page."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from xdm_ft.evaluation.trials import ORACLE
from xdm_ft.report.finished import several_encoders
from xdm_ft.report.words import in_unit

Results = Mapping[str, Any]
MANUAL: dict[str, dict[str, str]] = {
    topic: {word: " ".join(text.split()) for word, text in words.items()}
    for topic, words in tomllib.loads(
        files("xdm_ft.report").joinpath("manual.toml").read_text(encoding="utf-8")
    ).items()
}
"""{topic: {word of a table: what it means}}"""


def _in_a_row(*keys: str) -> Callable[[Results], bool]:
    """Returns a function that says whether a row of the summary has a value at the nested keys."""

    def holds(row: Any) -> bool:
        for key in keys:
            row = row.get(key) if row else None
        return row is not None

    return lambda results: any(holds(row) for row in results["summary"])


def _measured(name: str) -> Callable[[Results], bool]:
    return lambda results: any(run.get(name) is not None for run in results["runs"])


def _searched(results: Results) -> bool:
    return any(run["trial"] > 0 for run in results["runs"])


def _selected_by(rule: str, results: Results) -> bool:
    return any(row["selection"] == rule for row in results["summary"])


def _compared(results: Results) -> bool:
    return bool(results.get("comparisons")) or _in_a_row("versus_erm")(results)


_NEEDS: dict[str, Callable[[Results], bool]] = {
    "draws × gradients": _in_a_row("budget", "gradient_evaluations"),
    "mixed steps": _measured("mixed_steps"),
    "comparison": _compared,
    "verdict": _compared,
    "equal within": lambda results: bool(results["recipe"].get("report", {}).get("margin")),
    "look": lambda results: len(results.get("looks", ())) > 1,
    **{rule: partial(_selected_by, rule) for rule in ("train_val", "val_domain", "cross_domain", ORACLE)},
    "selected hyper-parameters": _searched,
    "trained parameters": _measured("trained_parameters"),
    "peak memory": _measured("peak_memory"),
    "encoders": lambda results: bool(several_encoders(results)),
    "analysis": lambda results: False,  # its tables are in the sections that explain them
    "published numbers": _in_a_row("spread_as_published"),
    "failed, skipped": lambda results: any(run["status"] != "ok" for run in results["runs"]),
    "at the edge of its range": _searched,
}
"""{topic or word of the manual: whether tables of these results need it}; those that are not here are always needed"""


def how_to_read(results: Results) -> dict[str, str]:
    """Returns {word: what it means} that the tables of a run need, the first on its numbers; {} without a table."""
    metrics = dict.fromkeys(row["metric"] for row in results["summary"])
    if not metrics:
        return {}

    def needed(name: str) -> bool:
        return name not in _NEEDS or _NEEDS[name](results)

    tested_on = f" of {results['tested_on']}" if "tested_on" in results else ""
    numbers = {"numbers": f"{', '.join(map(in_unit, metrics))} on test images{tested_on}."}
    topics = [words for topic, words in MANUAL.items() if needed(topic)]
    return numbers | {word: text for words in topics for word, text in words.items() if needed(word)}
