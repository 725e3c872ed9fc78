"""Numbers, names and notes as the texts of reports."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xdm_ft.core import ORACLE
from xdm_ft.evaluation.metrics import IN_PERCENT
from xdm_ft.runtime.errors import printable
from xdm_ft.runtime.errors import signed as with_sign

EMPTY = "–"
CHEATING = "CHEATING: the step was picked on test-domain images; not a result"


def metric_words(metric: str) -> str:
    """Returns the name of a metric as a reader knows it."""
    named = {"auroc": "AUROC", "nll": "NLL", "ece": "ECE", "macro_f1": "macro F1"}
    return named.get(metric, metric.replace("_", " "))


def in_unit(metric: str) -> str:
    """Returns the name of a metric with the unit of its numbers in tables."""
    return metric_words(metric) + (" in %" if metric in IN_PERCENT else "")


def unit_of_difference(metric: str) -> str:
    return "percentage points" if metric in IN_PERCENT else metric_words(metric)


def axis_value(metric: str, value: float) -> float:
    """Returns the value in the unit of `in_unit`."""
    return 100 * value if metric in IN_PERCENT else value


def scale(value: float, metric: str, signed: bool = False) -> str:
    digits = 1 if metric in IN_PERCENT else 3
    shown = axis_value(metric, value)
    return with_sign(shown, digits) if signed else f"{shown:z.{digits}f}"  # z: no "-0.0"


def with_unit(metric: str, value: float) -> str:
    return scale(value, metric) + ("%" if metric in IN_PERCENT else "")


def number(value: float | None, metric: str) -> str:
    return EMPTY if value is None else scale(value, metric)


def between(metric: str, ends: Sequence[float], signed: bool = False) -> str:
    return f"{scale(ends[0], metric, signed)} to {scale(ends[1], metric, signed)}"


def with_spread(row: Mapping[str, Any], spread: float | None) -> str:
    """Returns the mean of a row of the summary ± `spread`; without a mean: "failed", "skipped" or a dash."""
    if row["mean"] is None:
        return next((status for status in ("failed", "skipped") if status in row), EMPTY)
    return scale(row["mean"], row["metric"]) + ("" if spread is None else f" ± {scale(spread, row['metric'])}")


def p_value(p: float | None) -> str:
    if p is None:
        return EMPTY
    return f"{p:.3f}" if p >= 0.0005 else "<0.001"  # less would be rounded to 0.000


def significant(value: float, digits: int = 3) -> str:
    """Returns the value with so many significant digits; an exponent only where the number would be long."""
    if value == 0 or not 1e-5 <= abs(value) < 1e7:
        return f"{value or 0:.{digits}g}"  # no "-0"
    return f"{value:.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def count_text(count: float | None) -> str:
    """Returns a number of things: 5,130 or 85.8 million."""
    if count is None:
        return EMPTY
    return f"{count / 1e6:,.1f} million" if count >= 1e6 else f"{count:,.0f}"


def seconds_text(seconds: float | None) -> str:
    """Returns a time in seconds with three digits, or all of those before the point."""
    if seconds is None:
        return EMPTY
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


def bytes_text(size: float | None) -> str:
    """Returns a size: 9.9 kB, 12.3 MB or 4.5 GB."""
    if size is None:
        return EMPTY
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB") if size >= 1e6 else (1e3, "kB")
    return f"{size / unit:,.1f} {name}"


def range_text(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def setting_text(value: Any) -> str:
    """Returns the value of a hyper-parameter."""
    if value is None:
        return EMPTY
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def budget_text(row: Mapping[str, Any]) -> str:
    """Returns draws × gradient evaluations per model of a row of the summary."""
    budget = row["budget"]
    if budget["gradient_evaluations"] is None:
        return EMPTY
    return f"{budget['draws']} × {range_text(**budget['gradient_evaluations'])}"


def trained_words(trainable: Any) -> str:
    """Returns how much of an encoder trains."""

    def blocks(count: int) -> str:
        return "block" if count == 1 else f"{count} blocks"

    if not isinstance(trainable, Mapping):
        return "end to end" if trainable else "frozen"
    if "lora" not in trainable:
        return f"last {blocks(trainable['blocks'])}"
    lora = trainable["lora"]
    depth = f" in the last {blocks(lora['blocks'])}" if lora.get("blocks") else ""
    return f"LoRA of rank {lora['rank']}{depth}"


def oracle_mark(rule: str) -> str:
    """Returns what follows the names of columns, if the numbers below are no result."""
    return f" ({ORACLE})" if rule == ORACLE else ""


def each_once(pairs: Iterable[tuple[str, str | None]]) -> list[str]:
    """Returns each note of the pairs (method, note) once, behind all methods that have it; an empty note is none."""
    by_note: dict[str | None, list[str]] = {}
    for method, note in pairs:
        by_note.setdefault(note, []).append(method)
    rows = len({method for methods in by_note.values() for method in methods})
    who = {
        note: ", ".join(methods) if len(methods) < max(3, rows) else f"all {rows} rows"
        for note, methods in by_note.items()
    }
    return [f"{who[note]}: {note}" for note in by_note if note]


def short(name: str, longest: int = 22) -> str:
    """Returns a name for a label of a plot: on one line, its middle left out if it is longer than `longest`."""
    text = printable(name)
    return text if len(text) <= longest else f"{text[: longest * 2 // 3]}…{text[len(text) - longest // 3 + 1 :]}"


def plain(text: str) -> str:
    """Returns the text on one line without control characters: names come from others, reasons have several lines."""
    return printable(" ".join(text.split()))


def encode_text(text: str, encoding: str) -> str:
    """Returns `plain` of the text, with escapes for characters that the encoding lacks."""
    return plain(text).encode(encoding, "backslashreplace").decode(encoding)


def path_in_command(path: Path) -> str:
    """Returns a path as a page that is handed on may name it: of an absolute one only the last name."""
    return shlex.quote(path.name if path.is_absolute() else str(path))
