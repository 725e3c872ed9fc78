"""Counts what a soak has done. The counts are printed at the end of the tests."""

from __future__ import annotations

from collections import Counter, defaultdict

_counts: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)


def count(title: str, row: str, outcome: str) -> None:
    _counts[title][row, outcome] += 1
    _counts[title]["sum", outcome] += 1


def tables() -> list[str]:
    """The lines of one table for each title: rows × outcomes."""
    lines = []
    for title, counts in _counts.items():
        outcomes = sorted({outcome for _, outcome in counts})
        rows = [*sorted({row for row, _ in counts} - {"sum"}), "sum"]
        width = max(map(len, [title, *rows]))
        lines += ["", "  ".join([f"{title:{width}}", *outcomes, "sum"])]
        for row in rows:
            numbers = [counts[row, outcome] for outcome in outcomes]
            cells = [f"{n:>{len(name)}}" for n, name in zip([*numbers, sum(numbers)], [*outcomes, "sum"], strict=True)]
            lines.append("  ".join([f"{row:{width}}", *cells]))
    return lines
