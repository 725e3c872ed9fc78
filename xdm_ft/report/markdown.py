"""results.md: the finding as a sentence, every table of the run, and how to read them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from xdm_ft.report.averaged_seeds import averaged_table
from xdm_ft.report.costs import cost_table
from xdm_ft.report.encoders import encoder_table
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.how_to_read import how_to_read
from xdm_ft.report.measures import Picked
from xdm_ft.report.more_tables import metric_table, searched_table
from xdm_ft.report.published import published_tables
from xdm_ft.report.result_table import further_table, result_table
from xdm_ft.report.sentence import sentence
from xdm_ft.report.table_rows import ResultTable, Summary, groups, own_rule
from xdm_ft.report.tables import plain


def markdown(run: Run) -> str:
    """Returns the text of results.md."""
    results = run.results
    lines = [f"# {escape(str(results['recipe']['name']))}", "", f"**{escape(sentence(run))}**", ""]
    for part in tables_of(run):
        lines += markdown_table(part)
    manual = [f"- **{escape(one.title)}**: {escape(one.text)}" for one in how_to_read(results)]
    lines += ["## How to read the tables", "", *manual, ""] if manual else []
    environment = ", ".join(f"{key} {value}" for key, value in flat(without_encoders(results["environment"])))
    return "\n".join([*lines, f"*Environment: {escape(environment)}*", ""])


def tables_of(run: Run, rules: Container[str] | None = None) -> Iterator[ResultTable]:
    """Yields the tables of each selection rule: the first one, encoders, other metrics, a search, published numbers.

    What oracle selects has its first table alone, unless it is the recipe's own rule. Costs do not depend on the rule:
    they are below the tables of the recipe's own, and so are seeds averaged, if the recipe asks for them.

    `rules`: only these have tables; None: all.
    """
    asked = run.results["recipe"].get("report", {}).get("seeds_averaged")
    for place, rows in enumerate(groups(run.results)):
        rule = rows[0]["selection"]
        if rules is not None and rule not in rules:
            continue
        yield result_table(rows, run.results)
        if rule != ORACLE or rule == own_rule(run.results):
            yield from _more_of(run, rows)
        if asked and place == 0:  # the first tables are those of the recipe's own rule
            yield from _given(averaged_table(run))
        if rule == own_rule(run.results):
            yield from _given(cost_table(rows, run), encoder_table(run.results))
        yield from published_tables(rows, run.results)


def _more_of(run: Run, rows: Sequence[Summary]) -> Iterator[ResultTable]:
    rule, metric = rows[0]["selection"], rows[0]["metric"]
    picked = Picked(run, rule)
    yield from _given(
        further_table(run.results, rule, metric), metric_table(rows, picked), searched_table(rows, picked)
    )


def _given(*tables: ResultTable | None) -> Iterator[ResultTable]:
    return (table for table in tables if table is not None)


def markdown_table(shown: ResultTable) -> list[str]:
    """Returns the lines of a table with its heading, the lines about it, and its notes."""
    lines = [f"{'#' * shown.level} {escape(shown.heading)}", ""]
    for what, text in shown.about:
        lines += [f"**{what}:** {escape(text)}", ""]
    lines += [_row(shown.header), "|" + "---|" * shown.labels + "---:|" * (len(shown.header) - shown.labels)]
    lines += [_row(row) for row in shown.rows] + [""]
    notes = [f"- **{escape(methods)}**: {escape(note)}" for methods, note in shown.notes]
    return [*lines, *notes, ""] if notes else lines


def escape(text: str) -> str:
    """Escapes what Markdown would interpret. An underscore between letters or digits has no meaning there and stays."""
    return re.sub(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])", lambda m: "\\" + m[0], plain(text))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def without_encoders(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the environment without what the table of encoders shows."""
    return {key: value for key, value in environment.items() if key != "encoders"}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
