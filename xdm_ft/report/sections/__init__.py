"""The sections of a report, in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from xdm_ft.core import ORACLE
from xdm_ft.report import PARTS, Section, comparisons
from xdm_ft.report.published import published_section
from xdm_ft.report.sections import about, analysis, audit, predictions, results, selection
from xdm_ft.results.run import Run

AFTER_THE_TABLES = (
    selection.road, results.intervals, predictions.confusion, predictions.other_confusions, predictions.reliability,
    predictions.risk_coverage, predictions.mistakes, selection.search, selection.learning_curves,
    analysis.calibration, analysis.invariance, analysis.divergence, analysis.importance, analysis.embeddings,
)  # fmt: skip
AT_THE_END = about.data, about.reading, about.environment, about.recipe


def sections(run: Run) -> Iterator[Section]:
    """Yields every section that has something to show. Raises `UserError` if a file of the run is damaged."""
    for rule in dict.fromkeys([run.recipe_rule, *run.rules]):
        yield from table_sections(run, [rule])
        if rule == run.recipe_rule:
            yield from filter(None, (panel(run) for panel in AFTER_THE_TABLES))
    yield from audit.audit(run)
    yield from filter(None, (panel(run) for panel in AT_THE_END))


def table_sections(run: Run, rules: Collection[str], with_intervals: bool = False) -> Iterator[Section]:
    """Yields the sections that results.json alone makes, of each of these rules, for a terminal or a paper.

    What oracle selects has its results and differences alone, unless it is the recipe's own rule. Those of other rules
    than the recipe's are diagnostics and have no figures. Seeds averaged read predictions, if the recipe asks
    for them. So does `with_intervals`: the 95% interval of each mean, under the recipe's own rule.
    """
    for rule in (rule for rule in run.rules if rule in rules):
        own = rule == run.recipe_rule
        shown = [results.results(run, rule, with_intervals), comparisons.differences(run, rule)]
        if own or rule != ORACLE:
            shown += [comparisons.encoders_compared(run, rule), comparisons.further_comparisons(run, rule)]
            shown += [results.all_metrics(run, rule)]
            shown += [selection.selected(run, rule)]
        if own:
            shown += [results.averaged(run), results.label_curve(run), results.cost(run), published_section(run, rule)]
        for section in filter(None, shown):
            if own:
                yield section
            else:
                title = section.title if rule in section.title else f"{section.title}, selection: {rule}"
                yield dataclasses.replace(section, id=f"{section.id}-{rule}", title=title, figures=(), part=PARTS[-1])


def brief_sections(run: Run) -> Iterator[Section]:
    """Yields the sections of results.md that results.json alone makes."""
    yield from table_sections(run, run.rules)
    yield from filter(None, (about.reading(run), about.environment(run)))
