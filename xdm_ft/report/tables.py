"""The tables of a run: results.md and the terminal, both from the results.json dictionary and nothing else.

One table per protocol line: numbers from two protocols never share a column.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]
Summary = Mapping[str, Any]

EMPTY = "–"
MINIMUM_WIDTH = 100  # columns of a table that does not go to a terminal
_IN_PERCENT = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "ece")


@dataclass(frozen=True)
class _Sheet:
    """One table as plain text, before it is escaped for Markdown or laid out for a terminal."""

    protocol: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[tuple[str, str], ...]  # methods, what to know about their rows


def markdown(results: Results) -> str:
    """The text of results.md."""
    lines = [f"# {_escape(str(results['recipe']['name']))}", "", _escape(_how_to_read(results)), ""]
    for sheet in _sheets(results):
        lines += [f"**Protocol:** {_escape(sheet.protocol)}", ""]
        lines += [_markdown_row(sheet.header), "|" + "---|" + "---:|" * (len(sheet.header) - 1)]
        lines += [_markdown_row(row) for row in sheet.rows] + [""]
        notes = [f"- **{_escape(methods)}**: {_escape(note)}" for methods, note in sheet.notes]
        lines += [*notes, ""] if notes else []
    return "\n".join([*lines, f"*Environment: {_escape(_environment(results))}*", ""])


def print_table(results: Results) -> None:
    """The same tables on standard output, their columns in several blocks where the terminal is too narrow for one.

    Output that goes to no terminal is as wide as it needs to be. Colours follow rich: none there, none with NO_COLOR.
    """
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout)
    parts: list[Any] = []
    for sheet in _sheets(results):
        parts += [Text(_plain(sheet.protocol), style="dim")]
        for columns in _blocks(sheet, console.width if console.is_terminal else None):
            table = Table()
            for i in columns:
                table.add_column(Text(_plain(sheet.header[i])), justify="left" if i == 0 else "right", overflow="fold")
            for row in sheet.rows:
                table.add_row(*(Text(_plain(row[i])) for i in columns))
            parts.append(table)
        parts += [*(Text(_plain(f"{methods}: {note}")) for methods, note in sheet.notes), Text()]
    parts.append(Text(_how_to_read(results), style="dim"))
    if not console.is_terminal:
        unbounded = console.options.update(width=1 << 16)
        widths = (console.measure(part, options=unbounded).maximum for part in parts if isinstance(part, Table))
        console.width = max(MINIMUM_WIDTH, *widths, 0)
    with console.capture() as captured:
        console.print(Group(*parts))
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(captured.get().encode(encoding, "replace").decode(encoding))  # no crash on an ASCII terminal


def _blocks(sheet: _Sheet, width: int | None) -> list[list[int]]:
    """The columns in blocks that fit `width` (None: all in one), each beginning with the methods."""
    from rich.cells import cell_len

    rows = (sheet.header, *sheet.rows)
    needed = [
        max(cell_len(_plain(row[i])) for row in rows) + 3 for i in range(len(sheet.header))
    ]  # 3: two spaces and a rule
    blocks, used = [[0]], needed[0] + 1
    for i in range(1, len(needed)):
        if width is not None and len(blocks[-1]) > 1 and used + needed[i] > width:
            blocks, used = [*blocks, [0]], needed[0] + 1
        blocks[-1].append(i)
        used += needed[i]
    return blocks


def _sheets(results: Results) -> Iterator[_Sheet]:
    groups: dict[tuple[str, ...], list[Summary]] = {}
    for row in results["summary"]:
        groups.setdefault((row["protocol"], row["selection"], row["metric"], row["split"]), []).append(row)
    for (protocol, *_), rows in groups.items():
        yield _sheet(protocol, _in_recipe_order(rows, results), _mixed_steps(results["runs"]))


def _sheet(protocol: str, rows: Sequence[Summary], mixed: Mapping[str, str]) -> _Sheet:
    domains = list(dict.fromkeys(d for row in rows for d in row["per_test_domain"]))
    compared = any(row["versus_erm"] for row in rows)
    mixing = any(row["method"] in mixed for row in rows)
    header = ["method", *domains, "mean ± stderr", "seeds"]
    header += ["versus erm", "95% over domains", "95% over images", "verdict"] if compared else []
    cells = []
    for row in rows:
        metric, per_domain = row["metric"], row["per_test_domain"]
        line = [row["method"], *(_number(per_domain.get(d, {}).get("mean"), metric) for d in domains)]
        line += [_mean(row), str(row["n"])]
        line += _versus(row) if compared else []
        line += [mixed.get(row["method"], EMPTY)] if mixing else []
        cells.append(tuple(line))
    header += ["mixed steps"] if mixing else []
    return _Sheet(protocol, tuple(header), tuple(cells), _notes(rows))


def _in_recipe_order(rows: Iterable[Summary], results: Results) -> list[Summary]:
    order: dict[str, int] = {}
    for item in results["recipe"]["methods"]:
        order.setdefault(item if isinstance(item, str) else item.get("label") or item["name"], len(order))
    return sorted(rows, key=lambda row: order.get(row["method"], len(order)))


def _mixed_steps(runs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Method → steps that used augmented features, as a range where its runs differ."""
    found: dict[str, list[int]] = {}
    for run in runs:
        if run.get("mixed_steps") is not None:
            found.setdefault(run["method"], []).append(run["mixed_steps"])
    return {m: f"{min(k)}" if min(k) == max(k) else f"{min(k)} to {max(k)}" for m, k in found.items()}


