"""The sections of a report, in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.published import published_section
from xdm_ft.report.section import Section
from xdm_ft.report.sections import (
    about,
    averaged,
    calibration,
    confusion,
    cost,
    curves,
    differences,
    divergence,
    embeddings,
    importance,
    invariance,
    metrics,
    mistakes,
    reliability,
    results,
    risk_coverage,
    search,
    wise_ft,
)  # fmt: skip


def sections(run: Run) -> Iterator[Section]:
    """Yields every section that has something to show. Raises `UserError` if a file of the run is damaged."""
    for rule in dict.fromkeys([run.own_rule, *run.rules]):
        yield from table_sections(run, [rule])
        if rule == run.own_rule:
            yield from _of_own_rule(run)
    made = about.data(run), about.reading(run), about.environment(run), about.recipe(run)
    yield from (section for section in made if section is not None)


def _of_own_rule(run: Run) -> Iterator[Section]:
    for make in (
        results.intervals, confusion.section, confusion.others_section, reliability.section, risk_coverage.section,
        mistakes.section, search.section, wise_ft.section, curves.section, calibration.section, invariance.section,
        divergence.section, importance.section, embeddings.section,
    ):  # fmt: skip
        if (section := make(run)) is not None:
            yield section


def table_sections(run: Run, rules: Collection[str]) -> Iterator[Section]:
    """Yields the sections that results.json alone makes, of each of these rules, for a terminal or a paper.

    What oracle selects has its results and differences alone, unless it is the recipe's own rule. Those of other rules
    than the recipe's are folded on the page. Seeds averaged read predictions, if the recipe asks for them.
    """
    for rule in (rule for rule in run.rules if rule in rules):
        own = rule == run.own_rule
        made = [results.section(run, rule), differences.section(run, rule)]
        if own or rule != ORACLE:
            made += [differences.further_section(run, rule), metrics.section(run, rule)]
            made += [search.selected_section(run, rule)]
        if own:
            made += [averaged.section(run), cost.section(run), published_section(run, rule)]
        for section in made:
            if section is not None:
                yield section if own else _of_other_rule(section, rule)


def _of_other_rule(section: Section, rule: str) -> Section:
    """The same section below those of the recipe's own rule: folded, and without the figures."""
    title = section.title if rule in section.title else f"{section.title}, selection: {rule}"
    return dataclasses.replace(section, id=f"{section.id}-{rule}", title=title, figures=(), folded=True)


def brief_sections(run: Run) -> Iterator[Section]:
    """Yields the sections of results.md that results.json alone makes."""
    yield from table_sections(run, run.rules)
    yield from (section for section in (about.reading(run), about.environment(run)) if section is not None)