def _scaled(value: float, metric: str, signed: bool = False) -> str:
    percent = metric in _IN_PERCENT
    return f"{100 * value if percent else value:{'+' if signed else ''}z.{1 if percent else 3}f}"  # z: no "-0.0"


def _number(value: float | None, metric: str) -> str:
    return EMPTY if value is None else _scaled(value, metric)


def _mean(row: Summary) -> str:
    if row["mean"] is None:
        return next((status for status in ("failed", "skipped") if status in row), EMPTY)
    spread = "" if row["stderr"] is None else f" ± {_scaled(row['stderr'], row['metric'])}"
    return _scaled(row["mean"], row["metric"]) + spread


def _versus(row: Summary) -> list[str]:
    versus, metric = row["versus_erm"], row["metric"]
    if versus is None:
        return [EMPTY] * 4
    intervals = [
        f"{_scaled(i['low'], metric, True)} to {_scaled(i['high'], metric, True)}" if i else "not estimated"
        for i in (versus["domains"], versus["images"])
    ]
    return [_scaled(versus["difference"], metric, True), *intervals, versus["verdict"]]


def _notes(rows: Iterable[Summary]) -> tuple[tuple[str, str], ...]:
    """Each note once, with the methods that it is about."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if "reason" in row:
            found.setdefault(row["reason"], []).append(row["method"])
        for flag in row.get("flags", ()):
            found.setdefault(flag, []).append(row["method"])
        if row["versus_erm"] and row["versus_erm"]["note"]:
            found.setdefault(f"versus erm: {row['versus_erm']['note']}", []).append(row["method"])
    return tuple((", ".join(methods), note) for note, methods in found.items())


def _how_to_read(results: Results) -> str:
    metrics = dict.fromkeys(row["metric"] for row in results["summary"])
    if not metrics:
        return "No model has been trained yet."
    units = [f"{m.replace('_', ' ')}{' in %' if m in _IN_PERCENT else ''}" for m in metrics]
    return (
        f"How to read: {', '.join(units)} on test images of domains never trained on; ± is the standard error over "
        "seeds. Versus erm is the difference with its 95% intervals over held-out domains and over test images; it is "
        "not distinguishable from 0 where one of them contains 0. Seeds of a nearly convex head are no replicates."
    )


def _environment(results: Results) -> str:
    return ", ".join(f"{key} {value}" for key, value in _flat(results["environment"]))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(text: str) -> str:
    """One line without control characters: names come from folders, and a terminal obeys escape sequences."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _escape(text: str) -> str:
    """Text that Markdown shows as it is. An underscore between letters or digits marks nothing and stays."""
    return re.sub(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])", lambda m: "\\" + m[0], _plain(text))


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"
